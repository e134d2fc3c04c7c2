"""The weights that a run starts from, tensor by tensor."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from atoll.config import RunFile
from atoll.errors import ConfigError
from atoll.layout import Layout
from atoll.models import from_config, init
from atoll.models import registry as models
from atoll.versions import weights_file

Tensors = Callable[[], Iterator[tuple[str, Tensor]]]  # the same ones at every call


def source(
    run_file: RunFile, definition: Mapping[str, Any], layout: Layout, *, one_by_one: bool
) -> Tensors:
    """Name and fp32 value of each tensor in the order of `layout`: from a file, or from the seed.

    A `transformers` model is initialised whole by its library; where that must not be
    (`one_by_one`) it is a ConfigError.
    """
    path, seed = run_file.start_from, int(run_file.settings.get("seed", 0))
    tensors: Tensors = lambda: init.initial(definition, layout, seed=seed)  # noqa: E731
    if path is not None:
        tensors = lambda: weights_file.each(path, layout)  # noqa: E731
    elif one_by_one and models.architecture_of(definition) == from_config.NAME:
        raise ConfigError(
            f"model.architecture={from_config.NAME!r} is initialised whole by its library, and no "
            f"process of a sharded run holds the whole model; save initial weights once as a "
            f"safetensors file and start from it (model.start_from)"
        )
    if one_by_one:
        return tensors
    # Its coordinator holds the whole model anyway, so nothing is drawn or read twice.
    whole = dict(tensors())
    return lambda: ((spec.name, whole[spec.name]) for spec in layout.tensors)
