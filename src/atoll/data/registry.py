"""A dataset definition, as it stands in a manifest -> an open dataset.

Owns the names of kinds and of their keys. Paths are not part of a definition: each machine says
where its own copy is.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from atoll.data import text
from atoll.data.base import Dataset
from atoll.data.mixture import Mixture, NamedDataset
from atoll.data.parts import MIXTURE
from atoll.data.synthetic import SyntheticCorpus
from atoll.data.text import TextFiles
from atoll.data.tokens import TokenFile
from atoll.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Kind:
    """How a kind of dataset is opened; its keyword-only parameters are the settings it may have."""

    open: Callable[..., Dataset]
    find: Callable[[str], object] | None = None  # a location as `open` takes it; None: no files

    @property
    def settings(self) -> dict[str, inspect.Parameter]:
        every = inspect.signature(self.open).parameters
        return {name: one for name, one in every.items() if one.kind is one.KEYWORD_ONLY}


KINDS: Mapping[str, Kind] = {
    "synthetic": Kind(SyntheticCorpus),
    "text": Kind(TextFiles, text.find_files),
    "tokens": Kind(TokenFile, Path),
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
    kind, settings = KINDS[name], KINDS[name].settings
    given: dict[str, object] = {}
    for key, value in definition.items():
        if key in settings:
            given[key] = _checked(key, value, settings[key].annotation)
        elif key != "kind":
            raise ConfigError(
                f"data.{key} is not a setting of kind {name!r}; known: {sorted(settings)}"
            )
    for key, setting in settings.items():
        if key not in given and setting.default is setting.empty:
            raise ConfigError(f"data.{key} is missing; kind {name!r} needs it")
    if kind.find is None:
        if location is None:
            return kind.open(**given)
        raise ConfigError(
            f"data location {location!r} is given for kind {name!r}, which is computed; drop it"
        )
    if location is None:
        raise ConfigError(
            f"data of kind {name!r} is in files; no location was given for this machine's copy"
        )
    return kind.open(kind.find(location), **given)


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
    checked = _checked("weight", weight, int)
    if not 1 <= checked <= MAX_WEIGHT:
        raise ConfigError(f"data.weight={weight!r} of {name!r} must be from 1 to {MAX_WEIGHT}")
    return NamedDataset(name, checked, open_dataset(entry, location=places.pop(name, None)))


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


def _checked(key: str, value: object, kind: type[T]) -> T:
    if not isinstance(value, kind) or isinstance(value, bool):
        told = "a whole number" if kind is int else "a string"
        raise ConfigError(f"data.{key}={value!r} must be {told}")
    return value
