"""The header of a frame: what the payload is, for whom, and exactly how large.

A `FrameHeader` that exists keeps every rule of the schema. Its JSON is canonical (ASCII, sorted
keys, no spaces): one header has one spelling. `wire.frame.expect` says whether it fits a run.
"""

import json
from dataclasses import astuple, dataclass, fields, replace
from typing import Any, Required, Self, TypedDict, Unpack

from atoll.codecs.base import Codec
from atoll.errors import FrameError
from atoll.layout import Layout
from atoll.rows import RowRange
from atoll.wire import schema
from atoll.wire.schema import TensorRow

KINDS = ("contribution", "weights", "update")
SPELLED_WHERE_NOT_0 = ("fragment", "first")
# Above it the table of tensors is left out, and the layout digest alone speaks for it. The rest of
# the header then always fits the frame's limit of 64 KiB.
MAX_WITH_TABLE_BYTES = 48 * 1024


class Told(TypedDict, total=False):
    """The fields of a header that do not follow from layout and codec; `FrameHeader` says more."""

    kind: Required[str]
    run_id: Required[str]
    manifest_sha256: Required[str]
    round: Required[int]
    worker_id: str | None
    incarnation: int | None
    base_digest: str | None
    result_digest: str | None
    fragment: int
    first: int
    weight: int
    rows: int
    tokens: int
    loss_sum: float
    ranges: tuple[RowRange, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameHeader:
    """What a frame says about its payload before the first byte of it."""

    kind: str
    run_id: str
    manifest_sha256: str
    round: int  # a contribution's round; the version that weights or an update give
    codec: str  # its format: the name and the settings that change the bytes
    elements: int
    layout_digest: str
    payload_bytes: int
    worker_id: str | None = None  # contribution only, as are incarnation and ranges
    incarnation: int | None = None
    base_digest: str | None = None  # published weights this started from or applies to
    result_digest: str | None = None  # published weights after; not in a contribution
    tensors: tuple[TensorRow, ...] | None = None
    fragment: int = 0  # which part of the model the payload is; spelled where it is not 0
    first: int = 0  # contribution only: the first round whose rows it contains; 0: its own
    weight: int = 0
    rows: int = 0
    tokens: int = 0
    loss_sum: float = 0.0
    ranges: tuple[RowRange, ...] = ()

    def __post_init__(self) -> None:
        """Raises FrameError or LayoutMismatch naming the field that breaks its rule."""
        schema.choice("kind", self.kind, among=KINDS)
        schema.run_id(self.run_id)
        schema.sha256("manifest_sha256", self.manifest_sha256)
        schema.word("codec", self.codec)
        schema.sha256("layout_digest", self.layout_digest)
        for name in ("round", "weight", "rows", "tokens", "first"):
            schema.integer(name, getattr(self, name))
        schema.integer("fragment", self.fragment, minimum=-1)
        schema.integer("elements", self.elements, minimum=1)
        schema.integer("payload_bytes", self.payload_bytes, minimum=1)
        schema.real("loss_sum", self.loss_sum)
        if self.tensors is not None:
            schema.tensor_table(self.tensors, elements=self.elements)
        self._check_kind()

    def _check_kind(self) -> None:
        if self.kind == "contribution":
            schema.worker_id(self.worker_id)
            schema.integer("incarnation", self.incarnation, minimum=1)
            schema.sha256("base_digest", self.base_digest)
            schema.absent("result_digest", self.result_digest, kind=self.kind)
            schema.ordered_ranges(self.ranges)
            return
        schema.absent("first", self.first or None, kind=self.kind)
        for name in ("worker_id", "incarnation", "ranges"):
            schema.absent(name, getattr(self, name), kind=self.kind)
        schema.sha256("result_digest", self.result_digest)
        if self.kind == "update":
            schema.sha256("base_digest", self.base_digest)
        else:
            schema.absent("base_digest", self.base_digest, kind=self.kind)

    @classmethod
    def of(cls, layout: Layout, codec: Codec, **told: Unpack[Told]) -> Self:
        """The header of a frame of all of `layout` in `codec`, with the table where it fits."""
        told["loss_sum"] = float(told.get("loss_sum", 0.0))  # a sum of nothing may be a plain 0
        bare = cls(
            codec=codec.format,
            elements=layout.size,
            layout_digest=layout.digest,
            payload_bytes=codec.encoded_bytes(layout.size),
            **told,
        )
        table = tuple((t.name, t.dtype, t.shape) for t in layout.tensors)
        full = replace(bare, tensors=table)
        return full if len(full.to_json()) <= MAX_WITH_TABLE_BYTES else bare

    def table(self) -> list[list[object]] | None:
        """The tensors as `Layout.table` gives them, or None when they were left out."""
        if self.tensors is None:
            return None
        return [[name, dtype, list(shape)] for name, dtype, shape in self.tensors]

    def to_json(self) -> bytes:
        """The one spelling of this header."""
        plain = {name: getattr(self, name) for name in FIELDS}
        plain["ranges"] = [astuple(one) for one in self.ranges]
        for name in SPELLED_WHERE_NOT_0:
            if not plain[name]:
                del plain[name]
        text = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return text.encode("ascii")

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """The header spelled by `data`; refuses any other spelling. Its size is the caller's check.

        Memory is bounded by the length of `data`, never by a number in it.
        """
        found = schema.object_of(data)
        for name in SPELLED_WHERE_NOT_0:
            found.setdefault(name, 0)
        schema.keys(found, known=FIELDS)
        tensors = found["tensors"]
        # Of any type until `__post_init__` has held each field to its rule.
        unchecked: dict[str, Any] = {
            **found,
            "tensors": None if tensors is None else schema.tensor_rows(tensors),
            "ranges": schema.row_ranges(found["ranges"]),
        }
        header = cls(**unchecked)
        if header.to_json() != data:
            raise FrameError(
                "frame header is not in its canonical spelling; "
                "write ASCII JSON with sorted keys and no spaces"
            )
        return header


FIELDS = tuple(field.name for field in fields(FrameHeader))
