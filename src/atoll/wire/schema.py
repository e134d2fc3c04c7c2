"""Rules for single fields, and what else the JSON of a header must be.

Owns no header. Every message shows at most a short piece of what was sent, and names the document
`of` which it speaks.
"""

import json
import math
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Annotated, Any

from atoll import ids
from atoll.errors import FrameError, LayoutMismatch
from atoll.rows import RowRange

TensorRow = tuple[str, str, tuple[int, ...]]  # name, dtype, shape

MAX_INT = 2**63 - 1  # what every store and language on the way can hold
MAX_DIMENSIONS = 16
_HEADER = "frame header"


@dataclass(frozen=True)
class Rule:
    """What a field must be, in words and as a check of a value that may be of any type."""

    text: str
    holds: Callable[[Any], object]

    def check(self, name: str, value: object, *, of: str = _HEADER) -> None:
        """FrameError naming the field, unless `value` keeps the rule."""
        if not self.holds(value):
            raise _refusal(name, value, self.text, of=of)


def _refusal(name: str, value: object, text: str, *, of: str = _HEADER) -> FrameError:
    return FrameError(f"{of} {name}={reprlib.repr(value)} must be {text}")


def integer(minimum: int) -> Rule:
    """An integer from `minimum` to 2^63 - 1; True and False are refused."""
    return Rule(
        f"an integer from {minimum} to 2^63 - 1",
        lambda v: type(v) is int and minimum <= v <= MAX_INT,
    )


def one_of(words: Sequence[str]) -> Rule:
    """One of the strings in `words`."""
    return Rule(f"one of {', '.join(words)}", lambda v: v in words)


def matching(pattern: str | re.Pattern[str], text: str) -> Rule:
    """A string that `pattern` matches from end to end."""
    return Rule(text, lambda v: isinstance(v, str) and re.fullmatch(pattern, v))


WHOLE, NATURAL = integer(0), integer(1)
# 1 is refused where 1.0 is meant: a value has one spelling.
REAL = Rule("a finite float", lambda v: type(v) is float and math.isfinite(v))
NORM = Rule("a finite float from 0 on", lambda v: REAL.holds(v) and v >= 0)
TEXT = Rule("a string", lambda v: isinstance(v, str))
TUPLE = Rule("a tuple", lambda v: isinstance(v, tuple))
SHA256 = matching("[0-9a-f]{64}", "64 lower-case hex digits")
WORD = matching("[a-z0-9_]{1,32}", "1 to 32 characters out of a-z 0-9 _")
RUN_ID = matching("[!-~]{1,128}", "1 to 128 printable ASCII characters without spaces")
WORKER_ID = matching(ids.WORKER_ID, "1 to 64 characters out of A-Z a-z 0-9 . _ -")
_DATASET_ID = matching("[0-9a-f]{16}", "16 hex digits")
_RANGE = Rule("[dataset_id, start, stop]", lambda v: isinstance(v, list) and len(v) == 3)
_TENSOR = Rule("[name, dtype, [sizes]]", lambda v: _RANGE.holds(v) and isinstance(v[2], list))

Whole = Annotated[int, WHOLE]
Natural = Annotated[int, NATURAL]
Sha256 = Annotated[str, SHA256]
Word = Annotated[str, WORD]


def object_of(data: bytes, *, of: str = _HEADER) -> dict[str, object]:
    """The JSON object in `data`; refuses duplicate keys, NaN, Infinity and everything not ASCII."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        for key, number in Counter(key for key, _ in pairs).items():
            if number > 1:
                raise FrameError(f"{of} has {reprlib.repr(key)} twice; each key stands once")
        return dict(pairs)

    def no_constant(text: str) -> object:
        raise FrameError(f"{of} holds {text}; numbers must be finite")

    try:
        # Nesting beyond the interpreter's limit, and integers beyond its digit limit, raise here.
        text = data.decode("ascii")
        value = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
    except (ValueError, RecursionError) as exc:
        why = str(exc)[:200] or type(exc).__name__
        raise FrameError(f"{of} is not ASCII JSON ({why}); the sender is damaged") from exc
    if not isinstance(value, dict):
        raise FrameError(f"{of} is {reprlib.repr(value)}; it must be a JSON object")
    return value


def keys(found: dict[str, object], *, known: Sequence[str], of: str = _HEADER) -> None:
    """Refuses an object that has other keys than `known`, naming one."""
    for name in known:
        if name not in found:
            raise FrameError(f"{of} lacks {name!r}; it needs {', '.join(known)}")
    for name in sorted(found.keys() - set(known)):
        raise FrameError(f"{of} has unknown {reprlib.repr(name)}; known are {', '.join(known)}")


def _entries(name: str, value: object, rule: Rule) -> list[Any]:
    """The entries of the list `value` out of JSON, each of which keeps `rule`."""
    if not isinstance(value, list):
        raise _refusal(name, value, f"a list of {rule.text}")
    for entry in value:
        rule.check(f"{name} entry", entry)
    return value


def tensor_rows(value: object) -> tuple[TensorRow, ...]:
    """`[name, dtype, [shape]]` rows out of JSON; their content is checked by `tensor_table`."""
    rows = _entries("tensors", value, _TENSOR)
    return tuple((name, dtype, tuple(shape)) for name, dtype, shape in rows)


def tensor_table(rows: Sequence[TensorRow], *, elements: int) -> None:
    """Refuses a table with duplicate names, too many dimensions or another sum than `elements`."""
    seen: set[str] = set()
    total = 0
    for name, dtype, shape in rows:
        TEXT.check("tensors name", name)
        WORD.check("tensors dtype", dtype)
        for dimension in shape:
            NATURAL.check("tensors dimension", dimension)
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
        total += math.prod(shape)
    if total != elements:
        raise LayoutMismatch(
            f"frame header lists tensors of {total} elements but says elements={elements}; "
            f"they must agree"
        )


def row_ranges(value: object) -> tuple[RowRange, ...]:
    """`[dataset_id, start, stop]` rows out of JSON; `ordered_ranges` says which make sense."""
    entries = _entries("ranges", value, _RANGE)
    for entry in entries:
        WHOLE.check("ranges start", entry[1])
        WHOLE.check("ranges stop", entry[2])
        if entry[1] >= entry[2]:
            raise _refusal("ranges entry", entry, "a range that holds a row")
    return tuple(RowRange(*entry) for entry in entries)


def ordered_ranges(ranges: Sequence[RowRange]) -> None:
    """Refuses ranges unless datasets ascend and the rows of each ascend without overlap."""
    reached, before = 0, ""
    for one in ranges:
        if not (_DATASET_ID.holds(one.dataset_id) and before <= one.dataset_id):
            text = "16 hex digits, in ascending order"
            raise _refusal("ranges dataset_id", one.dataset_id, text)
        if one.dataset_id != before:
            reached, before = 0, one.dataset_id
        if one.start < reached:
            raise _refusal("ranges entry", astuple(one), f"a range of rows from {reached} on")
        reached = one.stop
