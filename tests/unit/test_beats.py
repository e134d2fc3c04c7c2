"""Beside the training: heartbeats, telemetry and presence, from threads of their own."""

import logging
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.clock import ManualClock
from atoll.coordinator.shown.samples import SampleStore
from atoll.errors import CoordinatorUnreachable, Evicted, StorageFull
from atoll.island import pulse
from atoll.island.presence import presence
from atoll.island.run import Run
from atoll.island.state.store import IslandIdentity, IslandStore
from atoll.protocol.control import Command
from atoll.protocol.messages import (
    Done,
    HeartbeatReply,
    HeartbeatRequest,
    Info,
    RegisterReply,
    Telemetry,
)
from atoll.protocol.samples import SamplesRequest
from tests import links
from tests.clusters import SMALL, info_of, manifest_for

WAIT_SECONDS = 20.0


class Answers(links.Answering):
    """A link to a coordinator that keeps samples and answers beats as a test says."""

    def __init__(self) -> None:
        self.store = SampleStore()
        self.registrations = 0
        self.beats: list[HeartbeatRequest] = []
        self.on_beat: Callable[[int], Command] = lambda _: Command()
        self.on_samples: list[Exception | None] = []  # raised after the batch was kept
        self.on_attend: Callable[[], Any] = lambda: None

    def info(self, _: Any) -> Info:
        return info_of(manifest_for(SMALL, {"heartbeat_interval": 0.001}))

    def register(self, _: Any) -> RegisterReply:
        self.registrations += 1
        return RegisterReply(
            incarnation=self.registrations, generation=1, version=0, digest="0" * 64
        )

    def heartbeat(self, request: HeartbeatRequest) -> HeartbeatReply:
        self.beats.append(request)
        return HeartbeatReply(generation=1, command=self.on_beat(len(self.beats)))

    def samples(self, request: SamplesRequest) -> Done:
        answer = self.on_samples.pop(0) if self.on_samples else None
        if isinstance(answer, StorageFull):
            raise answer
        self.store.add(request.identity.worker_id, request.life, request.samples)
        if answer is not None:
            raise answer
        return Done()

    def attend(self, _: Any) -> Any:
        return self.on_attend()


@pytest.fixture
def link() -> Answers:
    return Answers()


@pytest.fixture
def run(link: Answers, tmp_path: Path) -> Iterator[Run]:
    store = IslandStore(tmp_path)
    made: Any = link
    joined = Run(
        made,
        store,
        ManualClock(),
        identity=IslandIdentity("a", "1" * 64),
        jitter=random.Random(0),
    )
    joined._driver.run(joined._session.register(layout_digest="0" * 64, data_identity={}))
    yield joined
    store.close()


def kept(link: Answers) -> list[tuple[int, int]]:
    return [(s.incarnation, s.sequence) for s in link.store.history().samples]


def test_new_command_is_acknowledged_at_once(run, link):
    link.on_beat = lambda _: Command(number=3, action="pause")

    run.beat()

    assert [beat.acknowledged for beat in link.beats] == [0, 3]


def test_commands_that_never_end_do_not_keep_a_beat_from_ending(run, link):
    link.on_beat = lambda beats: Command(number=beats, action="pause")

    run.beat()
    run.beat()

    assert [beat.acknowledged for beat in link.beats] == [0, 1, 2, 3]


def test_sample_is_kept_once_when_its_answer_was_lost_and_the_island_evicted(run, link):
    run._samples.add(Telemetry(round=1, step=1))
    link.on_samples = [CoordinatorUnreachable()]
    with pytest.raises(CoordinatorUnreachable):
        run.beat()

    link.on_samples = [Evicted()]  # of another batch: what it held is sent again in the next life
    run.beat()

    assert link.registrations == 2
    assert [beat.identity.incarnation for beat in link.beats] == [1, 1, 2]
    assert kept(link) == [(1, 1)]


def test_full_disk_of_the_coordinator_is_no_missed_beat(run, link):
    run._samples.add(Telemetry(round=1, step=1))
    link.on_samples = [StorageFull()]

    run.beat()
    assert kept(link) == []

    run.beat()
    assert kept(link) == [(1, 1)]


def test_pulse_goes_on_in_time_after_an_error_that_nobody_expected(run, link, caplog, monkeypatch):
    monkeypatch.setattr(pulse, "BROKEN_SECONDS", 2 * WAIT_SECONDS)
    beaten = threading.Event()

    def answer(beats: int) -> Command:
        if beats == 1:
            raise ZeroDivisionError("of the test")
        beaten.set()
        return Command()

    link.on_beat = answer
    beats = pulse.pulse(run)
    with caplog.at_level(logging.ERROR):
        beats.start()
        went_on = beaten.wait(WAIT_SECONDS)
        beats.stop()

    assert went_on
    assert "ZeroDivisionError" in caplog.text
    assert "pulse broke" in caplog.text


def test_presence_goes_on_after_an_error_that_nobody_expected(run, link, caplog, monkeypatch):
    monkeypatch.setattr(pulse, "BROKEN_SECONDS", 0.001)
    tried: list[int] = []
    again = threading.Event()

    def answer() -> Any:
        tried.append(1)
        if len(tried) > 1:
            again.set()
        raise ZeroDivisionError("of the test")

    link.on_attend = answer
    attending = presence(run)
    with caplog.at_level(logging.ERROR):
        attending.start()
        went_on = again.wait(WAIT_SECONDS)
        attending.stop()

    assert went_on
    assert "presence broke" in caplog.text
