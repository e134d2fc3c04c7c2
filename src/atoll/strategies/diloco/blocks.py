"""Which tensors sync together: a model's blocks, dealt out to fragments.

A pure function of names, sizes, the number of fragments and the pattern, so that coordinator,
islands and proofs cut alike. The order of the tensors does not matter: a layout that is in the
order of its fragments is cut into the same ones.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from atoll.errors import ConfigError
from atoll.layout import Layout, TensorSpec
from atoll.strategies import blocks

Unit = tuple[TensorSpec, ...]  # tensors that stay together


def deal(layout: Layout, count: int, pattern: str) -> list[list[str]]:
    """The names of each fragment's tensors, in the layout's order; ConfigError for too many.

    A block is what shares a name up to its first number (`blocks.0.`, `model.layers.0.`). Blocks
    are dealt out in the order of their numbers: `strided` gives block b to fragment b mod count
    (arXiv 2501.18512, figure 6), `sequential` cuts them into runs of about equally many elements.
    Other tensors go, largest first, to the fragment that is lightest then. In a model without
    blocks every tensor is one.
    """
    units, others = _units(layout)
    if count > len(units):
        raise ConfigError(
            f"num_fragments={count} is more than the {len(units)} blocks of the model, and each "
            f"fragment holds one at least; set it to at most {len(units)}"
        )
    runs = (
        _runs(units, count) if pattern == "sequential" else [units[k::count] for k in range(count)]
    )
    fragments = [[tensor for unit in run for tensor in unit] for run in runs]
    for tensor in sorted(others, key=lambda t: (-len(t.span), t.name)):
        min(fragments, key=_elements).append(tensor)
    return [[t.name for t in sorted(part, key=lambda t: t.offset)] for part in fragments]


def _units(layout: Layout) -> tuple[list[Unit], list[TensorSpec]]:
    """What is dealt out in order, and the tensors that fill up what is lightest."""
    found, others = blocks.of(layout)
    if not found:
        return [(tensor,) for tensor in sorted(others, key=lambda t: blocks.natural(t.name))], []
    return list(found.values()), others


def _elements(tensors: Sequence[TensorSpec]) -> int:
    return sum(len(tensor.span) for tensor in tensors)


def _runs(units: list[Unit], count: int) -> list[list[Unit]]:
    """`units` cut into so many runs, each cut where the elements before it come nearest."""
    before = [0, *accumulate(_elements(unit) for unit in units)]  # elements before each unit
    edges = [0]
    for k in range(1, count):
        # One unit at least for every run, those after this edge included.
        possible = range(edges[-1] + 1, len(units) - (count - k) + 1)
        # Whole numbers: no rounding that another machine may do otherwise.
        edges.append(min(possible, key=lambda i: abs(count * before[i] - k * before[-1])))
    edges.append(len(units))
    return [units[start:stop] for start, stop in pairwise(edges)]
