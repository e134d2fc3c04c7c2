"""Run files as tables: made with a few settings changed, and the manifest that one means."""

import copy
from collections.abc import Mapping
from typing import Any

from atoll import config
from atoll.protocol.manifest import Manifest
from tests.clusters import SMALL, manifest_for

PLAIN: Mapping[str, Any] = {
    "name": "run",
    "stop": {"rounds": 3},
    "model": {"architecture": "custom"},
    "data": {"kind": "synthetic"},
}


def table(own: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A run file with the settings `own`; `changes` by dotted name with `__` for the dot."""
    made = copy.deepcopy({**PLAIN, **own})
    for name, value in changes.items():
        *sections, last = name.split("__")
        place = made
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = copy.deepcopy(value)
    return made


def manifest(file: Mapping[str, Any]) -> Manifest:
    """That of a run file, with the model and data of tests."""
    own = config.parse(dict(file)).settings
    base = manifest_for(SMALL).model_dump(mode="json")
    return Manifest.model_validate(
        {**{k: v for k, v in base.items() if k in ("model", "data")}, **own}
    )
