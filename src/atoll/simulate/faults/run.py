"""One seed from its scenario to its verdict."""

import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from atoll import torch_threads
from atoll.simulate.faults import scenario as scenarios
from atoll.simulate.faults import standin
from atoll.simulate.faults.buckets import Servers
from atoll.simulate.faults.fleet import Fleet
from atoll.simulate.faults.host import Host
from atoll.simulate.faults.invariants.base import Violation, check
from atoll.simulate.faults.invariants.checker import Checker
from atoll.simulate.faults.joiners import Joiners
from atoll.simulate.faults.nemesis import Nemesis
from atoll.simulate.faults.network import Network
from atoll.simulate.faults.scenario import Size
from atoll.simulate.faults.world import World
from atoll.strategies import registry

# A FULL commit costs 3 ms on a disk and 0.4 ms here; what a kill leaves is the same.
TMPFS = Path("/dev/shm")
ROUND_SECONDS = 45.0  # a round without faults takes at most so long, with a lost worker
SETTLING_SECONDS = 60.0
REPLAYED_EVERY = 8  # seeds: a replay takes as long as a few rounds; others are audited without


@dataclass(frozen=True)
class Outcome:
    """What a seed came to."""

    seed: int
    islands: int
    rounds: int
    kinds: tuple[str, ...]
    version: int
    digest: str
    trace: str  # hash of all that happened
    virtual_seconds: float
    events: int
    checks: int
    seams: int
    counts: dict[str, int] = field(default_factory=dict)
    invariant: str | None = None  # the one that does not hold
    detail: str = ""
    last: tuple[str, ...] = ()  # the last lines of the history, of a failure

    @property
    def holds(self) -> bool:
        return self.invariant is None


def run(seed: int, size: Size | None = None) -> Outcome:
    """Simulates `seed` and checks every event."""
    base = TMPFS if os.access(TMPFS, os.W_OK) else None
    made = TemporaryDirectory(prefix="atoll-faults-", dir=base, ignore_cleanup_errors=True)
    logger = logging.getLogger("atoll")
    with made as home, torch_threads.kept(), ExitStack() as stack:
        # Thousands of faults would be logged; the history tells them.
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.CRITICAL + 1)
        torch_threads.use(1)
        simulation = _Simulation(World(scenarios.draw(seed, size)), Path(home))
        stack.callback(simulation.host.stop)
        return simulation.run()


class _Simulation:
    """The parts of one seed's world, and the loop that turns it to its end."""

    def __init__(self, world: World, home: Path) -> None:
        made = standin.manifest(world.scenario.settings, world.scenario.data)
        self.world = world
        self.checker = Checker(world, home, registry.of(made))
        servers = Servers(world)
        self.host = Host(world, home, self.checker, servers)
        self.host.create(made)
        network = Network(world, self.host)
        self.fleet = Fleet(world, network, self.host, servers)
        self.nemesis = Nemesis(world, self.host, network, self.fleet, servers)
        self.joiners = Joiners(world, self.host, self.fleet)

    def run(self) -> Outcome:
        found: Violation | None = None
        world, scenario = self.world, self.world.scenario
        try:
            self._run()
        except Violation as violation:
            found = violation
        except Exception as error:
            error.add_note(f"at {world.now:.3f} virtual seconds of seed {scenario.seed}")
            raise
        newest = self.checker.reference.newest
        return Outcome(
            seed=scenario.seed,
            islands=scenario.islands,
            rounds=scenario.rounds,
            kinds=tuple(sorted(scenario.kinds)),
            version=newest.number,
            digest=newest.master_digest,
            trace=world.trace,
            virtual_seconds=world.now,
            events=world.events,
            checks=self.checker.checks,
            seams=self.host.seams_passed,
            counts=dict(sorted(world.counts.items())),
            invariant=found.invariant if found else None,
            detail=found.detail if found else "",
            last=tuple(world.lines) if found else (),
        )

    def _run(self) -> None:
        world, rounds = self.world, self.world.scenario.rounds
        self.host.start()
        for worker_id in self.fleet.workers:
            self.fleet.start(worker_id)
        deadline = float("inf")
        while world.is_faulty or not self._is_finished():
            left = rounds - self.checker.reference.newest.number
            if world.is_faulty and (left <= 2 or world.now >= world.scenario.fault_seconds):
                self.nemesis.end()
                deadline = world.now + SETTLING_SECONDS + ROUND_SECONDS * left
            if world.now > deadline:
                is_up = self.host.coordinator is not None
                states = [r.state for r in self.host.view().rounds.values()] if is_up else None
                raise Violation("liveness", seconds=world.now, left=left, of=rounds, rounds=states)
            world.turn()
        coordinator = self.host.coordinator
        assert coordinator is not None
        self.checker.finished(self.host.view(), coordinator)
        problems = self.host.audit(with_replay=world.scenario.seed % REPLAYED_EVERY == 0)
        check("audit-clean", not problems, problems=problems)

    def _is_finished(self) -> bool:
        coordinator = self.host.coordinator
        return coordinator is not None and coordinator.is_finished()
