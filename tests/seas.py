"""A coordinator and real islands on a virtual clock, with faults at chosen calls of their links."""

import random
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from atoll.coordinator import boot
from atoll.coordinator.service import Coordinator
from atoll.errors import CoordinatorUnreachable
from atoll.island import trainer
from atoll.island.run import Run
from atoll.island.state.store import IslandIdentity, IslandStore
from atoll.proof import audit
from atoll.protocol.messages import Identity, RegisterRequest
from atoll.simulate.fibers import Fiber, Scheduler
from atoll.simulate.link import MemoryLink
from atoll.traffic import Traffic
from atoll.versions import recorded
from tests import clusters, links
from tests.ledgers import alone
from tests.tiny import TABLE

ROUNDS = 2  # the second one shows what the first left in the inner state
STEPS = 2
NAMES = ("a", "b")
RUN_ID = "sea"

Call = Callable[[], Any]
Fault = Callable[["Sea", Call], Any]


def key_of(name: str) -> str:
    """The key that every life of an island has."""
    return random.Random(name).randbytes(32).hex()


class Killed(BaseException):
    """Ends one life of an island; like SIGKILL, nothing handles it."""


class Life:
    """One life of an island: fibers that end together as soon as one of them is killed."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.is_killed = False
        self._scheduler = scheduler
        self._fibers: list[Fiber] = []

    def spawn(self, name: str, work: Callable[[], None]) -> Fiber:
        """A fiber of this life."""

        def part() -> None:
            try:
                work()
            except Killed:
                self.is_killed = True
                self._stop()

        fiber = self._scheduler.spawn(name, part)
        self._fibers.append(fiber)
        return fiber

    def last(self, main: Fiber) -> None:
        """Waits for the end of `main`, with which the others end."""
        self._wait_for(lambda: main.done)
        self._stop()
        self._wait_for(lambda: all(fiber.done for fiber in self._fibers))

    def _stop(self) -> None:
        for fiber in self._fibers:
            self._scheduler.stop(fiber)

    def _wait_for(self, holds: Callable[[], bool]) -> None:
        self._scheduler.wait_for(holds, threading.Condition())


class FaultyLink:
    """The in-memory link to whichever coordinator is there, with faults at chosen calls."""

    def __init__(self, sea: "Sea", name: str) -> None:
        self._sea = sea
        self._name = name
        self.traffic = Traffic()

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            link = MemoryLink(lambda: self._sea.coordinator, self._sea.scheduler)
            what = links.NAMES[type(args[0])] if method == "send" else method
            said = vars(args[0]) if method == "download" else kwargs
            return self._sea.through(
                self._name, what, lambda: getattr(link, method)(*args, **kwargs), said
            )

        return call


class Sea:
    """A coordinator and islands that live several lives."""

    def __init__(self, home: Path, **changes: Any) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.home = home
        self.scheduler = Scheduler()
        self.table: dict[str, Any] = {
            **TABLE,
            "evaluate.every": 2,
            "stop.rounds": ROUNDS,
            "heartbeat_timeout": 3.0,
            **changes,
        }
        self.faults: dict[tuple[str, str, int], Fault] = {}
        self.calls: Counter[tuple[str, str]] = Counter()
        self.steps: Counter[str] = Counter()
        self.lives: Counter[str] = Counter()
        self.stale: Counter[str] = Counter()
        self.kwargs: dict[str, Any] = {}
        self.open()

    def open(self, *, new_manifest: bool = False) -> None:
        """A life of the coordinator."""
        self.stores = clusters.stores_in(self.home)
        self.manifest = boot.create_or_check(
            self.stores,
            clusters.run_file(self.table),
            self.scheduler,
            new_run_id=RUN_ID,
            new_manifest=new_manifest,
        )
        self.coordinator: Coordinator = boot.open_coordinator(self.stores, self.scheduler)

    def restart(self, **changes: Any) -> None:
        """Another life of the coordinator; with `changes` under a new manifest."""
        self.stores.ledger.close()
        self.table |= changes
        self.open(new_manifest=bool(changes))

    def through(self, name: str, method: str, call: Call, kwargs: dict[str, Any]) -> Any:
        self.calls[name, method] += 1
        fault = self.faults.get((name, method, self.calls[name, method]))
        if fault is None:
            return call()
        self.kwargs = kwargs
        return fault(self, call)

    def run(self) -> str:
        """Runs to the end; the final digest, of a run that passes its audit."""
        self.scheduler.spawn("coordinator", self._close_rounds)
        fibers = [self.scheduler.spawn(name, self._lives(name)) for name in NAMES]
        self.scheduler.run_until(lambda: all(f.done for f in fibers), limit_seconds=600)
        self.report = report = audit.audit(
            self.stores.ledger,
            self.stores.blobs,
            layout=recorded.layout_of(self.manifest),
            with_replay=True,
        )
        assert report.problems == []
        assert report.digest is not None
        self.status = self.coordinator.status()
        self.made = list(alone(self.stores.ledger).contributions.every())
        self.stores.ledger.close()
        return report.digest

    def identity(self, name: str) -> Identity:
        """What the present life of an island says it is."""
        [worker] = [w for w in alone(self.stores.ledger).members.workers() if w.worker_id == name]
        return Identity(
            run_id=RUN_ID,
            manifest_sha256=self.manifest.sha256(),
            worker_id=name,
            incarnation=worker.incarnation,
            island_key=key_of(name),
            generation=self.coordinator.generation,
        )

    def registration(self, name: str) -> RegisterRequest:
        """What a new life of an island asks for."""
        return RegisterRequest(
            run_id=RUN_ID,
            manifest_sha256=self.manifest.sha256(),
            worker_id=name,
            island_key=key_of(name),
            layout_digest=self.manifest.model.layout_digest,
            data_identity=self.manifest.data.identity,
        )

    def _close_rounds(self) -> None:
        while True:
            self.coordinator.advance()
            self.scheduler.sleep(0.05)

    def _lives(self, name: str) -> Callable[[], None]:
        def work() -> None:
            while True:
                self.lives[name] += 1
                life = Life(self.scheduler)
                life.last(life.spawn(name, partial(self._live, name, life)))
                if not life.is_killed:
                    return

        return work

    def _live(self, name: str, life: Life) -> None:
        store = IslandStore(self.home / name)
        run = Run(
            FaultyLink(self, name),
            store,
            self.scheduler,
            identity=IslandIdentity(name, key_of(name)),
            jitter=random.Random(name),
            spawn=lambda part, work: life.spawn(f"{name} {part}", work),
        )

        def after_step() -> None:
            self.steps[name] += 1
            self.through(name, "step", lambda: self.scheduler.sleep(0.1), {})

        life.spawn(f"{name} pulse", lambda: self._beat(run))
        try:
            trainer.train(run, after_step=after_step)
        finally:
            self.stale[name] += run.stale_rounds
            store.close()

    def _beat(self, run: Run) -> None:
        while True:
            self.scheduler.sleep(run.manifest.heartbeat_interval)
            run.beat()


# Faults


def lost_request(_: Sea, __: Call) -> Any:
    raise CoordinatorUnreachable


def lost_reply(_: Sea, call: Call) -> Any:
    call()
    raise CoordinatorUnreachable


def killed_before(_: Sea, __: Call) -> Any:
    raise Killed


def killed_after(_: Sea, call: Call) -> Any:
    call()
    raise Killed


def coordinator_restarts_before(sea: Sea, _: Call) -> Any:
    sea.restart()
    raise CoordinatorUnreachable


def coordinator_restarts_after(sea: Sea, call: Call) -> Any:
    call()
    sea.restart()
    raise CoordinatorUnreachable


def evicted(sea: Sea, call: Call) -> Any:
    """The coordinator takes `a`, whose presence ended, for dead; `a` goes on with what it does."""
    stream = sea.coordinator.attend(sea.identity("a"), close=lambda: None)
    sea.coordinator.absent(stream)
    while "a" in sea.coordinator.members():
        sea.scheduler.sleep(0.05)
    return call()
