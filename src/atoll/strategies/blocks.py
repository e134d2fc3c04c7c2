"""A model's blocks, known by the numbers in the names of its tensors.

A block is what shares a name up to its first part that is a number (`blocks.0.`,
`model.layers.0.`): in every model built of layers that is a module of its own.
"""

import re

from atoll.layout import Layout, TensorSpec


def of(layout: Layout) -> tuple[dict[str, tuple[TensorSpec, ...]], list[TensorSpec]]:
    """The blocks by name, in the order of their numbers, and the tensors that are in none."""
    blocks: dict[str, list[TensorSpec]] = {}
    others: list[TensorSpec] = []
    for tensor in layout.tensors:
        block = _block(tensor.name)
        (others if block is None else blocks.setdefault(block, [])).append(tensor)
    return {name: tuple(blocks[name]) for name in sorted(blocks, key=natural)}, others


def natural(name: str) -> tuple[list[tuple[int, str]], str]:
    """A key under which block 10 comes after block 9; no two names share one, as 1 and 01 would."""
    found = re.findall(r"\d+|\D+", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in found], name


def _block(name: str) -> str | None:
    """The name up to its first part that is a number; None: it has none."""
    parts = name.split(".")
    numbered = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return None if numbered is None else ".".join(parts[: numbered + 1])
