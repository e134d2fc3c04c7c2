"""The architecture `custom`: workers bring the model's code, a run knows only its tensors.

The definition lists name, dtype and shape of each. That is all the coordinator and audit need, so
they never import a user's code.
"""

import math
from collections.abc import Mapping

from atoll.errors import ConfigError
from atoll.layout import Layout
from atoll.models.construction import MAX_ELEMENTS, check_size, short

NAME = "custom"
KEYS = ("tensors",)
DTYPE = "float32"
MAX_NAME_CHARACTERS = 512
NEEDS_CODE = (
    "the run's model is 'custom': its code is each worker's own; give it to `atoll join` with "
    "--model module:factory, or to run.load(model) in a script"
)


def layout(definition: Mapping[str, object]) -> Layout:
    """The layout that the definition's `tensors` list, in that order."""
    rows = definition.get("tensors")
    if not isinstance(rows, list) or not rows:
        raise ConfigError(
            "model.tensors must list [name, dtype, [shape]] of every parameter of a 'custom' model;"
            " write it, or name a safetensors file in model.fingerprint_of or model.start_from"
        )
    entries: list[tuple[str, list[int], str]] = []
    elements = 0
    for row in rows:
        name, dims = _row(row)
        elements += math.prod(dims)
        check_size(len(entries) + 1, elements, name)
        entries.append((name, dims, DTYPE))
    return Layout.of(entries)


def _row(row: object) -> tuple[str, list[int]]:
    if not isinstance(row, list) or len(row) != 3:
        raise ConfigError(f"model.tensors holds {short(row)}; a row is [name, dtype, [shape]]")
    name, dtype, dims = row
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARACTERS:
        raise ConfigError(
            f"model.tensors holds the name {short(name)}; a name has 1 to "
            f"{MAX_NAME_CHARACTERS} characters"
        )
    if dtype != DTYPE:
        raise ConfigError(
            f"model.tensors has dtype {short(dtype)} for {name!r}; a run's weights are {DTYPE!r}"
        )
    # True is an int to isinstance, but no size.
    if not isinstance(dims, list) or any(
        type(size) is not int or not 1 <= size <= MAX_ELEMENTS for size in dims
    ):
        raise ConfigError(
            f"model.tensors has shape {short(dims)} for {name!r}; it is a list of whole numbers "
            f"of at least 1"
        )
    return name, dims
