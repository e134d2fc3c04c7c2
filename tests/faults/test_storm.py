"""Twenty light workers that join, leave and are killed at random, over real HTTP and gRPC.

What the coordinator says is compared with a model made only of what it acknowledged. Seconds are
ATOLL_STORM_SECONDS (`make storm` sets 60).
"""

import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from atoll.clock import SystemClock
from atoll.errors import StaleGeneration
from atoll.island.link.base import Attendance
from atoll.protocol.messages import (
    BarrierRequest,
    HeartbeatRequest,
    LeaveRequest,
    Ready,
    ReadyRequest,
)
from tests import served
from tests.served import Served, Worker

pytestmark = [pytest.mark.storm, pytest.mark.xdist_group("storm")]

STORM_SECONDS = float(os.environ.get("ATOLL_STORM_SECONDS", "15"))
WORKERS = 20
MIN_WORKERS = 8
# A killed worker is out after the grace second and a tick; the rest is room for a busy machine.
NOTICED_SECONDS = 6.0
CLOCK = SystemClock()


@dataclass(frozen=True)
class Known:
    """What the acknowledgements say of one worker: `moves` tells two looks at it apart."""

    state: str = "out"  # out, joining, in, leaving, killed
    since: float = 0.0
    moves: int = 0


@dataclass
class Model:
    """Who is in by what was acknowledged, and everything that must not happen but did."""

    known: dict[str, Known] = field(default_factory=dict)
    seen: dict[int, tuple[Any, ...]] = field(default_factory=dict)  # members by generation
    newest: int = 0  # the newest generation that anybody was told
    faults: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def move(self, name: str, state: str) -> None:
        with self.lock:
            before = self.known.get(name, Known())
            self.known[name] = Known(state, CLOCK.now(), before.moves + 1)
            self.counts[state] += 1

    def look(self) -> dict[str, Known]:
        with self.lock:
            return dict(self.known)

    def told(self, generation: int) -> None:
        with self.lock:
            self.newest = max(self.newest, generation)

    def fault(self, text: str) -> None:
        with self.lock:
            self.faults.append(text)

    def check(self, ready: Ready, before: dict[str, Known], after: dict[str, Known]) -> None:
        """One sample, asked for between the two looks."""
        still = {name: k for name, k in before.items() if after[name] == k}
        must = {name for name, k in still.items() if k.state == "in"}
        asked = CLOCK.now()
        cannot = {
            name
            for name, k in still.items()
            if k.state == "out" or (k.state == "killed" and asked - k.since > NOTICED_SECONDS)
        }
        names = [worker.worker_id for worker in ready.workers]
        if not must <= set(names) or cannot & set(names):
            self.fault(f"members {names}, acknowledged {sorted(must)}, out {sorted(cannot)}")
        if [w.rank for w in ready.workers] != list(range(len(names))) or names != sorted(names):
            self.fault(f"ranks {[(w.worker_id, w.rank) for w in ready.workers]}")
        if (ready.ready, ready.active_workers) != (len(names) >= ready.min_workers, len(names)):
            self.fault(f"ready {ready}")
        with self.lock:
            frozen = self.seen.setdefault(ready.generation, ready.workers)
            self.counts["samples"] += 1
        if frozen != ready.workers:
            self.fault(f"generation {ready.generation} has {frozen} and {ready.workers}")


