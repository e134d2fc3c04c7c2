"""The reference under watch: a call must change nothing that others are given, and draw by row.

What one call changes in place, its neighbours on the same rank would see and those on other ranks
would not; what torch's own generator draws depends on which rows a rank has.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from atoll.errors import ConfigError
from atoll.pools.calls import Item
from atoll.pools.declared import Function
from atoll.pools.reference import Reference


class Watched(Reference):
    """ConfigError naming the function that changes what it was given, or draws without `draw`."""

    def _over_items(
        self, function: Function, given: Mapping[str, Any], index: Tensor
    ) -> dict[Item, Any]:
        asked = {name: given[name] for name in function.asks if name in given}
        before = {name: list(_versions(one)) for name, one in asked.items()}
        drawn = torch.get_rng_state()
        found = super()._over_items(function, given, index)
        changed = [name for name, one in asked.items() if list(_versions(one)) != before[name]]
        if changed:
            raise ConfigError(
                f"{function.kind} {function.name!r} changes {changed} in place (of a module its "
                f"buffers too, as BatchNorm does); other ranks would not see it, so leave what is "
                f"given as it is, and keep what changes in a state"
            )
        if not torch.equal(drawn, torch.get_rng_state()):
            raise ConfigError(
                f"{function.kind} {function.name!r} uses torch's own generator (as dropout does), "
                f"whose numbers depend on the division of the rows; ask for `draw`, or use a "
                f"torch.Generator of its own"
            )
        return found


def _versions(thing: Any) -> Iterator[tuple[int, int]]:
    """Of all tensors in what a function is given: who they are, and how often they were changed."""
    if isinstance(thing, Tensor):
        yield id(thing), thing._version
    elif isinstance(thing, nn.Module):
        yield from _versions([*thing.parameters(), *thing.buffers()])
    elif isinstance(thing, Mapping):
        yield from _versions(list(thing.values()))
    elif isinstance(thing, list | tuple):
        for one in thing:
            yield from _versions(one)
