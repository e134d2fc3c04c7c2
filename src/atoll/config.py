"""The run file: TOML in, settings out, every broken rule named.

The only source of a run's settings. Turns the file into manifest fields and the few things that
belong to the coordinator's machine alone (paths of weights, data and stores).
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from atoll.data.parts import MIXTURE
from atoll.data.registry import LOCATIONS
from atoll.errors import ConfigError
from atoll.protocol.manifest import DataSettings, Manifest, ModelSettings
from atoll.strategies import registry as strategies

MAX_RUN_FILE_BYTES = 1 << 20

_LOCAL_STORAGE = ("ledger", "blobs")
NOT_IN_FILE = ("settings_authority", "protocol_version", "manifest_version", "manifest_source")


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """A parsed run file."""

    settings: Mapping[str, Any]  # manifest fields, without model and data
    model: Mapping[str, Any]
    data: Mapping[str, Any]
    start_from: Path | None = None  # safetensors file of initial weights
    fingerprint_of: Path | None = None  # safetensors file whose names and shapes are the model's
    data_location: str | None = None  # where the coordinator finds the data's files
    ledger: str | None = None  # None: SQLite in the state directory
    blobs: str | None = None  # None: a directory in the state directory

    def manifest(self, model: ModelSettings, data: DataSettings) -> Manifest:
        """The manifest that this file and the measured identities make."""
        return _validated({**self.settings, "model": model, "data": data})


def load(path: Path) -> RunFile:
    """Reads and checks a run file; ConfigError names the field, the value and the rule."""
    return parse(table_in(path, what="run file"), base=path.parent)


def table_in(path: Path, *, what: str) -> dict[str, Any]:
    """The table of a TOML file of bounded size; ConfigError says of `what` why there is none."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_RUN_FILE_BYTES + 1)
    except OSError as exc:
        raise ConfigError(f"cannot read {what} {str(path)!r}: {exc.strerror}") from exc
    if len(text) > MAX_RUN_FILE_BYTES:
        raise ConfigError(f"{what} {str(path)!r} is larger than {MAX_RUN_FILE_BYTES} bytes")
    try:
        return tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{what} {str(path)!r} is not TOML: {exc}") from exc


def parse(table: Mapping[str, Any], *, base: Path = Path()) -> RunFile:
    """Checks a run file's table; relative paths in it count from `base`."""
    table = {key: dict(value) if isinstance(value, dict) else value for key, value in table.items()}
    strategies.refuse_unknown(table)
    model = _section(table, "model")
    data, location = _data(table, base)
    storage = table.get("storage")
    local = {
        name: _address(_text(storage, name, "storage"), base)
        for name in _LOCAL_STORAGE
        if isinstance(storage, dict)
    }
    start_from = _text(model, "start_from", "model")
    fingerprint_of = _text(model, "fingerprint_of", "model")
    settings = {key: value for key, value in table.items() if key not in ("model", "data")}
    if isinstance(gather := settings.get("gather"), dict):
        settings["gather"] = _with_places(gather, base)
    for name in sorted(settings.keys() & {*NOT_IN_FILE}):
        raise _unknown([name])
    stand_in = ModelSettings(definition=model, layout_digest="0" * 64, initial_digest="0" * 64)
    known = DataSettings(definition=data, identity={})
    made = _validated({**settings, "model": stand_in, "data": known})
    strategies.check_stated(settings)
    strategies.any_of(made)
    return RunFile(
        settings=settings,
        model=model,
        data=data,
        start_from=None if start_from is None else base / start_from,
        fingerprint_of=None if fingerprint_of is None else base / fingerprint_of,
        data_location=location,
        **local,
    )


def _data(table: Mapping[str, Any], base: Path) -> tuple[dict[str, Any], str | None]:
    """The definition of the data, and where this machine has its files."""
    found = table.get("data")
    if not isinstance(found, list):
        data = _section(table, "data")
        place = data.pop("path", None)
        return data, None if place is None else str(base / str(place))
    entries = [dict(entry) for entry in found if isinstance(entry, dict)]
    if len(entries) != len(found) or not entries:
        raise ConfigError("data must be a [data] section, or [[data]] for each of several datasets")
    places = [
        f"{entry.get('name', entry.get('kind'))}={base / str(entry.pop('path'))}"
        for entry in entries
        if "path" in entry
    ]
    return {"kind": MIXTURE, "datasets": entries}, LOCATIONS.join(places) or None


def _address(value: str | None, base: Path) -> str | None:
    """Where ledger or blobs are: a path counts from `base`, wherever the next start is made."""
    if value is None or ":" in value.split("/", 1)[0]:  # a URL
        return value
    return str((base / value).absolute())


def _with_places(gather: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """The section of buckets, where one that is a directory counts from `base` too."""
    buckets = gather.get("buckets")
    if not isinstance(buckets, dict):
        return dict(gather)
    found = {
        name: {**bucket, "url": _address(bucket["url"], base)}
        if isinstance(bucket, dict) and isinstance(bucket.get("url"), str) and bucket["url"]
        else bucket
        for name, bucket in buckets.items()
    }
    return {**gather, "buckets": found}


def _section(table: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = table.get(name)
    if not isinstance(section, dict):
        raise ConfigError(f"the run file has no [{name}] section; every run needs one")
    return section


def _text(section: dict[str, Any], name: str, where: str) -> str | None:
    """Takes a path or address of this machine out of a section."""
    value = section.pop(name, None)
    if value is None or (isinstance(value, str) and value):
        return value
    raise ConfigError(f"{where}.{name}={value!r} must be a path or an address, in quotes")


def _validated(fields: Mapping[str, Any]) -> Manifest:
    try:
        return Manifest.model_validate(dict(fields))
    except ValidationError as exc:
        found = exc.errors(include_url=False)
        # A name that is not known comes first: it may be why another one is missing.
        first = next((error for error in found if error["type"] == "extra_forbidden"), found[0])
        name = ".".join(str(part) for part in first["loc"]) or "run file"
        if first["type"] == "extra_forbidden":
            raise _unknown(first["loc"]) from exc
        if first["type"] == "missing":
            raise ConfigError(f"{name} is missing; every run file sets it") from exc
        rule, value = first["msg"].removeprefix("Value error, "), first["input"]
        shown = "" if isinstance(value, (Mapping, BaseModel)) else f"={value!r}"
        raise ConfigError(f"{name}{shown}: {rule}") from exc


def _unknown(place: Sequence[int | str]) -> ConfigError:
    """Says which settings there are instead of the one at `place`."""
    *sections, _ = place
    model: Any = Manifest
    for section in sections:
        # Of named sections, such as buckets, each one has the same settings.
        named = get_args(model)
        model = named[-1] if named else model.model_fields[section].annotation
    known = {*model.model_fields} - {*NOT_IN_FILE}
    if sections == ["storage"]:
        known.update(_LOCAL_STORAGE)
    where = f"[{'.'.join(map(str, sections))}]" if sections else "the run file"
    name = ".".join(map(str, place))
    return ConfigError(f"{name} is not a setting; {where} knows {', '.join(sorted(known))}")
