"""Named tensors <-> one flat fp32 buffer <-> spans and tiles: the only place offsets are computed.

A layout is a value. It knows no tensor library beyond viewing, and no network. A fragment is a
layout too, so what works on a run's whole buffer works on a fragment's part of it.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from atoll.errors import ConfigError, LayoutMismatch

# Codecs work on groups of this many elements (256 KiB of fp32, so a group stays in cache). Tiles
# are whole groups, hence any tile size gives the same encoded bytes.
GROUP_ELEMENTS = 65_536
# A leaf is the unit of the params digest: at most 4 MiB of fp32, never crossing a tensor.
LEAF_ELEMENTS = 1 << 20
ELEMENT_BYTES = 4
# The default budget of a tile, counted as fp32: a tile stays in cache, and larger ones cost page
# faults (2 MiB is a tenth faster with int8 and takes more memory). Any size gives the same bits.
TILE_BYTES = 1 << 20


def byte_view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy; writing to them writes to it."""
    array: Any = tensor.detach().view(torch.uint8).numpy()
    return memoryview(array)


@dataclass(frozen=True, slots=True)
class Span:
    """A half-open range `[start, stop)` of the flat parameter buffer."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def of(self, flat: Tensor) -> Tensor:
        """This part of a flat buffer; writing to it writes to the buffer."""
        return flat[self.start : self.stop]

    def room(self) -> Tensor:
        """A flat fp32 buffer of this size, not filled."""
        return torch.empty(len(self), dtype=torch.float32)

    @property
    def first_group(self) -> int:
        """Index of the codec group that begins at this span; the span must start on one.

        Groups count from the start of the layout's own buffer. A tile of a fragment is therefore a
        span of the fragment's layout, never of the run's, where a fragment starts anywhere.
        """
        assert self.start % GROUP_ELEMENTS == 0, (self.start, GROUP_ELEMENTS)
        return self.start // GROUP_ELEMENTS


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor's place in the flat buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def span(self) -> Span:
        return Span(self.offset, self.offset + prod(self.shape))


@dataclass(frozen=True)
class Layout:
    """The order, names, shapes and dtypes of a model's parameters."""

    tensors: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, entries: Iterable[tuple[str, Iterable[int], str]]) -> "Layout":
        """A layout of `(name, shape, dtype)` in the given order; refuses duplicates and empties."""
        specs: dict[str, TensorSpec] = {}
        offset = 0
        for name, dims, dtype in entries:
            shape = tuple(int(d) for d in dims)
            if name in specs:
                raise LayoutMismatch(f"tensor {name!r} is listed twice; each name must be unique")
            if any(d < 1 for d in shape):
                raise LayoutMismatch(f"tensor {name!r} has shape {shape}; it must hold elements")
            specs[name] = TensorSpec(name, shape, dtype, offset)
            offset += prod(shape)
        if not specs:
            raise LayoutMismatch("the model has no parameters; there is nothing to train")
        return cls(tuple(specs.values()))

    @classmethod
    def of_tensors(cls, named: Mapping[str, Tensor]) -> "Layout":
        """The layout of named tensors, in their own order."""
        return cls.of((n, t.shape, str(t.dtype).removeprefix("torch.")) for n, t in named.items())

    def ordered(self, names: Iterable[str]) -> "Layout":
        """The same tensors in the order of `names`, each of which must come exactly once."""
        by_name = {t.name: t for t in self.tensors}
        wanted = list(names)
        for name in wanted:
            if name not in by_name:
                raise LayoutMismatch(f"tensor {name!r} is not in this layout; order what it has")
        missing = by_name.keys() - set(wanted)
        if missing:
            raise LayoutMismatch(f"tensor {min(missing)!r} has no place in the order; list it once")
        return _placed(by_name[name] for name in wanted)

    @cached_property
    def size(self) -> int:
        """Elements in the flat buffer."""
        return self.tensors[-1].span.stop

    @property
    def nbytes(self) -> int:
        """Bytes of the flat fp32 buffer."""
        return self.size * ELEMENT_BYTES

    def table(self) -> list[list[object]]:
        """`[name, dtype, [shape]]` rows, as they stand in manifests and frame headers."""
        return [[t.name, t.dtype, list(t.shape)] for t in self.tensors]

    @cached_property
    def digest(self) -> str:
        """sha256 of the table: equal exactly when names, shapes, dtypes and order are."""
        text = json.dumps(self.table(), separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def tiles(self, budget_bytes: int, part: Span | None = None) -> Iterator[Span]:
        """Spans of whole codec groups whose fp32 bytes fit `budget_bytes`, in order.

        They cover the buffer, or only `part`, which must come from `parts` with the same budget.
        """
        step = _tile_elements(budget_bytes)
        whole = Span(0, self.size) if part is None else part
        for start in range(whole.start, whole.stop, step):
            yield Span(start, min(start + step, whole.stop))

    def parts(self, count: int, budget_bytes: int) -> list[Span]:
        """The buffer cut into at most `count` spans of whole tiles, about equally many in each."""
        step = _tile_elements(budget_bytes)
        tiles = -(-self.size // step)
        edges = sorted({tiles * k // count for k in range(count + 1)})
        return [Span(a * step, min(b * step, self.size)) for a, b in pairwise(edges)]

    @cached_property
    def leaves(self) -> tuple[Span, ...]:
        """The spans whose hashes make the params digest: pieces of one tensor each."""
        return tuple(
            Span(start, min(start + LEAF_ELEMENTS, t.span.stop))
            for t in self.tensors
            for start in range(t.span.start, t.span.stop, LEAF_ELEMENTS)
        )

    def name_at(self, offset: int) -> str:
        """The name of the tensor that holds element `offset`."""
        return next(t.name for t in self.tensors if t.span.start <= offset < t.span.stop)

    def zeros(self) -> Tensor:
        """A flat fp32 buffer of zeros."""
        return torch.zeros(self.size, dtype=torch.float32)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Named, shaped views into `flat`; writing to one writes to the buffer."""
        return {t.name: t.span.of(flat).view(t.shape) for t in self.tensors}

    def check_table(self, table: list[list[object]], *, subject: str) -> None:
        """Raises LayoutMismatch naming the first row of `table` that differs from this layout."""
        expected = self.table()
        rule = "names, shapes and dtypes must be the run's"
        for mine, theirs in zip(expected, table, strict=False):
            if mine != theirs:
                raise LayoutMismatch(
                    f"{subject} has {theirs!r} where the run's layout has {mine!r}; {rule}"
                )
        if len(expected) != len(table):
            raise LayoutMismatch(
                f"{subject} lists {len(table)} tensors where the run's layout has {len(expected)}"
            )


@dataclass(frozen=True)
class Fragment:
    """A part of the model that syncs on its own: a layout, and where it lies in the run's buffer.

    Tiles, codec groups, noise and leaves count from the fragment's own first element.
    """

    layout: Layout
    span: Span  # of the run's layout

    def of(self, flat: Tensor) -> Tensor:
        """The fragment's part of the run's flat buffer; writing to it writes to the buffer."""
        return self.span.of(flat)

    def place(self, span: Span) -> Span:
        """Where a span of the fragment lies in the run's flat buffer."""
        return Span(self.span.start + span.start, self.span.start + span.stop)


def cut(layout: Layout, parts: Sequence[Sequence[str]]) -> tuple[Fragment, ...]:
    """The fragments of a run's `layout`, one for each list of tensor names in `parts`.

    The layout must hold the tensors in exactly that order (`Layout.ordered` gives it), so that each
    fragment is one span of the run's buffer and the leaves of all of them are the run's leaves.
    """
    if layout.ordered(name for part in parts for name in part) != layout:
        raise LayoutMismatch(
            "the layout does not hold its tensors in the order of the fragments, so a fragment "
            "would be no single span; order it first (Layout.ordered)"
        )
    specs = iter(layout.tensors)
    fragments: list[Fragment] = []
    start = 0
    for number, part in enumerate(parts):
        if not part:
            raise LayoutMismatch(f"fragment {number} has no tensor; each must hold one at least")
        own = _placed(islice(specs, len(part)))
        fragments.append(Fragment(own, Span(start, start + own.size)))
        start += own.size
    return tuple(fragments)


def _placed(tensors: Iterable[TensorSpec]) -> Layout:
    """The layout of `tensors` one after another, whatever offsets they had before."""
    return Layout.of((t.name, t.shape, t.dtype) for t in tensors)


def _tile_elements(budget_bytes: int) -> int:
    groups = budget_bytes // (GROUP_ELEMENTS * ELEMENT_BYTES)
    if groups < 1:
        raise ConfigError(
            f"tile budget {budget_bytes} bytes is below one group of "
            f"{GROUP_ELEMENTS * ELEMENT_BYTES} bytes; raise it"
        )
    return groups * GROUP_ELEMENTS
