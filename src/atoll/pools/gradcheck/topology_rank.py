"""What each rank of a crew does with a topology: some steps of its plan, or of a mutant's."""

import json
import os
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from atoll.collectives.base import Collectives
from atoll.pools import threads
from atoll.pools.engine import Told
from atoll.pools.gradcheck import loading, trial
from atoll.pools.gradcheck.crew_rank import WorldRank
from atoll.pools.gradcheck.loading import Place
from atoll.pools.gradcheck.mutants import catalogue
from atoll.pools.gradcheck.trial import Left
from atoll.pools.plan import Plan, planned
from atoll.pools.topology import Topology
from atoll.pools.trace import Trace

WEIGHTS = "weights.safetensors"
_groups: dict[str, dict[str, Collectives]] = {}  # by the plan that they were made for


def run(world: WorldRank, spec: dict[str, Any], folder: Path) -> None:
    """Leaves this rank's gradients after each step, and what it was told."""
    os.chdir(spec["cwd"])
    sys.path[:] = [*spec["paths"], *(one for one in sys.path if one not in spec["paths"])]
    with loading.default_dtype(getattr(torch, spec["dtype"])):
        plan = _plan(json.dumps(spec["plan"], sort_keys=True))
        if spec["mutant"] is not None:
            plan = catalogue.named(plan, spec["mutant"])
        weights = load_file(folder / WEIGHTS)
        groups = _made(world, plan)
        left = trial.on_rank(plan, groups, weights, rank=world.rank, steps=spec["steps"])
    for step, one in enumerate(left):
        save_file(dict(one.grads), _file(folder, world.rank, step, "safetensors"))
        told = {"losses": one.told.losses, "counts": one.told.counts, "norm": one.norm}
        _file(folder, world.rank, step, "json").write_text(json.dumps(told))


def left_in(folder: Path, rank: int, steps: int) -> list[Left]:
    """What `run` left, read by the process that asked for it."""
    found: list[Left] = []
    for step in range(steps):
        told = json.loads(_file(folder, rank, step, "json").read_text())
        grads = load_file(_file(folder, rank, step, "safetensors"))
        found.append(Left(grads, Told(told["losses"], told["counts"], {}), told["norm"]))
    return found


def plan_spec(place: Place, plan: Plan) -> dict[str, Any]:
    """What another process needs to make the same plan."""
    top = plan.top
    return {
        "path": str(place.path.resolve()),
        "name": place.name,
        "rows": top.num_rows,
        "wire": None if top.wire is None else str(top.wire).removeprefix("torch."),
        "pools": {name: [pool.blocks, pool.ranks] for name, pool in top.pools.items()},
        "trace": plan.trace.to_json(),
    }


@lru_cache(maxsize=4)
def _plan(text: str) -> Plan:
    spec: Mapping[str, Any] = json.loads(text)
    place = Place(Path(spec["path"]), spec["name"])
    top: Topology = loading.load_named(place, Topology, dtype=torch.get_default_dtype())
    wire = None if spec["wire"] is None else getattr(torch, spec["wire"])
    sizes = {name: (blocks, ranks) for name, (blocks, ranks) in spec["pools"].items()}
    sized = top.with_rows(spec["rows"]).with_wire(wire).sized(**sizes)
    return planned(sized, Trace.from_json(spec["trace"]))


def _made(world: WorldRank, plan: Plan) -> dict[str, Collectives]:
    """Process groups are made once for each division of the ranks; all ranks are asked alike."""
    key = json.dumps(plan.placement.groups())
    if key not in _groups:
        _groups[key] = threads.groups(plan.placement, world.group)
    return _groups[key]


def _file(folder: Path, rank: int, step: int, ending: str) -> Path:
    return folder / f"rank-{rank}-step-{step}.{ending}"
