"""Whether a transport adds: tried once with numbers whose sums are known, before training does."""

import torch
from torch import Tensor

from atoll.collectives import schedule
from atoll.collectives.base import Collectives, Key
from atoll.errors import ProtocolError

STEP = 0  # training counts from 1


def check_sums(ranks: Collectives, *, group: int) -> None:
    """Returns when ones, added up over all ranks, give as many as there are ranks.

    Called by all ranks at once, before the first step. ProtocolError for a transport that averages,
    loses or doubles, which training would only show as a worse model.
    """
    size = ranks.size
    elements = 2 * size + 1  # parts of different lengths
    own = schedule.cut(elements, size)[ranks.rank]

    whole = torch.ones(elements)
    ranks.all_reduce(_key(group, 0), whole).wait()
    _check("all-reduce", whole, torch.full((elements,), float(size)))

    part = torch.zeros(len(own))
    ranks.reduce_scatter(_key(group, 1), torch.ones(elements), part).wait()
    _check("reduce-scatter", part, torch.full((len(own),), float(size)))

    gathered, numbers = torch.zeros(elements), torch.arange(float(elements))
    ranks.all_gather(_key(group, 2), own.of(numbers).clone(), gathered).wait()
    _check("all-gather", gathered, numbers)


def _key(group: int, unit: int) -> Key:
    return Key(group=group, step=STEP, op="control", unit=unit)


def _check(name: str, found: Tensor, wanted: Tensor) -> None:
    if torch.equal(found, wanted):
        return
    at = int((found != wanted).nonzero()[0])
    cause = "averages" if bool((found == 1).all()) else "loses, doubles or misplaces values"
    raise ProtocolError(
        f"element {at} of the probe's {name} is {float(found[at]):g}, not {float(wanted[at]):g}: "
        f"this transport {cause}; training needs the plain SUM, so choose another one"
    )
