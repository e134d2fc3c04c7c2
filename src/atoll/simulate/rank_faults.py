"""Sharded runs under faults that a seed draws: kills, stops, joins, a coordinator that dies.

One in three seeds commits by quorum, and ranks are late in it.

The ranks train for real, so a seed takes about a second. Whatever happened, the run must end, its
records must be sound (every row once), its weights must be those of a calm training along the
groups that it records, and no group goes back further than it must.
"""

import random
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from atoll import config, torch_threads
from atoll.config import RunFile
from atoll.errors import AtollError
from atoll.proof import audit as auditing
from atoll.simulate import lineage
from atoll.simulate.cluster import SimulatedCluster
from atoll.simulate.coordinator import stores_in
from atoll.simulate.witness import Witness
from atoll.strategies import registry
from atoll.versions import recorded

HEARTBEAT_TIMEOUT = 2.0
STEP_SECONDS = 0.3
DEADLINE_SECONDS = 3.0


@dataclass(frozen=True)
class Fault:
    """What happens at a moment of the run, and to whom."""

    at: float
    kind: str  # kill | freeze | join | outage | late
    rank: int
    seconds: float  # until it is undone: started again, continued, back


@dataclass(frozen=True)
class Scenario:
    """What a seed stands for."""

    seed: int
    ranks: int
    settings: dict[str, Any]
    faults: tuple[Fault, ...]


@dataclass(frozen=True)
class Outcome:
    """What became of a seed."""

    seed: int
    faults: int
    groups: int
    virtual_seconds: float
    late: int = 0  # how often a rank was late in what is recorded
    problem: str = ""  # empty: all invariants hold


def drawn(seed: int) -> Scenario:
    """The run and the faults of a seed; the same for every caller."""
    draw = random.Random(f"sharded faults {seed}")
    ranks = draw.randint(2, 4)
    settings = {
        "name": f"faults-{seed}",
        "strategy": "sharded",
        "seed": seed,
        "heartbeat_interval": 0.5,
        "heartbeat_timeout": HEARTBEAT_TIMEOUT,
        "model": {
            **{"architecture": "gpt", "vocab": 16, "block": 8, "layers": 2},
            **{"heads": 2, "width": 8},
        },
        "data": {
            **{"kind": "synthetic", "seed": 1, "rows": 500, "held_out_rows": 4},
            **{"block": 8, "vocab": 16},
        },
        "inner": {"batch": draw.randint(1, 7), "lr": 0.01, "clip": 1.0},
        "sharded": {
            "save_every": draw.randint(1, 3),
            "checkpoint_every": draw.randint(1, 3),
            "micro_batches": draw.randint(1, 2),
            "exchange": draw.choice(["ring", "direct"]),
            "deadline_seconds": DEADLINE_SECONDS,
        },
        "membership": {"min_workers": draw.randint(1, 2)},
        "evaluate": {"every": draw.randint(0, 2)},
        "stop": {"rounds": draw.randint(3, 5)},
    }
    faults = []
    for _ in range(draw.randint(1, 4)):
        kind = draw.choice(["kill", "kill", "freeze", "join", "outage"])
        at, seconds = draw.uniform(0.0, 8.0), draw.uniform(0.1, 5.0)
        faults.append(Fault(at, kind, draw.randrange(ranks), seconds))
    # Drawn apart: seeds of earlier stories keep them.
    more = random.Random(f"sharded quorum {seed}")
    if more.randrange(3) == 0:
        own = settings["sharded"]
        assert isinstance(own, dict), own
        own |= {"commit": "quorum", "exchange": "direct"}
        for _ in range(more.randint(1, 4)):
            at, seconds = more.uniform(0.0, 12.0), more.uniform(1.0, 3 * DEADLINE_SECONDS)
            faults.append(Fault(at, "late", more.randrange(ranks), seconds))
    return Scenario(seed, ranks, settings, tuple(sorted(faults, key=lambda fault: fault.at)))


