"""Telemetry: queued while nobody listens, kept once, bounded, put aside when damaged."""

import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.clock import ManualClock
from atoll.coordinator.shown import samples as stored
from atoll.coordinator.shown.samples import SampleStore
from atoll.errors import StorageFull, StoreError
from atoll.island.telemetry import Meter, Samples
from atoll.protocol.messages import Telemetry
from atoll.protocol.samples import MAX_BATCH, Sample
from atoll.traffic import Traffic


def owner(name: str = "a", life: int = 1) -> tuple[str, int]:
    return name, life


def sample(sequence: int, **changes: float) -> Sample:
    return Sample.model_validate(
        {"sequence": sequence, "wall": 1.0, "round": 1, "step": sequence, **changes}
    )


def sequences(store: SampleStore) -> list[int]:
    return [s.sequence for s in store.history().samples]


def test_samples_come_back_in_the_order_they_came():
    store = SampleStore()
    store.add(*owner("a"), [sample(1, loss=2.5), sample(2)])
    store.add(*owner("b"), [sample(1)])

    found = store.history().samples

    assert [(s.worker_id, s.sequence, s.loss) for s in found] == [
        ("a", 1, 2.5),
        ("a", 2, None),
        ("b", 1, None),
    ]


def test_repeated_batch_is_kept_once():
    store = SampleStore()
    for _ in range(2):
        store.add(*owner(), [sample(1), sample(2)])

    assert sequences(store) == [1, 2]


def test_sample_that_is_sent_again_keeps_its_place_and_its_first_content():
    """Whoever reads page by page has passed it already."""
    store = SampleStore()
    store.add(*owner(), [sample(1, loss=2.5), sample(2)])
    before = store.history().samples

    store.add(*owner(), [sample(1, loss=9.0)])

    assert store.history().samples == before
    assert store.history(after=before[-1].position).samples == ()


def test_another_life_counts_anew():
    store = SampleStore()
    store.add(*owner(life=1), [sample(1)])
    store.add(*owner(life=2), [sample(1)])

    assert [s.incarnation for s in store.history().samples] == [1, 2]


def test_only_the_newest_are_kept():
    store = SampleStore(limit=10)
    for start in range(1, 100, 3):
        store.add(*owner(), [sample(start + i) for i in range(3)])

    assert sequences(store) == list(range(90, 100))
    assert store.history().kept == 10


def test_history_is_read_page_by_page():
    store = SampleStore()
    store.add(*owner(), [sample(i) for i in range(1, 8)])

    seen, after = [], 0
    while page := store.history(after=after, limit=3).samples:
        seen += [s.sequence for s in page]
        after = page[-1].position

    assert seen == [1, 2, 3, 4, 5, 6, 7]


def test_history_of_one_worker():
    store = SampleStore()
    store.add(*owner("a"), [sample(1)])
    store.add(*owner("b"), [sample(1)])

    assert [s.worker_id for s in store.history(worker_id="b").samples] == ["b"]


def test_history_survives_a_restart(tmp_path: Path):
    first = SampleStore(tmp_path / "telemetry.sqlite")
    first.add(*owner(), [sample(1)])
    first.close()

    assert sequences(SampleStore(tmp_path / "telemetry.sqlite")) == [1]


def test_damaged_file_is_put_aside_and_begun_anew(tmp_path: Path):
    path = tmp_path / "telemetry.sqlite"
    path.write_bytes(b"not a database" * 1000)

    store = SampleStore(path)
    store.add(*owner(), [sample(1)])

    assert sequences(store) == [1]
    assert (tmp_path / "telemetry.sqlite.damaged").read_bytes().startswith(b"not a database")


