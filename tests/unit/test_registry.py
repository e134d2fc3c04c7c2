"""Identity: incarnations, island keys, and who may speak."""

from collections.abc import Callable
from typing import Any

import pytest

from atoll.clock import ManualClock
from atoll.coordinator.members import workers
from atoll.coordinator.members.heartbeats import Heartbeats
from atoll.coordinator.members.workers import Registry, key_hash
from atoll.errors import AtollError, Fenced, TooManyWorkers, UnknownWorker, WorkerTaken
from atoll.ledger import engines
from atoll.ledger.ledger import Ledger
from atoll.protocol.messages import Identity, RegisterRequest
from tests.ledgers import alone

RUN, MANIFEST = "run", "a" * 64
KEY, OTHER_KEY = "1" * 64, "2" * 64
TIMEOUT_SECONDS = 10.0


class Bench:
    """A registry over a ledger in memory, with a clock that a test moves."""

    def __init__(self) -> None:
        self.ledger: Ledger = engines.open_ledger(":memory:")
        self.clock = ManualClock()
        self.open()

    def open(self) -> None:
        self.heartbeats = Heartbeats(self.clock, timeout_seconds=TIMEOUT_SECONDS)
        self.registry = Registry(
            self.ledger, self.heartbeats, self.clock, run_id=RUN, manifest=lambda: MANIFEST
        )

    def register(self, worker_id: str = "a", key: str = KEY, **changes) -> Identity:
        fields = {
            "run_id": RUN,
            "manifest_sha256": MANIFEST,
            "worker_id": worker_id,
            "island_key": key,
            "hostname": f"host of {worker_id}",
            "layout_digest": "0" * 64,
            "data_identity": {},
        }
        record = self.registry.register(RegisterRequest(**{**fields, **changes}))
        return Identity(
            run_id=RUN,
            manifest_sha256=MANIFEST,
            worker_id=worker_id,
            incarnation=record.incarnation,
            island_key=key,
            generation=self.registry.generation.number,
        )


@pytest.fixture
def bench():
    made = Bench()
    yield made
    made.ledger.close()


def test_new_worker_is_incarnation_one(bench):
    assert bench.register().incarnation == 1


def test_registering_again_with_the_same_key_takes_over_at_once(bench):
    """A register whose reply was lost is simply repeated, and after a crash nobody waits."""
    bench.register()

    identity = bench.register()

    assert identity.incarnation == 2
    assert bench.registry.check(identity).incarnation == 2


def test_earlier_incarnation_is_fenced_once_a_later_one_registered(bench):
    first = bench.register()
    bench.register()

    with pytest.raises(Fenced, match="incarnation=1 of worker_id='a' was followed by 2"):
        bench.registry.check(first)


def test_live_worker_is_not_taken_over_by_another_key(bench):
    bench.register()
    bench.clock.advance(seconds=TIMEOUT_SECONDS)
    before = bench.ledger.state_hash()

    with pytest.raises(WorkerTaken, match=r"heard 10\.0 s ago under another island key"):
        bench.register(key=OTHER_KEY)

    assert bench.ledger.state_hash() == before


def test_silent_worker_is_taken_over_by_another_key(bench):
    first = bench.register()
    bench.clock.advance(seconds=TIMEOUT_SECONDS + 1)

    second = bench.register(key=OTHER_KEY)

    assert second.incarnation == 2
    with pytest.raises(Fenced, match="another island key"):
        bench.registry.check(first)


def test_worker_that_left_is_taken_over_by_another_key(bench):
    first = bench.register()
    bench.registry.deregister(first)

    assert bench.register(key=OTHER_KEY).incarnation == 2


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"run_id": "other"}, "MANIFEST_MISMATCH"),
        ({"manifest_sha256": "b" * 64}, "MANIFEST_MISMATCH"),
        ({"worker_id": "nobody"}, "UNKNOWN_WORKER"),
        ({"island_key": OTHER_KEY}, "FENCED"),
        ({"incarnation": 0}, "FENCED"),
        ({"incarnation": 2}, "FENCED"),
    ],
)
def test_identity_that_differs_is_refused_by_its_code(bench, changes, code):
    """A worker_id alone proves nothing."""
    identity = bench.register()

    with pytest.raises(AtollError) as refused:
        bench.registry.check(identity.model_copy(update=changes))

    assert refused.value.code == code


@pytest.mark.parametrize("changes", [{"run_id": "other"}, {"manifest_sha256": "b" * 64}])
def test_registration_under_another_manifest_is_refused(bench, changes):
    """What a worker adopted is checked before it takes part."""
    with pytest.raises(AtollError, match="fetch /info again"):
        bench.register(**changes)

    assert bench.registry.known() == []


