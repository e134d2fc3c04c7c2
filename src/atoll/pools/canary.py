"""Counts that cross with the gradients, on the same arrows, and must arrive whole.

Every so many steps each message and each reduction of gradients carries, beside them, how many rows
of each term they are over. What a plan says of it on paper is what must be found.
"""

from collections.abc import Mapping

from atoll.errors import ProtocolError
from atoll.pools import made
from atoll.pools.coverage import Coverage
from atoll.pools.desk import Desk


def check(desk: Desk, coverage: Coverage) -> None:
    """ProtocolError naming the term whose rows did not all arrive, or arrived more than once."""
    owned = {
        function.name
        for function in desk.top.of_kind("parameters")
        if function.pool == desk.seat.pool
    }
    for key in desk.modules:
        if key[0] in owned:
            module = made.prefix(key)
            counts = desk.param_counts[module].tolist()
            found = dict(zip(desk.terms, counts, strict=True))
            _check(desk, module, found, coverage.expected(desk.seat.rank, module))


def _check(desk: Desk, module: str, found: Mapping[str, float], wanted: Mapping[str, int]) -> None:
    for term in desk.terms:
        if found[term] != wanted.get(term, 0):
            raise ProtocolError(
                f"step {desk.step}, rank {desk.seat.rank} of pool {desk.seat.pool!r}: the gradient "
                f"of term {term!r} at {module!r} is over {found[term]:g} rows and must be over "
                f"{wanted.get(term, 0)}; a message was lost, doubled or averaged, so training stops"
            )
