"""Rules for single header fields: each returns the value it checked, or raises naming the field.

Owns no header. Every message shows at most a short piece of what was sent.
"""

import json
import math
import re
import reprlib
from collections.abc import Sequence
from dataclasses import astuple
from math import prod

from atoll import ids
from atoll.errors import ConfigError, FrameError, LayoutMismatch
from atoll.rows import RowRange

TensorRow = tuple[str, str, tuple[int, ...]]  # name, dtype, shape

MAX_INT = 2**63 - 1  # what every store and language on the way can hold
MAX_DIMENSIONS = 16
_HEX_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_DATASET_ID = re.compile(r"[0-9a-f]{16}\Z")
_WORD = re.compile(r"[a-z0-9_]{1,32}\Z")
_RUN_ID = re.compile(r"[!-~]{1,128}\Z")


def object_of(data: bytes) -> dict[str, object]:
    """The JSON object in `data`; refuses duplicate keys, NaN, Infinity and everything not ASCII."""
    try:
        # Nesting beyond the interpreter's limit, and integers beyond its digit limit, raise here.
        value = json.loads(
            data.decode("ascii"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as exc:
        reason = str(exc)[:200] or type(exc).__name__
        raise FrameError(
            f"frame header is not ASCII JSON ({reason}); the sender is damaged"
        ) from exc
    if not isinstance(value, dict):
        raise FrameError(f"frame header is {reprlib.repr(value)}; it must be a JSON object")
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise FrameError(f"frame header has {reprlib.repr(key)} twice; each key stands once")
        found[key] = value
    return found


def _no_constant(text: str) -> object:
    raise FrameError(f"frame header holds {text}; numbers must be finite")


def keys(found: dict[str, object], *, known: Sequence[str]) -> None:
    """Refuses an object that has other keys than `known`, naming one."""
    for name in known:
        if name not in found:
            raise FrameError(f"frame header lacks {name!r}; it needs {', '.join(known)}")
    for name in found:
        if name not in known:
            raise FrameError(
                f"frame header has unknown {reprlib.repr(name)}; known are {', '.join(known)}"
            )


def _refuse(name: str, value: object, rule: str) -> FrameError:
    return FrameError(f"frame header {name}={reprlib.repr(value)} must be {rule}")


def integer(name: str, value: object, *, minimum: int = 0) -> int:
    """An integer from `minimum` to 2^63 - 1; True and False are refused."""
    if type(value) is not int or not minimum <= value <= MAX_INT:
        raise _refuse(name, value, f"an integer from {minimum} to 2^63 - 1")
    return value


def real(name: str, value: object) -> float:
    """A finite float. 1 is refused where 1.0 is meant: a value has one spelling."""
    if type(value) is not float or not math.isfinite(value):
        raise _refuse(name, value, "a finite float")
    return value


def text(name: str, value: object) -> str:
    """Any string."""
    if not isinstance(value, str):
        raise _refuse(name, value, "a string")
    return value


def _matching(pattern: re.Pattern[str], name: str, value: object, rule: str) -> str:
    if not isinstance(value, str) or not pattern.match(value):
        raise _refuse(name, value, rule)
    return value


def sha256(name: str, value: object) -> str:
    """64 lower-case hex digits."""
    return _matching(_HEX_SHA256, name, value, "64 lower-case hex digits")


def word(name: str, value: object) -> str:
    """A short lower-case name."""
    return _matching(_WORD, name, value, "1 to 32 characters out of a-z 0-9 _")


def choice(name: str, value: object, *, among: Sequence[str]) -> None:
    """One of the strings in `among`."""
    if value not in among:
        raise _refuse(name, value, f"one of {', '.join(among)}")


def run_id(value: object) -> str:
    """1 to 128 printable ASCII characters without spaces."""
    rule = "1 to 128 printable ASCII characters without spaces"
    return _matching(_RUN_ID, "run_id", value, rule)


def worker_id(value: object) -> str:
    """A worker_id by the rule of `atoll.ids`."""
    try:
        return ids.worker_id(text("worker_id", value))
    except ConfigError as exc:
        raise _refuse("worker_id", value, "1 to 64 characters out of A-Z a-z 0-9 . _ -") from exc


def absent(name: str, value: object, *, kind: str) -> None:
    """Refuses a field that a frame of this kind does not carry."""
    if value is not None and value != ():
        raise FrameError(
            f"frame header {name}={reprlib.repr(value)} stands in a frame of kind {kind!r}, "
            f"which carries none"
        )


def tensor_rows(value: object) -> tuple[TensorRow, ...]:
    """`[name, dtype, [shape]]` rows out of JSON; their content is checked by `tensor_table`."""
    if not isinstance(value, list):
        raise _refuse("tensors", value, "a list of [name, dtype, shape] or null")
    rows: list[TensorRow] = []
    for row in value:
        if not isinstance(row, list) or len(row) != 3 or not isinstance(row[2], list):
            raise _refuse("tensors row", row, "[name, dtype, [dimensions]]")
        name, dtype, shape = row
        dims = tuple(integer("tensors dimension", dim, minimum=1) for dim in shape)
        rows.append((text("tensors name", name), word("tensors dtype", dtype), dims))
    return tuple(rows)


def tensor_table(rows: Sequence[TensorRow], *, elements: int) -> None:
    """Refuses a table with duplicate names, too many dimensions or another sum than `elements`."""
    seen: set[str] = set()
    total = 0
    for name, _, shape in rows:
        if name in seen:
            raise LayoutMismatch(
                f"frame header lists tensor {reprlib.repr(name)} twice; each name must be unique"
            )
        if len(shape) > MAX_DIMENSIONS:
            raise LayoutMismatch(
                f"frame header gives tensor {reprlib.repr(name)} {len(shape)} dimensions; "
                f"at most {MAX_DIMENSIONS} are allowed"
            )
        seen.add(name)
        total += prod(shape)
    if total != elements:
        raise LayoutMismatch(
            f"frame header lists tensors of {total} elements but says elements={elements}; "
            f"they must agree"
        )


def row_ranges(value: object) -> tuple[RowRange, ...]:
    """`[dataset_id, start, stop]` rows out of JSON; `ordered_ranges` says which make sense."""
    if not isinstance(value, list):
        raise _refuse("ranges", value, "a list of [dataset_id, start, stop]")
    return tuple(map(_row_range, value))


def _row_range(row: object) -> RowRange:
    if not isinstance(row, list) or len(row) != 3:
        raise _refuse("ranges entry", row, "[dataset_id, start, stop]")
    start, stop = integer("ranges start", row[1]), integer("ranges stop", row[2])
    if start >= stop:
        raise _refuse("ranges entry", row, "a range that holds a row")
    return RowRange(text("ranges dataset_id", row[0]), start, stop)


def ordered_ranges(ranges: Sequence[RowRange]) -> None:
    """Refuses ranges unless datasets ascend and the rows of each ascend without overlap."""
    reached, before = 0, ""
    for one in ranges:
        if not (_DATASET_ID.match(one.dataset_id) and before <= one.dataset_id):
            raise _refuse("ranges dataset_id", one.dataset_id, "16 hex digits, in ascending order")
        if one.dataset_id != before:
            reached, before = 0, one.dataset_id
        if one.start < reached:
            raise _refuse("ranges entry", astuple(one), f"a range of rows from {reached} on")
        reached = one.stop
