"""Records <-> rows: the one place that knows how a field is stored.

A record has the fields of its table's columns, in their order. Numbers, text and bytes are stored
as they are, a state by its value, and a tuple as JSON.
"""

import json
import math
from collections.abc import Callable
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

from atoll import canonical
from atoll.errors import StoreError
from atoll.ledger.connection import Row
from atoll.ledger.records import MemberRecord, RankRecord

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R", bound="DataclassInstance")

NESTED = (MemberRecord, RankRecord)  # records that are stored inside others


def values(record: "DataclassInstance") -> dict[str, object]:
    """The columns of `record`; StoreError for a number that not every engine can keep."""
    return {name: _stored(name, getattr(record, name)) for name in record.__dataclass_fields__}


def _stored(name: str, value: object) -> object:
    if isinstance(value, float):
        # SQLite keeps NaN as NULL.
        if not math.isfinite(value):
            raise StoreError(f"{name}={value!r} must be finite to be recorded")
        # SQLite keeps -0.0 as 0; adding 0.0 makes the engines agree and changes no other value.
        return value + 0.0
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, tuple):
        items = [values(item) if isinstance(item, NESTED) else item for item in value]
        return canonical.dumps(items)
    return value


def read(kind: type[R], row: Row) -> R:
    """The record of this kind that `row` holds."""
    found = list(row)
    for place, parse in _parsers(kind):
        found[place] = parse(found[place])
    return kind(*found)


@cache
def _parsers(kind: type["DataclassInstance"]) -> tuple[tuple[int, Callable[[Any], object]], ...]:
    """The fields that are not stored as they are, by their places, and how each is read."""
    hints = get_type_hints(kind)
    parsers = ((i, _parser(hints[name])) for i, name in enumerate(kind.__dataclass_fields__))
    return tuple((place, parse) for place, parse in parsers if parse is not None)


def _item(kind: Any) -> Callable[[Any], object]:
    """How an item of a stored tuple is read."""
    if kind in NESTED:
        return lambda item: kind(**item)
    return tuple if get_origin(kind) is tuple else lambda item: item


def _parser(hint: Any) -> Callable[[Any], object] | None:
    if get_origin(hint) is tuple:
        inside = get_args(hint)[0]
        parse = _item(inside)
        return lambda text: tuple(parse(item) for item in json.loads(text))
    # SQLite has numbers for what is true and false.
    stands_for = isinstance(hint, type) and (hint is bool or issubclass(hint, StrEnum))
    return hint if stands_for else None
