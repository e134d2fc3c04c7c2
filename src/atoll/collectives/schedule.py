"""Who sends which part to whom, and in what order: pure functions of rank and size.

A tensor is cut into one part for each rank. Two ways lead to the same bits:

    ring     part k starts at rank k+1 and is added up from neighbour to neighbour until it is whole
             at rank k; gathered parts go round the same way. Each rank talks to two others.
    direct   every rank sends part k to rank k, which adds them up itself.

Both add in the order k+1, k+2, ..., k (ranks count round), because that is what a ring can do.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from atoll.errors import ConfigError
from atoll.layout import Span


def cut(elements: int, size: int) -> list[Span]:
    """One part for each rank, as even as can be: part r is `[r*n//N, (r+1)*n//N)`; may be empty."""
    if size < 1 or elements < 0:
        raise ConfigError(
            f"elements={elements} cannot be cut for size={size} ranks; there must be at least one "
            f"rank and no fewer than 0 elements"
        )
    return [Span(r * elements // size, (r + 1) * elements // size) for r in range(size)]


def order(part: int, size: int) -> list[int]:
    """The canonical order in which the ranks' values of a part are added."""
    return [(part + 1 + k) % size for k in range(size)]


def chunks(span: Span, elements: int) -> Iterator[Span]:
    """The span in pieces of `elements`, the last one shorter; an empty span has none."""
    for start in range(span.start, span.stop, elements):
        yield Span(start, min(start + elements, span.stop))


@dataclass(frozen=True, slots=True)
class Hop:
    """One turn of a ring: a part goes to the next rank while another comes from the one before."""

    sends: int  # part
    receives: int  # part


def ring_reduce(rank: int, size: int) -> list[Hop]:
    """The turns of a reduction; what comes in one, with the own values added, is sent in the next.

    After the last the rank's own part is whole.
    """
    return [Hop((rank - 1 - h) % size, (rank - 2 - h) % size) for h in range(size - 1)]


def ring_gather(rank: int, size: int) -> list[Hop]:
    """The turns of a gather; what comes in one is sent on in the next."""
    return [Hop((rank - h) % size, (rank - 1 - h) % size) for h in range(size - 1)]


def neighbours(rank: int, size: int) -> tuple[int, int]:
    """The ranks before and after this one in the ring."""
    return (rank - 1) % size, (rank + 1) % size


def others(rank: int, size: int) -> Sequence[int]:
    """All other ranks, beginning with the next one, so that not all send to rank 0 at once."""
    return [(rank + 1 + k) % size for k in range(size - 1)]
