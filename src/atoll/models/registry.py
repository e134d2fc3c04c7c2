"""A model definition, as it stands in a manifest -> a module and its layout.

Owns the names of architectures and of their keys. Weights are set by `init` or loaded by whoever
has them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from atoll.errors import ConfigError
from atoll.layout import Layout
from atoll.models.gpt import GPT, GPTConfig

ARCHITECTURES: Mapping[str, tuple[str, ...]] = {
    "gpt": ("vocab", "block", "layers", "heads", "width"),
}


def build(definition: Mapping[str, object]) -> nn.Module:
    """The model that `definition` describes, on the CPU, in fp32, with every weight zero.

    Goes through the meta device, so it draws nothing from the global random state. The weights are
    the caller's to set. Raises ConfigError for an unknown architecture or key, listing the known.
    """
    model = on_meta(definition).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def on_meta(definition: Mapping[str, object]) -> nn.Module:
    """The model without storage: enough for its layout, whatever its size."""
    settings = _check(definition)
    with torch.device("meta"), _NoInit():
        return GPT(GPTConfig(**settings)).to(torch.float32)


class _NoInit(TorchFunctionMode):
    """Leaves parameters as they are made.

    There is nothing to fill on the meta device, and `normal_` there loads torch's compiler, which
    was half of the time a coordinator took to start.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__:
            return given["tensor"] if "tensor" in given else args[0]
        return func(*args, **given)


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


def _check(definition: Mapping[str, object]) -> dict[str, int]:
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
    settings: dict[str, int] = {}
    for key in known:
        value = definition.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(
                f"model.{key}={value!r} must be a whole number; architecture {name!r} needs it"
            )
        settings[key] = value
    return settings
