"""The header of a frame: what the payload is, for whom, and exactly how large.

A `FrameHeader` that exists keeps every rule of the schema. Its JSON is canonical (ASCII, sorted
keys, no spaces): one header has one spelling. `wire.frame.expect` says whether it fits a run.
"""

import json
import reprlib
from dataclasses import astuple, dataclass, fields, replace
from typing import Annotated, Any, Self, get_type_hints

from atoll.codecs.base import Format
from atoll.errors import FrameError
from atoll.layout import Layout
from atoll.rows import RowRange
from atoll.wire import schema
from atoll.wire.schema import Natural, Sha256, TensorRow, Whole, Word

KINDS = ("contribution", "weights", "update")
SPELLED_WHERE_NOT_0 = {"fragment": 0, "first": 0, "residual": 0.0, "carried": 0}
# Above it the table of tensors is left out, and the layout digest alone speaks for it. The rest of
# the header then always fits the frame's limit of 64 KiB.
MAX_WITH_TABLE_BYTES = 48 * 1024

# The rules of the fields that only some kinds carry; in the others they keep their default.
_RULES_OF_KIND: dict[str, dict[str, schema.Rule]] = {
    "contribution": {
        "worker_id": schema.WORKER_ID,
        "incarnation": schema.NATURAL,
        "base_digest": schema.SHA256,
        "first": schema.WHOLE,
        "residual": schema.NORM,
        "carried": schema.WHOLE,
        "ranges": schema.TUPLE,
    },
    "weights": {"result_digest": schema.SHA256},
    "update": {"base_digest": schema.SHA256, "result_digest": schema.SHA256},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """The fields of a header that do not follow from layout and codec; checked in the header."""

    kind: Annotated[str, schema.one_of(KINDS)]
    run_id: Annotated[str, schema.RUN_ID]
    manifest_sha256: Sha256
    round: Whole  # a contribution's round; the version that weights or an update give
    worker_id: str | None = None  # contribution only, as are incarnation and ranges
    incarnation: int | None = None
    base_digest: str | None = None  # published weights this started from or applies to
    result_digest: str | None = None  # published weights after; not in a contribution
    # Which part of the model the payload is; spelled where it is not 0.
    fragment: Annotated[int, schema.integer(-1)] = 0
    first: Whole = 0  # contribution only: the first round whose rows it contains; 0: its own
    # Contribution only: the L2 norm of the whole residual that its island holds after it, and the
    # round of the contribution that left the residual it has taken in. 0: none.
    residual: Annotated[float, schema.NORM] = 0.0
    carried: Whole = 0
    weight: Whole = 0
    rows: Whole = 0
    tokens: Whole = 0
    loss_sum: Annotated[float, schema.REAL] = 0.0
    ranges: tuple[RowRange, ...] = ()

    def header(self, layout: Layout, codec: Format) -> "FrameHeader":
        """The header of a frame of all of `layout` in `codec`, with the table where it fits."""
        told = {field.name: getattr(self, field.name) for field in fields(Told)}
        told["loss_sum"] = float(self.loss_sum)  # a sum of nothing may be a plain 0
        bare = FrameHeader(
            codec=codec.format,
            elements=layout.size,
            layout_digest=layout.digest,
            payload_bytes=codec.encoded_bytes(layout.size),
            **told,
        )
        return bare.with_table(layout)


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameHeader(Told):
    """What a frame says about its payload before the first byte of it."""

    codec: Word  # its format: the name and the settings that change the bytes
    elements: Natural
    layout_digest: Sha256
    payload_bytes: Natural
    tensors: tuple[TensorRow, ...] | None = None

    def __post_init__(self) -> None:
        """Raises FrameError or LayoutMismatch naming the field that breaks its rule."""
        for name, rule in _RULES.items():
            rule.check(name, getattr(self, name))
        rules = _RULES_OF_KIND[self.kind]
        for name, default in _NOT_IN_ALL.items():
            value = getattr(self, name)
            if name in rules:
                rules[name].check(name, value)
            elif value != default:
                raise FrameError(
                    f"frame header {name}={reprlib.repr(value)} stands in a frame of kind "
                    f"{self.kind!r}, which carries none"
                )
        schema.ordered_ranges(self.ranges)
        if self.tensors is not None:
            schema.tensor_table(self.tensors, elements=self.elements)

    def with_table(self, layout: Layout) -> "FrameHeader":
        """This header with the table of `layout` where it fits, else without one."""
        full = replace(self, tensors=tuple((t.name, t.dtype, t.shape) for t in layout.tensors))
        fits = len(full.to_json()) <= MAX_WITH_TABLE_BYTES
        return full if fits else replace(self, tensors=None)

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
        found = {**SPELLED_WHERE_NOT_0, **schema.object_of(data)}
        schema.keys(found, known=FIELDS)
        # Of any type until `__post_init__` has held each field to its rule.
        unchecked: dict[str, Any] = {**found, "ranges": schema.row_ranges(found["ranges"])}
        if found["tensors"] is not None:
            unchecked["tensors"] = schema.tensor_rows(found["tensors"])
        header = cls(**unchecked)
        if header.to_json() != data:
            raise FrameError(
                "frame header is not in its canonical spelling; "
                "write ASCII JSON with sorted keys and no spaces"
            )
        return header


FIELDS = tuple(field.name for field in fields(FrameHeader))
_RULES: dict[str, schema.Rule] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(FrameHeader, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}
_NOT_IN_ALL = {
    field.name: field.default
    for field in fields(FrameHeader)
    if any(field.name in rules for rules in _RULES_OF_KIND.values())
}
