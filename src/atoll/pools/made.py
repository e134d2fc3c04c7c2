"""Parameters of a topology: made once, from then on copied as bytes and never made from seeds."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from atoll.errors import ConfigError, LayoutMismatch
from atoll.pools.calls import ByItem, Item, items, named
from atoll.pools.declared import Function
from atoll.pools.topology import Topology

Modules = dict[tuple[str, Item], nn.Module]  # by parameters' name and item


def modules(top: Topology, here: Mapping[str, Mapping[str, Sequence[str]]]) -> Modules:
    """New modules; `here` says, by name, which items of each axis are wanted."""
    found: Modules = {}
    returned: Modules = {}  # held, so that no two have the same id
    for function in top.of_kind("parameters"):
        if function.name not in here:
            continue
        for item in items(function, here[function.name]):
            given = {} if item is None else {str(function.axis): item}
            with named(function, item):
                made = function.call(**given)
            if not isinstance(made, nn.Module):
                raise ConfigError(
                    f"parameters {function.name!r} returned {type(made).__name__}; return an "
                    f"nn.Module, whose parameters are trained"
                )
            returned[function.name, item] = made
            # Of its own memory, since ranks may be threads and the file may have made it once. To
            # the default dtype, whatever made it; buffers of integers stay as they are.
            found[function.name, item] = copy.deepcopy(made).to(torch.get_default_dtype())
    _check_apart(returned)
    return found


def _check_apart(returned: Modules) -> None:
    """A tensor has one name and one owner; within a module it may have several names."""
    held: dict[int, str] = {}
    for key, module in returned.items():
        for name, parameter in module.named_parameters():
            full = f"{prefix(key)}.{name}"
            other = held.setdefault(id(parameter), full)
            if other != full:
                raise ConfigError(
                    f"parameters {full!r} and {other!r} are one tensor; each has one owner, so "
                    f"make new modules in each call, or tie tensors within one module"
                )


def everywhere(top: Topology) -> dict[str, dict[str, Sequence[str]]]:
    """All items of all parameters."""
    whole = {axis.name: axis.items for axis in top.axes.values()}
    return {function.name: dict(whole) for function in top.of_kind("parameters")}


def initial(top: Topology) -> dict[str, Tensor]:
    """The weights that a check starts from, by name; made on one place only, then handed out."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(top.seed)
        return weights(modules(top, everywhere(top)))


def weights(found: Modules) -> dict[str, Tensor]:
    """Copies of all parameters and buffers, by name."""
    return {
        f"{prefix(key)}.{name}": tensor.detach().clone()
        for key, module in found.items()
        for name, tensor in module.state_dict().items()
    }


def fill(found: Modules, given: Mapping[str, Tensor]) -> None:
    """Takes these weights; all that the modules have must be there."""
    for key, module in found.items():
        for name, tensor in module.state_dict().items():
            full = f"{prefix(key)}.{name}"
            if full not in given or given[full].shape != tensor.shape:
                raise LayoutMismatch(
                    f"weights of {full!r} are not given, or not in shape {tuple(tensor.shape)}; "
                    f"the file's parameters differ between two places"
                )
            with torch.no_grad():
                tensor.copy_(given[full])


def trained(found: Modules) -> Iterator[tuple[str, nn.Parameter]]:
    """Name and tensor of all that is trained; a parameter that a module has twice once."""
    for key, module in found.items():
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                yield f"{prefix(key)}.{name}", parameter


def prefix(key: tuple[str, Item]) -> str:
    """How a module's tensors are called."""
    name, item = key
    return name if item is None else f"{name}[{item}]"


def things(found: Modules, functions: Sequence[Function]) -> dict[str, Any]:
    """Modules as functions are given them: one, or one for each item."""
    given: dict[str, Any] = {}
    for function in functions:
        own = {item: one for (name, item), one in found.items() if name == function.name}
        if not own:
            continue
        if function.axis is None:
            given[function.name] = own[None]
        else:
            given[function.name] = ByItem(function.axis, {str(k): one for k, one in own.items()})
    return given
