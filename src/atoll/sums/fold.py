"""The canonical fold: float addition is not associative, so the order of terms is fixed here.

Owns the order and the kernels that apply it. Every kernel rounds once: a multiply, then an add.
`add(alpha=)`, `addcmul`, `lerp` and `_foreach_*` fuse the two on some CPUs and not on others, so
they give other bits under another instruction set and are not used.
"""

from collections.abc import Iterable
from functools import reduce
from itertools import pairwise
from operator import add, itemgetter

import torch
from torch import Tensor

from atoll.errors import EmptySum, ProtocolError
from atoll.sums import partial
from atoll.sums.partial import PartialSum


def fold(parts: Iterable[tuple[str, PartialSum]]) -> PartialSum:
    """The sum of keyed `parts`, added from the left in the order of their keys.

    The same bits for any arrival order. Keys are compared by code point. Raises ProtocolError when
    a key comes twice and EmptySum when nothing comes at all.
    """
    ordered = sorted(parts, key=itemgetter(0))
    for (before, _), (after, _) in pairwise(ordered):
        if before == after:
            raise ProtocolError(
                f"key {after!r} comes twice in one fold; each term must enter a sum once"
            )
    if not ordered:
        raise EmptySum("a fold got no partial sums; at least one must arrive")
    return reduce(add, (part for _, part in ordered))


def fold_tile(terms: Iterable[tuple[Tensor, int]], *, unit: str) -> PartialSum:
    """The sum of `weight * delta` over one tile, with the sum of the weights as its count.

    `terms` are (delta, weight) with fp32 deltas of one shape, already in canonical order:

        total = (...((w1*d1 + w2*d2) + w3*d3) ...)

    The count is exact; a weight above 2^24 enters its product rounded to fp32.
    Element for element it equals `fold` of the scaled deltas, so any tile size gives the same bits.
    They are taken one at a time: memory is the total and one scratch tile, however many come.

    Aliasing: no delta is written to and the total never shares memory with one. The first delta is
    read when the second arrives, so an iterator that decodes into one buffer must not reuse it for
    the second term; from then on a delta is read before the next is taken.
    """
    total: Tensor | None = None
    is_owned = False  # whether the total is this call's memory and may be added to in place
    scratch: Tensor | None = None
    count = 0
    for delta, weight in terms:
        _check_term(delta, weight, like=total)
        count += weight
        term = delta
        if weight != 1:  # 1 * x is x: that multiply would only cost time
            term = scratch = torch.mul(delta, float(weight), out=scratch)
        if total is None:
            total, is_owned, scratch = term, term is not delta, None
        elif is_owned:
            total.add_(term)
        else:
            total, is_owned = total + term, True
    if total is None:
        raise EmptySum("no contribution was accepted for this tile; the model is unchanged")
    return PartialSum(total if is_owned else total.clone(), count, unit)


def _check_term(delta: Tensor, weight: int, *, like: Tensor | None) -> None:
    partial.check_count("weight", weight)
    if delta.dtype != torch.float32:
        raise ProtocolError(f"a term is {delta.dtype}; tiles are folded in torch.float32")
    if like is not None:
        partial.check_alike(like, delta)
