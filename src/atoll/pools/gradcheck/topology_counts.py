"""Whether a topology's rows would show a wrong count: ranks must hold different ones somewhere."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from atoll.layout import Span
from atoll.pools.gradcheck.evenness import Evenness, evenness
from atoll.pools.reference import Reference
from atoll.pools.topology import Topology


def judged(top: Topology, weights: Mapping[str, Tensor], sizes: Sequence[Topology]) -> Evenness:
    """Of the counts that the ranks of each term's pool hold at these sizes."""
    one = Reference(top, weights)
    held: dict[str, list[list[int]]] = {}
    by_row: dict[str, list[int]] = {}
    for term in top.of_kind("term"):
        if term.once:
            continue  # one rank counts, whatever the sizes
        rows = [
            one.part(0, Span(row, row + 1), [term.name])[term.name].count
            for row in range(top.num_rows)
        ]
        by_row[term.name] = rows
        held[term.name] = [_by_rank(rows, at.pools[term.pool].ranks) for at in sizes]
    return evenness(held, by_row)


def _by_rank(rows: Sequence[int], ranks: int) -> list[int]:
    each = len(rows) // ranks
    return [sum(rows[rank * each : (rank + 1) * each]) for rank in range(ranks)]
