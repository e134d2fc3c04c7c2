"""Parts of a loss on groups of ranks of different size, joined by partial sums."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.pools.clip import clip_grad_norm as clip_grad_norm
    from atoll.pools.clip import grad_norm as grad_norm
    from atoll.pools.counted import Counted as Counted
    from atoll.pools.counted import Through as Through
    from atoll.pools.engine import Engine as Engine
    from atoll.pools.global_sum import global_sum as global_sum
    from atoll.pools.gradcheck.check import check as check
    from atoll.pools.loop import Loop as Loop
    from atoll.pools.once import contribute_once as contribute_once
    from atoll.pools.topology import Topology as Topology
    from atoll.pools.world import World as World

# Loaded on first use: an island needs the adapters alone.
_PLACES = {
    "Counted": "counted",
    "Engine": "engine",
    "Loop": "loop",
    "Through": "counted",
    "Topology": "topology",
    "World": "world",
    "check": "gradcheck.check",
    "clip_grad_norm": "clip",
    "contribute_once": "once",
    "grad_norm": "clip",
    "global_sum": "global_sum",
}
__all__ = [
    "Counted",
    "Engine",
    "Loop",
    "Through",
    "Topology",
    "World",
    "check",
    "clip_grad_norm",
    "contribute_once",
    "global_sum",
    "grad_norm",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'atoll.pools' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"atoll.pools.{_PLACES[name]}"), name)
