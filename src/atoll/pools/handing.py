"""Weights that pass between a world's ranks as bytes: handed out by one, brought together again.

Never made twice from a seed: whoever makes a module draws from generators of its own process.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from atoll.collectives.base import Collectives, Key
from atoll.errors import AtollError, ConfigError, LayoutMismatch
from atoll.pools import made
from atoll.pools.calls import items
from atoll.pools.desk import GROUP
from atoll.pools.engine import Engine
from atoll.pools.placement import Placement
from atoll.pools.topology import Topology
from atoll.pools.trace import Trace, traced

LIMIT_BYTES = 16 << 20  # of what one rank says: names and shapes
MAKER = 0  # the rank that makes weights
MAX_ERROR = 4000  # characters of why there are none


def handed_out(top: Topology, group: Collectives) -> tuple[dict[str, Tensor], Trace]:
    """The first weights, and the shapes of values, of rank 0; called by all ranks of `group`.

    ConfigError on all of them where rank 0 cannot make them, or where another rank's file declares
    something else. Before any step: it takes the keys of step 0.
    """
    own: dict[str, Any] = {"declares": _declaration(top)}
    weights: dict[str, Tensor] = {}
    if group.rank == MAKER:
        weights, told = _made(top)
        own |= told
    said = group.all_gather_bytes(_key(0, 0), json.dumps(own).encode(), limit=LIMIT_BYTES)
    words = [json.loads(word) for word in said]
    _check(words)
    first = words[MAKER]
    if group.rank != MAKER:
        weights = {name: _room(shape, dtype) for name, shape, dtype in first["weights"]}
    for unit, tensor in enumerate(weights.values(), start=1):
        group.broadcast(_key(0, unit), _bytes(tensor), source=MAKER).wait()
    return weights, Trace.from_json(first["trace"])


def brought_together(engine: Engine, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All weights as they are now, on every rank, in the shapes of `like`; once after a step.

    From the first replica of each block; called by all ranks of the world.
    """
    speakers = _speakers(engine.plan.placement)
    own = made.weights(engine.desk.modules)
    found: dict[str, Tensor] = {}
    for unit, (name, shaped) in enumerate(like.items()):
        # The longest: an item may be called like another one with something behind it.
        source = speakers[max((one for one in speakers if name.startswith(one)), key=len)]
        if engine.seat.rank == source:
            found[name] = own[name].contiguous()
        else:
            found[name] = torch.empty_like(shaped, memory_format=torch.contiguous_format)
        key = _key(engine.desk.step + 1, unit)
        engine.desk.world.broadcast(key, _bytes(found[name]), source=source).wait()
    return found


def _made(top: Topology) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights and what the others must know of them, or why there are none."""
    try:
        weights = {name: one.contiguous() for name, one in made.initial(top).items()}
        shapes = [
            [name, list(one.shape), str(one.dtype).removeprefix("torch.")]
            for name, one in weights.items()
        ]
        return weights, {"weights": shapes, "trace": traced(top, weights).to_json()}
    except AtollError as error:
        return {}, {"refused": str(error)[:MAX_ERROR]}


def _declaration(top: Topology) -> dict[str, Any]:
    """What must be the same in all processes; code is taken on trust."""
    return {
        "rows": top.num_rows,
        "seed": top.seed,
        "dtype": str(torch.get_default_dtype()),
        "pools": [[pool.name, pool.blocks, pool.ranks] for pool in top.pools.values()],
        "axes": [[axis.name, list(axis.items), axis.over] for axis in top.axes.values()],
        "functions": [
            [one.kind, one.name, list(one.asks), one.pool, one.coeff, one.once]
            for one in top.functions.values()
        ],
    }


def _check(words: list[dict[str, Any]]) -> None:
    """The same on every rank, for all have heard the same."""
    wanted = words[MAKER]["declares"]
    for rank, word in enumerate(words):
        differing = [what for what, value in wanted.items() if word["declares"].get(what) != value]
        if differing:
            what = differing[0]
            raise ConfigError(
                f"rank {rank} declares {what} {word['declares'].get(what)}, rank {MAKER} "
                f"{wanted[what]}; start all ranks with the same file and sizes"
            )
    if "refused" in words[MAKER]:
        raise ConfigError(f"rank {MAKER}: {words[MAKER]['refused']}")


def _room(shape: list[int], dtype: str) -> Tensor:
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise LayoutMismatch(f"rank {MAKER} has weights of {dtype!r}, which is no dtype of torch")
    return torch.empty(shape, dtype=found)


def _speakers(placement: Placement) -> dict[str, int]:
    """The rank that speaks for a module, by how the names of its tensors begin."""
    found: dict[str, int] = {}
    for function in placement.top.of_kind("parameters"):
        for seat in placement.firsts(function.pool):
            for item in items(function, placement.items(seat)):
                found.setdefault(f"{made.prefix((function.name, item))}.", seat.rank)
    return found


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)


def _key(step: int, unit: int) -> Key:
    return Key(group=GROUP, step=step, op="save", unit=unit)
