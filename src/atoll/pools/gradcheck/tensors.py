"""Weights and gradients as files, and digests by which replicas and rows are compared.

Tensors of FSDP2 models are made whole, which is a collective: every rank asks in the same order.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from atoll.errors import ConfigError

SEPARATOR = "/"  # between a lane, which is a Python name, and a tensor's name


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, in new memory; tied ones once."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: one.detach().clone().contiguous() for name, one in named.items()}


def fill(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Gives a model that was made anew the weights of another one."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    differing = sorted(
        name
        for name in named.keys() | values.keys()
        if name not in named or name not in values or named[name].shape != values[name].shape
    )
    if differing:
        raise ConfigError(
            f"the model that @loop.model makes has other tensors each time: {differing[:5]}; it "
            f"must be the same but for the values"
        )
    with torch.no_grad():
        for name, one in named.items():
            one.copy_(values[name])


def whole(value: Tensor) -> Tensor:
    """The whole of a DTensor, on every rank; other tensors as they are."""
    # Not by the type: importing DTensor takes most of a second.
    made = cast(Any, value).full_tensor() if hasattr(value, "full_tensor") else value
    return cast(Tensor, made).detach()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of everything that is trained, whole; zeros where there is none, and no zero is negative."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            grad = whole(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            found[name] = (grad + 0.0).contiguous()
    return found


def cast_to(dtype: torch.dtype, value: Any) -> Any:
    """Rows as the check computes: floating tensors in nested lists and dicts, the rest as it is."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) in (list, tuple):
        return type(value)(cast_to(dtype, one) for one in value)
    if type(value) is dict:
        return {key: cast_to(dtype, one) for key, one in value.items()}
    return value


def digest(value: object) -> str:
    """Of the bits of tensors in nested lists and dicts, and of numbers and words among them."""
    hashed = hashlib.sha256()
    _feed(hashed, value)
    return hashed.hexdigest()


def save_lanes(path: Path, lanes: Mapping[str, Mapping[str, Tensor]]) -> None:
    """One file of all lanes' gradients."""
    flat = {
        f"{lane}{SEPARATOR}{name}": one
        for lane, found in lanes.items()
        for name, one in found.items()
    }
    save_file(flat, path)


def load_lanes(path: Path, lanes: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """What `save_lanes` wrote."""
    found: dict[str, dict[str, Tensor]] = {lane: {} for lane in lanes}
    for key, value in load_file(path).items():
        lane, _, name = key.partition(SEPARATOR)
        found[lane][name] = value
    return found


def _feed(hashed: Any, value: object) -> None:
    if isinstance(value, Tensor):
        held = value.detach().cpu().contiguous()
        hashed.update(f"tensor {held.dtype} {tuple(held.shape)} ".encode())
        hashed.update(held.flatten().view(torch.uint8).numpy().tobytes() if held.numel() else b"")
    elif isinstance(value, Mapping):
        hashed.update(f"mapping {len(value)} ".encode())
        for key, one in value.items():
            _feed(hashed, key)
            _feed(hashed, one)
    elif isinstance(value, list | tuple):
        hashed.update(f"sequence {len(value)} ".encode())
        for one in value:
            _feed(hashed, one)
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        hashed.update(f"{type(value).__name__} {value!r} ".encode())
    else:
        hashed.update(f"other {type(value).__name__} ".encode())  # its address is not its value
