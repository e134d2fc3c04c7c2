"""A dataset definition, as it stands in a manifest -> an open dataset.

Owns the names of kinds and of their keys. Paths are not part of a definition: each machine says
where its own copy is.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from atoll.data import text
from atoll.data.base import Dataset
from atoll.data.mixture import Mixture, NamedDataset
from atoll.data.parts import MIXTURE
from atoll.data.synthetic import SyntheticCorpus
from atoll.data.text import TextFiles
from atoll.data.tokens import TokenFile
from atoll.errors import ConfigError


@dataclass(frozen=True)
class Definition:
    """The checked settings of one dataset, by key; every required key is present."""

    kind: str
    integers: Mapping[str, int]
    strings: Mapping[str, str]


@dataclass(frozen=True)
class Kind:
    """What a kind of dataset may be told, and how it is opened."""

    integers: tuple[str, ...]
    open: Callable[[Definition, str | None], Dataset]
    strings: tuple[str, ...] = ()
    optional: frozenset[str] = frozenset()

    @property
    def keys(self) -> tuple[str, ...]:
        return (*self.integers, *self.strings)


def _open_synthetic(definition: Definition, location: str | None) -> Dataset:
    if location is not None:
        raise ConfigError(
            f"data location {location!r} is given for kind 'synthetic', which is computed; drop it"
        )
    return SyntheticCorpus(**definition.integers)


def _open_text(definition: Definition, location: str | None) -> Dataset:
    return TextFiles(text.find_files(_required(location, definition)), **definition.integers)


def _open_tokens(definition: Definition, location: str | None) -> Dataset:
    return TokenFile(
        Path(_required(location, definition)),
        dtype=definition.strings["dtype"],
        **definition.integers,
    )


KINDS: Mapping[str, Kind] = {
    "synthetic": Kind(
        ("seed", "rows", "held_out_rows", "block", "vocab"),
        _open_synthetic,
        optional=frozenset({"vocab"}),
    ),
    "text": Kind(("block", "held_out_rows"), _open_text),
    "tokens": Kind(("block", "held_out_rows", "vocab"), _open_tokens, strings=("dtype",)),
}


def open_dataset(definition: Mapping[str, object], *, location: str | None = None) -> Dataset:
    """Opens the data that `definition` describes; files are read from `location` on this machine.

    Raises ConfigError for an unknown kind or key (listing the known ones), a missing key, a value
    of another type, or files that are absent or too short.
    """
    name = definition.get("kind")
    if name == MIXTURE:
        return _open_mixture(definition, location)
    if not isinstance(name, str) or name not in KINDS:
        raise ConfigError(f"data.kind={name!r} is not known; use one of {sorted(KINDS)}")
    kind = KINDS[name]
    for key in definition:
        if key != "kind" and key not in kind.keys:
            raise ConfigError(
                f"data.{key} is not a setting of kind {name!r}; known: {sorted(kind.keys)}"
            )
    for key in kind.keys:
        if key not in definition and key not in kind.optional:
            raise ConfigError(f"data.{key} is missing; kind {name!r} needs it")
    integers = {key: _integer(key, definition[key]) for key in kind.integers if key in definition}
    strings = {key: _string(key, definition[key]) for key in kind.strings if key in definition}
    return kind.open(Definition(name, integers, strings), location)


MAX_WEIGHT = 2**20
LOCATIONS = ";"  # between the places of several datasets, each `name=place`
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}\Z")


def _open_mixture(definition: Mapping[str, object], location: str | None) -> Mixture:
    entries = definition.get("datasets")
    if set(definition) != {"kind", "datasets"} or not isinstance(entries, (list, tuple)):
        raise ConfigError("data of several datasets is a list of them; write [[data]] for each")
    places = _places(location)
    named = [_open_named(dict(entry), places) for entry in entries]
    if places:
        raise ConfigError(
            f"data locations are given for {sorted(places)}; the run's datasets are "
            f"{[one.name for one in named]}"
        )
    return Mixture(named)


def _open_named(entry: dict[str, object], places: dict[str, str]) -> NamedDataset:
    name, weight = entry.pop("name", entry.get("kind")), entry.pop("weight", 1)
    if not isinstance(name, str) or not _NAME.match(name):
        raise ConfigError(f"data.name={name!r} must be 1 to 64 characters out of A-Z a-z 0-9 . _ -")
    if not 1 <= _integer("weight", weight) <= MAX_WEIGHT:
        raise ConfigError(f"data.weight={weight!r} of {name!r} must be from 1 to {MAX_WEIGHT}")
    opened = open_dataset(entry, location=places.pop(name, None))
    return NamedDataset(name, _integer("weight", weight), opened)


def _places(location: str | None) -> dict[str, str]:
    """`name=place;name=place` by name."""
    places: dict[str, str] = {}
    for item in location.split(LOCATIONS) if location else ():
        name, equals, place = item.partition("=")
        if not equals or not place or name in places:
            raise ConfigError(
                f"data location {item!r} must be name=place, once for each dataset of the run, "
                f"with {LOCATIONS!r} between them"
            )
        places[name] = place
    return places


def _required(location: str | None, definition: Definition) -> str:
    if location is None:
        raise ConfigError(
            f"data of kind {definition.kind!r} is in files and no location was given; say where "
            f"this machine's copy is"
        )
    return location


def _integer(key: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"data.{key}={value!r} must be a whole number")
    return value


def _string(key: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"data.{key}={value!r} must be a string")
    return value