def test_worker_that_left_must_register_again(bench):
    identity = bench.register()
    bench.registry.deregister(identity)

    with pytest.raises(UnknownWorker, match="register first"):
        bench.registry.check(identity)

    assert bench.registry.active() == []
    assert bench.registry.live() == frozenset()


def test_worker_cannot_be_deregistered_by_its_earlier_incarnation(bench):
    first = bench.register()
    bench.register()

    with pytest.raises(Fenced):
        bench.registry.deregister(first)

    assert [w.worker_id for w in bench.registry.active()] == ["a"]


def test_workers_are_listed_in_worker_id_order(bench):
    for name in ("b", "a", "B"):
        bench.register(name)

    assert [w.worker_id for w in bench.registry.active()] == ["B", "a", "b"]


def test_registered_workers_get_a_full_timeout_after_a_restart(bench):
    bench.register("a")
    left = bench.register("b")
    bench.registry.deregister(left)
    bench.clock.advance(seconds=1000)

    bench.open()

    assert bench.registry.live() == {"a"}
    bench.clock.advance(seconds=TIMEOUT_SECONDS + 1)
    assert bench.registry.live() == frozenset()


def test_identity_survives_a_restart(bench):
    identity = bench.register()

    bench.open()

    assert bench.registry.check(identity).worker_id == "a"


def test_island_key_is_stored_hashed(bench):
    bench.register()

    [record] = alone(bench.ledger).members.workers()

    assert record.key_sha256 == key_hash(KEY) != KEY


def test_hostname_is_what_the_worker_said(bench):
    bench.register()

    assert bench.registry.hostname("a") == "host of a"
    assert bench.registry.hostname("b") == ""


# Messages are checked without the lock that a registration holds


class Watched(dict[str, Any]):
    """A table that calls `moment` after every read, and before and after every write."""

    def __init__(self, content: dict[str, Any], moment: Callable[[str], None]) -> None:
        super().__init__(content)
        self._moment = moment

    def get(self, key: str, default: Any = None) -> Any:
        found = super().get(key, default)
        self._moment("read")
        return found

    def __setitem__(self, key: str, value: Any) -> None:
        self._moment("write")
        super().__setitem__(key, value)
        self._moment("write")

    def pop(self, key: str, default: Any = None) -> Any:
        self._moment("write")
        found = super().pop(key, default)
        self._moment("write")
        return found


def watch(registry: Registry, moment: Callable[[str], None]) -> None:
    """Calls `moment` wherever another thread may come in between, but not within itself."""
    busy = False

    def once(kind: str) -> None:
        nonlocal busy
        if not busy:
            busy = True
            moment(kind)
            busy = False

    for name in ("_workers", "_evictions"):
        setattr(registry, name, Watched(getattr(registry, name), once))


def answer(registry: Registry, identity: Identity) -> str:
    with pytest.raises(AtollError) as refused:
        registry.check(identity)
    return refused.value.code


@pytest.fixture
def evicted(bench: Bench) -> Identity:
    identity = bench.register()
    assert bench.registry.evict("a", identity.incarnation, reason="a test says so")
    return identity


@pytest.mark.parametrize(("reads", "code"), [(1, "FENCED"), (2, "EVICTED")])
def test_earlier_life_is_not_invited_back_when_a_later_one_registers_meanwhile(
    bench, evicted, reads, code
):
    """UNKNOWN_WORKER would make a zombie register again, and take the worker_id over."""
    count = 0

    def register(_: str) -> None:
        nonlocal count
        count += 1
        if count == reads:
            bench.register()

    watch(bench.registry, register)

    assert answer(bench.registry, evicted) == code


def test_earlier_life_is_not_invited_back_at_any_moment_of_a_registration(bench, evicted):
    answers = []

    def ask(kind: str) -> None:
        if kind == "write":
            answers.append(answer(bench.registry, evicted))

    watch(bench.registry, ask)

    bench.register()

    assert set(answers) == {"EVICTED", "FENCED"}
    assert answers == sorted(answers), "once fenced, always fenced"


def test_names_are_bounded_and_a_name_that_has_left_is_the_way_in(bench, monkeypatch):
    monkeypatch.setattr(workers, "MAX_NAMES", 2)
    a = bench.register("a")
    bench.register("b")

    with pytest.raises(TooManyWorkers, match=r"name number 3; it takes 2; .*--worker-id"):
        bench.register("c")

    assert [w.worker_id for w in alone(bench.ledger).members.workers()] == ["a", "b"]
    assert bench.register("a").incarnation == 2
    bench.registry.deregister(a.model_copy(update={"incarnation": 2}))
    assert bench.register("a", OTHER_KEY).incarnation == 3


def test_bound_of_names_holds_after_a_restart(bench, monkeypatch):
    monkeypatch.setattr(workers, "MAX_NAMES", 1)
    bench.register("a")
    bench.open()

    with pytest.raises(TooManyWorkers):
        bench.register("b")
