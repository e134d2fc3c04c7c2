"""Parts of a loss on groups of ranks of different size, joined by partial sums."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.pools.clip import clip_grad_norm as clip_grad_norm
    from atoll.pools.clip import grad_norm as grad_norm
    from atoll.pools.contributing import contribute_once as contribute_once
    from atoll.pools.counted import Counted as Counted
    from atoll.pools.counted import Through as Through
    from atoll.pools.engine import Engine as Engine
    from atoll.pools.global_sums import global_sum as global_sum
    from atoll.pools.gradcheck.check import check as check
    from atoll.pools.loop import Loop as Loop
    from atoll.pools.provenance import Provenance as Provenance
    from atoll.pools.topology import Topology as Topology
    from atoll.pools.types import Mean as Mean
    from atoll.pools.types import Partial as Partial
    from atoll.pools.types import Replicated as Replicated
    from atoll.pools.types import Total as Total
    from atoll.pools.types import once as once
    from atoll.pools.types import reduce as reduce
    from atoll.pools.world import World as World

# Loaded on first use: an island needs the adapters alone.
_PLACES = {
    "Counted": "counted",
    "Engine": "engine",
    "Loop": "loop",
    "Mean": "types",
    "Partial": "types",
    "Provenance": "provenance",
    "Replicated": "types",
    "Through": "counted",
    "Topology": "topology",
    "Total": "types",
    "World": "world",
    "check": "gradcheck.check",
    "clip_grad_norm": "clip",
    "contribute_once": "contributing",
    "global_sum": "global_sums",
    "grad_norm": "clip",
    "once": "types",
    "reduce": "types",
}
__all__ = list(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'atoll.pools' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"atoll.pools.{_PLACES[name]}"), name)
