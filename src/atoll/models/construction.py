"""Building a module from a definition that came from elsewhere: limited in size, nothing drawn.

Owns the limits on a model's size and the modes under which a constructor runs. Knows no
architecture.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from atoll.errors import ConfigError

MAX_ELEMENTS = 1 << 40  # 4 TiB of fp32: more than any machine that could hold a copy
# Experts of large mixtures are the most: 61 layers with 256 experts of 3 matrices make 47,000.
MAX_TENSORS = 1 << 17
MAX_BUFFER_ELEMENTS = 1 << 30  # masks and tables a constructor computes; every worker holds them


@contextmanager
def bounded() -> Iterator[None]:
    """Refuses modules beyond the limits, while they are made on the meta device.

    Counts as they come, so that a definition of a billion layers ends at the limit and not with
    the machine's memory. Modules of other threads do not count.
    """
    mine = threading.get_ident()
    tensors = elements = 0

    def count(_module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        nonlocal tensors, elements
        if threading.get_ident() == mine:
            tensors += 1
            elements += parameter.numel()
            check_size(tensors, elements, name)

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def without_storage() -> Iterator[None]:
    """Moves each parameter to the meta device as soon as a module gets it; buffers stay.

    So the storage of one parameter exists at a time. Modules of other threads are left alone.
    """
    mine = threading.get_ident()

    def emptied(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        # One that is there already is tied: it must stay the same object.
        if threading.get_ident() != mine or parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    # Its annotation leaves out that a hook may return another parameter in place of the given one.
    handle = register_module_parameter_registration_hook(emptied)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def check_size(tensors: int, elements: int, name: str) -> None:
    """ConfigError when a model of this size is too large; `name` is its last parameter so far."""
    if tensors > MAX_TENSORS or elements > MAX_ELEMENTS:
        raise ConfigError(
            f"the model holds {tensors} tensors and {elements} parameters at {name!r}; at most "
            f"{MAX_TENSORS} tensors and {MAX_ELEMENTS} are built; make [model] smaller"
        )


def check_buffers(model: nn.Module) -> None:
    """ConfigError when the tables that `model` computes for itself are too large."""
    elements = 0
    for name, buffer in model.named_buffers():
        elements += buffer.numel()
        if elements > MAX_BUFFER_ELEMENTS:
            raise ConfigError(
                f"the model's buffers hold {elements} values at {name!r}; at most "
                f"{MAX_BUFFER_ELEMENTS} are built; make [model] smaller"
            )


def short(value: object) -> str:
    """`value` as an error shows it: cut, because a definition from elsewhere may be long."""
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "…"


@contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """Lets constructors draw from `seed` and gives the global random state back as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class NoInit(TorchFunctionMode):
    """Leaves parameters as they are made; buffers are computed as ever.

    The values come from the coordinator, so drawing them would be lost time, and `normal_` on the
    meta device loads torch's compiler, which was half of the time a coordinator took to start.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        first = given.get("tensor", args[0] if args else None)
        if isinstance(first, nn.Parameter) and _fills(func):
            return first
        return func(*args, **given)


def _fills(func: Callable[..., Any]) -> bool:
    # Methods in place (`normal_`, `fill_`, `copy_`); `requires_grad_` and `__get__` are none.
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    return in_place or getattr(func, "__module__", None) == nn.init.__name__
