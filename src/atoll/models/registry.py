"""A model definition, as it stands in a manifest -> a module and its layout.

Owns the names of architectures and of their keys. Weights are set by `init` or loaded by whoever
has them.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import nn

from atoll.errors import ConfigError
from atoll.layout import Layout
from atoll.models import construction, custom, from_config
from atoll.models.gpt import GPT, GPTConfig

ARCHITECTURES: Mapping[str, tuple[str, ...]] = {
    "gpt": tuple(field.name for field in fields(GPTConfig)),
    from_config.NAME: from_config.KEYS,
    custom.NAME: custom.KEYS,
}


def build(definition: Mapping[str, object]) -> nn.Module:
    """The model that `definition` describes, on the CPU, in fp32, with every weight zero.

    Draws nothing from the global random state. The weights are the caller's to set; buffers are
    computed. Raises ConfigError for an unknown architecture or key, listing the known, and for a
    model whose code is the worker's own.
    """
    if architecture_of(definition) == from_config.NAME:
        model = from_config.build(definition)
    else:
        on_meta(definition)  # within the limits, before anything is allocated
        with construction.NoInit():
            model = GPT(_gpt(definition)).to(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def on_meta(definition: Mapping[str, object]) -> nn.Module:
    """The model without storage: enough for its layout, whatever its size."""
    name = architecture_of(definition)
    if name == custom.NAME:
        raise ConfigError(custom.NEEDS_CODE)
    if name == from_config.NAME:
        return from_config.on_meta(definition)
    config = _gpt(definition)
    try:
        with construction.bounded(), torch.device("meta"), construction.NoInit():
            return GPT(config).to(torch.float32)
    except (RuntimeError, TypeError, OverflowError) as exc:  # sizes beyond 64 bits
        raise ConfigError(
            f"[model] {asdict(config)} is beyond what a tensor can hold; make it smaller"
        ) from exc


def hollow(definition: Mapping[str, object]) -> nn.Module:
    """The model with its buffers computed and its parameters on the meta device.

    For whoever gives each parameter its storage when it is needed; never all of them at once.
    """
    if architecture_of(definition) == from_config.NAME:
        return from_config.hollow(definition)
    return on_meta(definition)  # has no buffers


def layout(definition: Mapping[str, object]) -> Layout:
    """The layout of the model that `definition` describes, without building it."""
    if architecture_of(definition) == custom.NAME:
        return custom.layout(definition)
    return layout_of(on_meta(definition))


def longest(definition: Mapping[str, object]) -> int | None:
    """How many tokens the model reads at most; None where the definition does not say."""
    name = architecture_of(definition)
    if name == from_config.NAME:
        return from_config.longest(definition)
    return None if name == custom.NAME else _gpt(definition).block


def resolved(definition: Mapping[str, Any]) -> dict[str, Any]:
    """The definition as a manifest records it: a `transformers` one with the library's version."""
    made = dict(definition)
    if architecture_of(definition) == from_config.NAME:
        made.setdefault("version", from_config.version())
    return made


def layout_of(model: nn.Module) -> Layout:
    """The layout of the model's parameters in their own order; all must be fp32."""
    named = dict(model.named_parameters())
    for name, parameter in named.items():
        if parameter.dtype != torch.float32:
            raise ConfigError(
                f"parameter {name!r} is {parameter.dtype}; a run's weights are float32; "
                f"convert the model with .float() and train in lower precision by autocast"
            )
    return Layout.of_tensors(named)


def architecture_of(definition: Mapping[str, object]) -> str:
    """The architecture that `definition` names; ConfigError if it or one of its keys is unknown."""
    name = definition.get("architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ConfigError(
            f"model.architecture={name!r} is not known; use one of {sorted(ARCHITECTURES)}"
        )
    known = ARCHITECTURES[name]
    for key in definition:
        if key != "architecture" and key not in known:
            raise ConfigError(
                f"model.{key} is not a setting of architecture {name!r}; known: {sorted(known)}"
            )
    return name


def _gpt(definition: Mapping[str, Any]) -> GPTConfig:
    """The size of a GPT; GPTConfig refuses a size that is missing, as one that is no number."""
    sizes: dict[str, Any] = {key: definition.get(key) for key in ARCHITECTURES["gpt"]}
    return GPTConfig(**{**sizes, "tied": definition.get("tied", False)})