def run(seed: int) -> Outcome:
    """Lives through a seed and checks what it left; an error of the run is a problem, too."""
    scenario = drawn(seed)
    with TemporaryDirectory(prefix="atoll-rank-faults-") as home:
        cluster = _Watched(config.parse(scenario.settings), Path(home))
        cluster.step_seconds = [STEP_SECONDS]
        nemesis = _Nemesis(cluster, scenario)
        try:
            with torch_threads.kept():
                nemesis.begin()
                result = cluster.run(scenario.ranks, lambda _: None)
            _check(Path(home), cluster.witness)
            problem = ""
        except (AtollError, AssertionError) as error:
            problem = f"{type(error).__name__}: {error}"
        groups, late = _recorded(Path(home))
        seconds = result.virtual_seconds if not problem else cluster.scheduler.now()
        return Outcome(seed, len(scenario.faults), groups, seconds, late, problem)


class _Watched(SimulatedCluster):
    """Somebody looks at the records after every step of every rank."""

    def __init__(self, run_file: RunFile, home: Path) -> None:
        super().__init__(run_file, home)
        self.witness = Witness()
        own = run_file.settings["sharded"]
        self._round_steps = own["save_every"] * own["checkpoint_every"]

    def _after_step(self, seconds: float) -> None:
        if self.coordinator.is_away:
            self.witness.is_away()
        else:
            with self.coordinator.now.ledger.reading() as t:
                self.witness.look(t, round_steps=self._round_steps)
        super()._after_step(seconds)


class _Nemesis:
    """Does what the scenario says, each fault in a fiber of its own."""

    def __init__(self, cluster: SimulatedCluster, scenario: Scenario) -> None:
        self._cluster = cluster
        self._scenario = scenario
        self._joined = scenario.ranks

    def begin(self) -> None:
        for number, fault in enumerate(self._scenario.faults):
            self._cluster.scheduler.spawn(f"fault {number}", partial(self._do, fault))

    def _do(self, fault: Fault) -> None:
        cluster, clock = self._cluster, self._cluster.scheduler
        clock.sleep(fault.at)
        if cluster.coordinator.now.is_finished():
            return
        if fault.kind == "join":
            self._joined += 1
            cluster.start(self._joined - 1)
        elif fault.kind == "outage":
            if not cluster.coordinator.is_away:
                cluster.coordinator.go_away(fault.seconds)
        elif fault.kind == "late":
            cluster.delay(fault.rank, fault.seconds)
        elif fault.kind == "freeze":
            cluster.freeze(fault.rank)
            clock.sleep(fault.seconds)
            cluster.thaw(fault.rank)
        elif not cluster.is_down(fault.rank):
            cluster.kill(fault.rank, returns=True)
            clock.sleep(fault.seconds)
            cluster.await_death(fault.rank)
            cluster.start(fault.rank)


def _check(home: Path, witness: Witness) -> None:
    """AssertionError with what does not hold."""
    stores = stores_in(home)
    with closing(stores.ledger), closing(stores.blobs):
        manifest = recorded.manifest_of(stores.ledger)
        assert manifest is not None
        layout = recorded.layout_of(manifest)
        report = auditing.audit(stores.ledger, stores.blobs, layout=layout, with_replay=False)
        assert report.clean, f"the records are not sound: {report.problems}"
        rows = manifest.stop.rounds * manifest.sharded.round_steps * manifest.inner.batch
        with stores.ledger.reading() as t:
            late = [one for checkpoint in t.checkpoints.all() for one in checkpoint.late]
        rows -= sum(map(len, registry.sharded(manifest).late_rows(late)))
        block = int(manifest.data.identity["block"])
        assert report.tokens == rows * block, (
            f"{report.tokens} tokens are recorded, {rows * block} were to be trained"
        )
        with stores.ledger.reading() as t:
            witness.check(t.groups.all())
        again = lineage.retrained(stores.ledger)
        assert report.digest == again, (
            f"the weights are {report.digest}; a calm training along the same groups: {again}"
        )


def _recorded(home: Path) -> tuple[int, int]:
    """How many groups there were, and how often ranks were late."""
    stores = stores_in(home)
    with closing(stores.ledger), closing(stores.blobs), stores.ledger.reading() as t:
        return len(t.groups.all()), sum(len(c.late) for c in t.checkpoints.all())
