"""What each rank of a crew does with a loop: the user's step in every lane, and what it left."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from atoll.errors import ConfigError
from atoll.pools.gradcheck import loading, tensors
from atoll.pools.gradcheck.crew_rank import WorldRank
from atoll.pools.gradcheck.loading import Place
from atoll.pools.loop import Loop, Parts, rows_of

WEIGHTS = "weights.safetensors"
GRADS = "grads.safetensors"
LOGGED = ("loss", "losses", "counts", "clip_norm")


def run(world: WorldRank, spec: dict[str, Any], folder: Path) -> None:
    """All lanes of one loop; rank 0 leaves the gradients, every rank its digests and logs."""
    os.chdir(spec["cwd"])
    sys.path[:] = [*spec["paths"], *(one for one in sys.path if one not in spec["paths"])]
    dtype = getattr(torch, spec["dtype"])
    place = Place(Path(spec["path"]), spec["name"])
    loop: Loop = loading.load_named(place, Loop, dtype=dtype)
    weights = load_file(folder / WEIGHTS)
    with loading.default_dtype(dtype):
        found = {
            lane: _lane(loop.whole(), world, weights, coeffs, spec)
            for lane, coeffs in spec["lanes"].items()
        }
    if world.rank == 0:
        tensors.save_lanes(folder / GRADS, {lane: grads for lane, (grads, _) in found.items()})
    told = {lane: said for lane, (_, said) in found.items()}
    result_of(folder, world.rank).write_text(json.dumps(told))


def result_of(folder: Path, rank: int) -> Path:
    """Where a rank writes what it has to say."""
    return folder / f"rank-{rank}.json"


def _lane(
    parts: Parts,
    world: WorldRank,
    weights: Mapping[str, Tensor],
    coeffs: Mapping[str, float],
    spec: Mapping[str, Any],
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The gradients that a step with these coefficients leaves, and what is told of them."""
    model = parts.model()
    tensors.fill(model, weights)
    index = rows_of(world.rank, ranks=world.size, rows=spec["rows"])
    rows = tensors.cast_to(torch.get_default_dtype(), parts.rows(index))
    if tensors.digest(rows) != spec["digests"][world.rank]:
        raise ConfigError(
            f"the rows of rank {world.rank} are other ones than the reference has under the same "
            f"numbers; @loop.rows must give the same for the same index in every process"
        )
    logged = parts.step(model, rows, dict(coeffs))
    grads = tensors.gradients(model)
    digests = {name: tensors.digest(one) for name, one in grads.items()}
    digests |= {
        f"weights of {name}": tensors.digest(tensors.whole(one))
        for name, one in model.named_parameters()
    }
    return grads, {"digests": digests, "logged": _logged(logged)}


def _logged(said: object) -> dict[str, Any] | None:
    """What a step returned, as plain numbers."""
    if said is None:
        return None
    if not isinstance(said, Mapping) or set(said) - set(LOGGED):
        told = sorted(map(str, said)) if isinstance(said, Mapping) else type(said).__name__
        raise ConfigError(
            f"@loop.step returned {told}; it returns None, or a dict of what it logs with some of "
            f"{', '.join(LOGGED)}"
        )
    return {
        key: {str(term): float(one) for term, one in value.items()}
        if isinstance(value, Mapping)
        else float(value)
        for key, value in said.items()
    }
