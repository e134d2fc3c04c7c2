"""Counts that cross with the gradients, on the same arrows, and must arrive whole.

Every so many steps each message and each reduction of gradients carries, beside them, how many rows
of each term they are over. What a plan says of it on paper is what must be found, on every owner.
"""

from collections.abc import Mapping

import torch

from atoll.collectives.base import Key
from atoll.errors import ProtocolError
from atoll.pools import made
from atoll.pools.calls import Item
from atoll.pools.coverage import Coverage
from atoll.pools.declared import Function
from atoll.pools.desk import GROUP, Desk
from atoll.pools.provenance import Provenance
from atoll.pools.types import Partial, Replicated, once, reduce
from atoll.sums.partial import PartialSum


def check(desk: Desk, coverage: Coverage, key: Key) -> None:
    """Called by all ranks after a step in which the canary crossed; all of them raise, or none.

    ProtocolError naming the term whose rows did not all arrive, or arrived more than once.
    """
    wrong = _wrong(desk, coverage)
    votes = torch.tensor([term in wrong for term in desk.terms], dtype=torch.int64)
    desk.world.all_reduce(key, votes).wait()
    named = [term for term, found in zip(desk.terms, votes, strict=True) if int(found)]
    if named:
        here = "; ".join(wrong[term] for term in named if term in wrong)
        raise ProtocolError(
            f"step {desk.step}: gradients of {named} are not over all of their rows, or over some "
            f"more than once{f' ({here})' if here else ''}; a message was lost, doubled or "
            f"averaged, so training stops"
        )


def agree(desk: Desk, function: Function, parts: Mapping[Item, PartialSum], *, unit: int) -> None:
    """The ranks of a term's pool tell each other what their parts are of, before one is divided.

    ProtocolError on all of them where two count other units, or a row of an item is there twice.
    """
    group = desk.groups[function.pool]
    total = torch.zeros(())
    for part in parts.values():
        total = total + part.total.detach().sum()
    units = {part.unit for part in parts.values()}
    count, name = sum(part.count for part in parts.values()), " and ".join(sorted(units))
    rows = desk.seat.rows
    own = Provenance.of(
        function.name,
        rank=desk.seat.rank,
        step=desk.step,
        rows=None if function.once else range(rows.start, rows.stop),
        items=None if function.axis is None else desk.items[function.axis],
    )
    if function.once:
        share = once(Replicated(total, count, name, own), desk.groups[desk.seat.block_group])
    else:
        share = Partial(total, count, name, (own,))
    reduce(share, group, Key(group=GROUP, step=desk.step + 1, op="gather", unit=unit))


def norms(desk: Desk, key: Key) -> dict[str, float]:
    """The 2-norm of each lane's gradient over distinct parameters, on every rank."""
    squares = torch.zeros(len(desk.lanes), dtype=torch.float64)
    if desk.seat.is_first:
        for name in desk.owned:
            squares += desk.param_grads[name].double().square().flatten(1).sum(1)
    desk.world.all_reduce(key, squares).wait()
    return dict(zip(desk.lanes.names, squares.sqrt().tolist(), strict=True))


def _wrong(desk: Desk, coverage: Coverage) -> Mapping[str, str]:
    """What this rank finds, by term."""
    found: dict[str, str] = {}
    rank, pool = desk.seat.rank, desk.seat.pool
    for key in desk.modules:
        if desk.top.functions[key[0]].pool != pool:
            continue
        module = made.prefix(key)
        wanted = coverage.expected(rank, module)
        for term, rows in zip(desk.terms, desk.param_counts[module].tolist(), strict=True):
            if rows != wanted.get(term, 0):
                found[term] = (
                    f"rank {rank} of pool {pool!r} has {rows:g} rows of {term!r} at {module!r}, "
                    f"not {wanted.get(term, 0)}"
                )
    return found