class Light:
    """One worker of the storm, on a thread of its own."""

    def __init__(self, model: Model, coordinator: Served, index: int, seed: int) -> None:
        self.name = f"light-{index:02}"
        self.model = model
        self.coordinator = coordinator
        self.random = random.Random(f"{seed}/{index}")
        self.key = self.random.randbytes(32).hex()
        self.worker: Worker | None = None
        self.generation = 0
        self.presence: Attendance | None = None
        model.known[self.name] = Known()

    def run(self, deadline: float) -> None:
        try:
            while CLOCK.now() < deadline:
                self.act()
                CLOCK.sleep(self.random.uniform(0.0, 0.06))  # pace, not synchronisation
        except Exception as error:  # such as Evicted, though it lives: the test names it
            self.model.fault(f"{self.name}: {type(error).__name__}: {error}")

    def act(self) -> None:
        if self.worker is None:
            self.join()
            return
        do = self.random.choices(
            [self.beat, self.beat_of_the_past, self.arrive, self.leave, self.die],
            weights=[10, 6, 4, 1, 1],
        )[0]
        do(self.worker)

    def join(self) -> None:
        self.model.move(self.name, "joining")
        worker = Worker(self.coordinator, self.name, island_key=self.key)
        reply = worker.register(port=1 + self.random.randrange(65535))
        self.adopt(reply.generation)
        self.worker = worker
        self.presence = self.adopting(lambda: worker.link.attend(self.identity(worker)))
        self.model.move(self.name, "in")

    def identity(self, worker: Worker) -> Any:
        return worker.identity(generation=self.generation)

    def adopt(self, generation: int) -> None:
        self.generation = generation
        self.model.told(generation)

    def adopting(self, send: Any) -> Any:
        """Sends in the newest generation this worker knows; what is refused is repeated."""
        while True:
            floor, sent = self.model.newest, self.generation
            try:
                reply = send()
            except StaleGeneration as stale:
                if stale.present <= sent:
                    self.model.fault(f"{sent} was refused for the earlier {stale.present}")
                self.adopt(stale.present)
                self.model.counts["adopted"] += 1
                continue
            if sent < floor:
                self.model.fault(f"{self.name}: {sent} was accepted after {floor} was known")
            return reply

    def beat(self, worker: Worker) -> None:
        reply = self.adopting(
            lambda: worker.link.send(HeartbeatRequest(identity=self.identity(worker)))
        )
        self.adopt(reply.generation)

    def beat_of_the_past(self, worker: Worker) -> None:
        past = self.model.newest - self.random.randint(1, 3)
        if past < 0:
            return
        identity = worker.identity(generation=past)
        try:
            worker.link.send(HeartbeatRequest(identity=identity))
            self.model.fault(f"a message of generation {past} was accepted")
        except StaleGeneration:
            self.model.counts["past refused"] += 1

    def arrive(self, worker: Worker) -> None:
        try:
            worker.link.send(BarrierRequest(name="storm", identity=self.identity(worker)))
        except StaleGeneration as stale:
            self.adopt(stale.present)

    def leave(self, worker: Worker) -> None:
        self.model.move(self.name, "leaving")
        self.adopting(lambda: worker.link.send(LeaveRequest(identity=self.identity(worker))))
        self.model.move(self.name, "out")
        self.hang_up(worker)

    def die(self, worker: Worker) -> None:
        """All its connections end and nothing more is heard of it."""
        self.model.move(self.name, "killed")
        self.hang_up(worker)
        # Some come back at once, in a new incarnation; some only after they were missed.
        CLOCK.sleep(self.random.choice([0.0, 0.3, 1.0, 3.0]))

    def hang_up(self, worker: Worker) -> None:
        worker.link.close()
        self.worker = self.presence = None


def sample(model: Model, coordinator: Served, deadline: float) -> None:
    link = coordinator.link()
    newest = 0
    try:
        while CLOCK.now() < deadline:
            floor = model.newest
            before = model.look()
            ready = link.send(ReadyRequest(min_workers=MIN_WORKERS))
            after = model.look()
            model.check(ready, before, after)
            if ready.generation < max(newest, floor):
                model.fault(f"generation {ready.generation} after {max(newest, floor)}")
            newest = ready.generation
    except Exception as error:
        model.fault(f"sampler: {type(error).__name__}: {error}")


@pytest.fixture(scope="module")
def storm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    model = Model()
    with served.serving(
        tmp_path_factory.mktemp("storm") / "state",
        heartbeat_interval=2.0,
        heartbeat_timeout=10.0,
        membership={"min_workers": WORKERS + 1},  # no round: this is about who is in
    ) as coordinator:
        deadline = CLOCK.now() + STORM_SECONDS
        lights = [Light(model, coordinator, index, seed=1) for index in range(WORKERS)]
        threads = [threading.Thread(target=light.run, args=(deadline,)) for light in lights]
        threads.append(threading.Thread(target=sample, args=(model, coordinator, deadline)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        yield model


def test_nothing_forbidden_happens_in_a_storm(storm: Model) -> None:
    """Ranks, generations and readiness are those of the acknowledged history at every sample."""
    assert storm.faults == []


def test_storm_is_one(storm: Model) -> None:
    """The control: everything that could go wrong was tried often."""
    tried = {name: storm.counts[name] for name in ("in", "out", "killed", "adopted", "samples")}

    assert min(tried.values()) >= STORM_SECONDS, tried
    assert storm.counts["past refused"] >= 5 * STORM_SECONDS
    assert len(storm.seen) >= 2 * STORM_SECONDS


def test_model_of_the_storm_finds_what_is_wrong(storm: Model) -> None:
    """The control of the checks themselves: a changed sample is a fault, of each kind."""
    generation, members = max(storm.seen.items(), key=lambda item: len(item[1]))
    good = Ready(
        ready=True,
        active_workers=len(members),
        min_workers=1,
        generation=generation,
        workers=members,
    )
    known = {name: Known("in") for name in (w.worker_id for w in members)}
    first = members[0]
    bad = [
        good.model_copy(update={"ready": False}),
        good.model_copy(update={"workers": members[1:], "active_workers": len(members) - 1}),
        good.model_copy(update={"workers": (first.model_copy(update={"rank": 1}), *members[1:])}),
        good.model_copy(update={"workers": (first.model_copy(update={"port": 9}), *members[1:])}),
    ]
    found = []
    for ready in (good, *bad):
        model = replace(storm, faults=[], seen=dict(storm.seen))
        model.check(ready, known, known)
        found.append(bool(model.faults))

    assert found == [False, True, True, True, True]
