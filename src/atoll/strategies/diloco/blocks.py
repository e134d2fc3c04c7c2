"""Which tensors sync together: a model's blocks, dealt out to fragments.

A pure function of names, sizes, the number of fragments and the pattern, so that coordinator,
islands and proofs cut alike. The order of the tensors does not matter: a layout that is in the
order of its fragments is cut into the same ones.
"""

import re
from collections.abc import Sequence
from itertools import accumulate, pairwise

from atoll.errors import ConfigError
from atoll.layout import Layout, TensorSpec

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


def numbered(layout: Layout) -> tuple[list[Unit], list[TensorSpec]]:
    """The blocks in the order of their numbers, and the tensors that are in none."""
    blocks: dict[str, list[TensorSpec]] = {}
    others: list[TensorSpec] = []
    for tensor in layout.tensors:
        block = _block(tensor.name)
        (others if block is None else blocks.setdefault(block, [])).append(tensor)
    return [tuple(blocks[name]) for name in sorted(blocks, key=_natural)], others


def _units(layout: Layout) -> tuple[list[Unit], list[TensorSpec]]:
    """The same, where without blocks every tensor is one."""
    blocks, others = numbered(layout)
    if blocks:
        return blocks, others
    return [(tensor,) for tensor in sorted(others, key=lambda t: _natural(t.name))], []


def _block(name: str) -> str | None:
    """The name up to its first part that is a number; None: it has none."""
    parts = name.split(".")
    numbered = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return None if numbered is None else ".".join(parts[: numbered + 1])


def _natural(name: str) -> tuple[list[tuple[int, str]], str]:
    """A key under which block 10 comes after block 9; no two names share one, as 1 and 01 would."""
    found = re.findall(r"\d+|\D+", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in found], name


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
