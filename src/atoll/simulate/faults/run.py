"""One seed from its scenario to its verdict."""

import logging
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from atoll import torch_threads
from atoll.simulate.faults import scenario as scenarios
from atoll.simulate.faults import standin
from atoll.simulate.faults.fleet import Fleet
from atoll.simulate.faults.host import Host
from atoll.simulate.faults.invariants.base import Violation
from atoll.simulate.faults.invariants.checker import Checker
from atoll.simulate.faults.loop import EventLoop
from atoll.simulate.faults.nemesis import Nemesis
from atoll.simulate.faults.network import Network
from atoll.simulate.faults.scenario import Scenario, Size
from atoll.strategies import registry

# A FULL commit costs 3 ms on a disk and 0.4 ms here; what a kill leaves is the same.
TMPFS = Path("/dev/shm")
ROUND_SECONDS = 45.0  # a round without faults takes at most so long, with a lost worker
SETTLING_SECONDS = 60.0
AUDITED_EVERY = 8  # seeds: the audit takes as long as a few rounds; of others the row balance


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


def run(seed: int, size: Size | None = None, *, directory: Path | None = None) -> Outcome:
    """Simulates `seed` and checks every event; keeps the state in `directory` if given."""
    scenario = scenarios.draw(seed, size)
    with _somewhere(directory) as home, torch_threads.kept(), _quiet():
        torch_threads.use(1)
        simulation = _Simulation(scenario, home)
        try:
            return simulation.run()
        finally:
            simulation.host.stop()


class _Simulation:
    def __init__(self, scenario: Scenario, home: Path) -> None:
        def stream(name: str) -> random.Random:
            return random.Random(f"{name} {scenario.seed}")

        self.scenario = scenario
        self.loop = EventLoop()
        made = standin.manifest(scenario.settings, scenario.data)
        self.checker = Checker(scenario, home, self.loop, registry.of(made))
        self.host = Host(home, made, self.loop, stream("host"), self.checker)
        network = Network(scenario, self.loop, self.host, stream("network"))
        self.fleet = Fleet(scenario, self.loop, network, self.host, self.checker, stream("fleet"))
        self.nemesis = Nemesis(
            scenario,
            self.loop,
            host=self.host,
            network=network,
            fleet=self.fleet,
            checker=self.checker,
            rng=stream("nemesis"),
        )

    def run(self) -> Outcome:
        invariant, detail = None, ""
        try:
            self._run()
        except Violation as violation:
            invariant, detail = violation.invariant, violation.detail
        except Exception as error:
            error.add_note(f"at {self.loop.now:.3f} virtual seconds of seed {self.scenario.seed}")
            raise
        newest = self.checker.reference.newest
        return Outcome(
            seed=self.scenario.seed,
            islands=self.scenario.islands,
            rounds=self.scenario.rounds,
            kinds=tuple(sorted(self.scenario.kinds)),
            version=newest.number,
            digest=newest.master_digest,
            trace=self.loop.trace,
            virtual_seconds=self.loop.now,
            events=self.loop.events,
            checks=self.checker.checks,
            seams=self.host.seams_passed,
            counts=dict(sorted(self.loop.counts.items())),
            invariant=invariant,
            detail=detail,
            last=tuple(self.loop.lines) if invariant is not None else (),
        )

    def _run(self) -> None:
        self.host.start()
        for worker_id in self.fleet.workers:
            self.fleet.start(worker_id)
        deadline = float("inf")
        while True:
            if self._is_finished() and self.nemesis.is_over:
                break
            if not self.nemesis.is_over and self._faults_are_over():
                self.nemesis.end()
                left = self.scenario.rounds - self.checker.reference.newest.number
                deadline = self.loop.now + SETTLING_SECONDS + ROUND_SECONDS * left
            if self.loop.now > deadline:
                raise Violation("liveness", self._stuck())
            self.loop.turn()
        coordinator = self.host.coordinator
        assert coordinator is not None
        self.checker.finished(self.host.view(), coordinator)
        is_audited = self.scenario.seed % AUDITED_EVERY == 0
        problems = self.host.audit() if is_audited else self.host.balance()
        if problems:
            raise Violation("audit-clean", "; ".join(problems))

    def _is_finished(self) -> bool:
        coordinator = self.host.coordinator
        return coordinator is not None and coordinator.is_finished()

    def _faults_are_over(self) -> bool:
        nearly_done = self.checker.reference.newest.number >= self.scenario.rounds - 2
        return nearly_done or self.loop.now >= self.scenario.fault_seconds

    def _stuck(self) -> str:
        version, rounds = self.checker.reference.newest.number, self.scenario.rounds
        states = (
            {}
            if self.host.coordinator is None
            else {number: row["state"] for number, row in self.host.view().rounds.items()}
        )
        return (
            f"at {self.loop.now:.0f} virtual seconds version {version} of {rounds} is published, "
            f"the rounds are {states}"
        )


@contextmanager
def _somewhere(directory: Path | None) -> Iterator[Path]:
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        yield directory
        return
    base = TMPFS if os.access(TMPFS, os.W_OK) else None
    made = Path(tempfile.mkdtemp(prefix="atoll-faults-", dir=base))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Thousands of faults would be logged; the history tells them."""
    logger = logging.getLogger("atoll")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)
