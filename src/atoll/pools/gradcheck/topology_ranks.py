"""Where the ranks of a topology's trials are: threads of this process, or a crew of processes."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from atoll.pools import threads
from atoll.pools.gradcheck import topology_rank, trial
from atoll.pools.gradcheck.crew import Crews
from atoll.pools.gradcheck.loading import Place
from atoll.pools.gradcheck.mutants import catalogue
from atoll.pools.gradcheck.outcome import Outcome
from atoll.pools.plan import Plan

ENTRY = f"{topology_rank.__name__}:run"


class Ranks(Protocol):
    """Ranks that run a plan, or one of its mutants."""

    def run(
        self, plan: Plan, weights: Mapping[str, Tensor], *, steps: int, mutant: str | None = None
    ) -> list[Outcome]:
        """What they leave after each step."""
        ...


class ThreadRanks:
    """All ranks in this process."""

    def run(
        self, plan: Plan, weights: Mapping[str, Tensor], *, steps: int, mutant: str | None = None
    ) -> list[Outcome]:
        """What a file closes over is shared by all of them, which processes would expose."""
        program = plan if mutant is None else catalogue.named(plan, mutant)
        left = threads.on_threads(
            plan.placement,
            lambda rank, groups: trial.on_rank(program, groups, weights, rank=rank, steps=steps),
        )
        return trial.joined(plan.placement, left)


class CrewRanks:
    """A process for each rank, joined by gloo, which loads the file by itself."""

    def __init__(self, crews: Crews, place: Place) -> None:
        self._crews = crews
        self._place = place

    def run(
        self, plan: Plan, weights: Mapping[str, Tensor], *, steps: int, mutant: str | None = None
    ) -> list[Outcome]:
        """The crew of this size is started by the first call and used again by the next ones."""
        crew = self._crews.of(plan.placement.size)
        spec = {
            "cwd": os.getcwd(),
            "paths": sys.path,
            "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
            "plan": topology_rank.plan_spec(self._place, plan),
            "mutant": mutant,
            "steps": steps,
        }
        with TemporaryDirectory(prefix="atoll-topology-") as name:
            folder = Path(name)
            save_file(dict(weights), folder / topology_rank.WEIGHTS)
            crew.run(ENTRY, spec, folder)
            left = [topology_rank.left_in(folder, rank, steps) for rank in range(crew.size)]
        return trial.joined(plan.placement, left)