@pytest.fixture
def full_disk() -> Iterator[Callable[[int], None]]:
    """Lets no file of this process grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda nbytes: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_refuses_by_name_and_what_was_kept_stays(tmp_path: Path, full_disk):
    path = tmp_path / "telemetry.sqlite"
    store = SampleStore(path)
    store.add(*owner(), [sample(1)])

    full_disk(path.stat().st_size)
    with pytest.raises(StorageFull, match="free some room"):
        store.add(*owner(), [sample(i) for i in range(2, 200)])
    full_disk(1 << 24)

    assert sequences(store) == [1]
    store.add(*owner(), [sample(2)])
    assert sequences(store) == [1, 2]


def test_file_that_breaks_in_use_is_refused_by_name(tmp_path: Path):
    path = tmp_path / "telemetry.sqlite"
    store = SampleStore(path)
    store.add(*owner(), [sample(1)])
    path.write_bytes(b"not a database" * 1000)

    with pytest.raises(StoreError, match="restart the coordinator"):
        store.add(*owner(), [sample(2)])


def test_bound_of_the_store_is_the_documented_one():
    assert SampleStore().history().limit == stored.KEPT_SAMPLES


# The island's queue


def told(step: int, *, sent: int = 0) -> Telemetry:
    return Telemetry(round=1, step=step, bytes_sent=sent, loss=1.0)


def test_samples_stay_queued_until_they_are_delivered():
    clock = ManualClock()
    queue = Samples(clock)
    for step in range(1, 4):
        queue.add(told(step))
        clock.advance(seconds=1.0)

    assert [s.sequence for s in queue.batch()] == [1, 2, 3]
    assert [s.sequence for s in queue.batch()] == [1, 2, 3]
    queue.delivered(2)
    assert [s.step for s in queue.batch()] == [3]


def test_fast_steps_give_one_sample_a_second():
    clock = ManualClock()
    queue = Samples(clock)
    for step in range(100):
        queue.add(told(step))
        clock.advance(seconds=0.125)

    assert len(queue.batch()) == 13


def test_full_queue_drops_the_oldest_and_leaves_a_gap():
    clock = ManualClock()
    queue = Samples(clock, limit=5)
    for step in range(8):
        queue.add(told(step))
        clock.advance(seconds=1.0)

    assert [s.step for s in queue.batch()] == [3, 4, 5, 6, 7]
    assert [s.sequence for s in queue.batch()] == [4, 5, 6, 7, 8]


def test_batch_is_bounded():
    clock = ManualClock()
    queue = Samples(clock)
    for step in range(MAX_BATCH + 10):
        queue.add(told(step))
        clock.advance(seconds=1.0)

    assert len(queue.batch()) == MAX_BATCH


def test_transfer_rate_is_what_moved_since_the_sample_before():
    clock = ManualClock()
    queue = Samples(clock)
    queue.add(told(1, sent=1000))
    clock.advance(seconds=4.0)
    queue.add(told(2, sent=3000))

    assert [s.sent_per_second for s in queue.batch()] == [0.0, 500.0]
    assert queue.batch()[0].memory_bytes > 1 << 20


# The speed that an island tells


def trained(meter: Meter, clock: ManualClock, *, steps: int, seconds: float) -> float:
    """A round of so many steps of 10 tokens; the speed told after it."""
    meter.begin()
    for step in range(1, steps + 1):
        clock.advance(seconds=seconds)
        meter.step(1, step, tokens=10, loss=1.0)
    meter.end()
    return meter.telemetry(Traffic()).tokens_per_second


def test_speed_is_of_the_last_rounds_training():
    clock = ManualClock()
    meter = Meter(clock)

    first = trained(meter, clock, steps=4, seconds=2.0)
    clock.advance(seconds=1000.0)
    second = trained(meter, clock, steps=2, seconds=0.5)

    assert (first, second) == (5.0, 20.0)


def test_speed_is_of_the_round_before_while_one_is_trained_and_of_the_first_while_there_is_none():
    clock = ManualClock()
    meter = Meter(clock)
    meter.begin()
    clock.advance(seconds=2.0)
    meter.step(1, 1, tokens=10, loss=1.0)
    running = meter.telemetry(Traffic()).tokens_per_second
    meter.end()

    meter.begin()
    clock.advance(seconds=100.0)
    meter.step(2, 1, tokens=10, loss=1.0)

    assert (running, meter.telemetry(Traffic()).tokens_per_second) == (5.0, 5.0)


def test_tokens_are_counted_since_the_process_started():
    clock = ManualClock()
    meter = Meter(clock)

    for _ in range(2):
        trained(meter, clock, steps=3, seconds=1.0)

    assert meter.telemetry(Traffic()).tokens == 60
