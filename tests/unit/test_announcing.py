"""An island's hand-in by pull: what is in its bucket, what it announces, and in which order."""

import random
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.blobs.memory_bucket import MemoryBucket
from atoll.clock import ManualClock
from atoll.codecs.topk.codec import TopK
from atoll.errors import ConfigError, LeftOut, ObjectRefused, StoreAway, StoreError
from atoll.gather import publish
from atoll.gather import statement as statements
from atoll.gather.keys import SecretKey
from atoll.island.conversation import announcing
from atoll.island.gather import signing as signings
from atoll.island.gather.base import Publish
from atoll.island.gather.buckets import IslandBuckets
from atoll.island.gather.signing import Signing
from atoll.protocol.gather import AnnounceReply, AnnounceRequest, prefix_of, sample_digest
from atoll.protocol.manifest import GatherSettings
from atoll.protocol.messages import Info, RegisterReply, RegisterRequest
from atoll.traffic import Traffic
from atoll.wire.header import Told
from tests import clusters, links
from tests.clusters import SMALL, Frame, info_of, manifest_for
from tests.frames import ranges
from tests.links import Driven

GATHER = {
    "strategy": "gather",
    "upload.codec": "topk",
    "download.codec": "fp32",
    "outer.optimizer": "sgd",
    "gather.buckets": {"main": {"url": "memory:"}},
    "gather.keep": 2,
}
MANIFEST = manifest_for(SMALL, GATHER)
PREFIX = prefix_of(clusters.RUN_ID, "a")
ROWS = ranges((0, 6))


def made(round_number: int = 1, *, incarnation: int = 1) -> Frame:
    header = Told(
        kind="contribution",
        run_id=clusters.RUN_ID,
        manifest_sha256=MANIFEST.sha256(),
        round=round_number,
        worker_id="a",
        incarnation=incarnation,
        base_digest="b" * 64,
        weight=1,
        rows=6,
        tokens=24,
        loss_sum=1.0,
        ranges=ROWS,
    ).header(SMALL, TopK())
    delta = clusters.displacement(SMALL, f"a{incarnation}", round_number)
    return clusters.make_frame(header, clusters.encode(TopK(), delta))


class Coordinator(links.Answering):
    """Gives the receipt at the `patience`-th announcement; notes what happens in which order."""

    def __init__(self, *, patience: int = 1, error: Exception | None = None) -> None:
        self.events: list[str] = []
        self.announced: list[AnnounceRequest] = []
        self.registered: list[RegisterRequest] = []
        self._patience, self._error = patience, error

    def send(self, message: Any, *, alone: bool = False) -> Any:
        if isinstance(message, AnnounceRequest):
            return self._announce(message)
        return super().send(message, alone=alone)

    def info(self, _: Any) -> Info:
        return info_of(MANIFEST)

    def register(self, message: RegisterRequest) -> RegisterReply:
        self.registered.append(message)
        return RegisterReply(incarnation=1, generation=1, version=0, digest="b" * 64)

    def _announce(self, message: AnnounceRequest) -> AnnounceReply:
        self.events.append("announced")
        self.announced.append(message)
        if self._error is not None:
            raise self._error
        if len(self.announced) < self._patience:
            return AnnounceReply(waits_for="its turn")
        return AnnounceReply(receipt="receipt")


class Watched(MemoryBucket):
    """Tells what is written, and fails so many times first."""

    def __init__(self, clock: ManualClock, events: list[str], *, failures: int = 0) -> None:
        super().__init__(clock)
        self._events, self._failures = events, failures
        self.error: Callable[[str], Exception] = StoreAway

    def put(self, key: str, source: bytes | Path) -> Any:
        self._fail()
        self._events.append("frame")
        return super().put(key, source)

    def create(self, key: str, data: bytes) -> bool:
        self._events.append("statement")
        return super().create(key, data)

    def contents(self) -> dict[str, Any]:
        """Every object with its tag."""
        return dict(self._objects)

    def _fail(self) -> None:
        if self._failures:
            self._failures -= 1
            raise self.error("the server is away")


class Island:
    """One with a bucket in memory, over a coordinator that only takes announcements."""

    def __init__(
        self, home: Path, link: Coordinator, *, failures: int = 0, bucket: Watched | None = None
    ) -> None:
        clock = ManualClock()
        self.link = link
        self.bucket = bucket or Watched(clock, link.events, failures=failures)
        key = SecretKey(random.Random(1).randbytes(32))
        self.signing = Signing(key, "main")
        self.traffic = Traffic()
        self.driven = Driven(link, clock=clock)
        self.driven.session.signing = self.signing
        self.driven.driver.buckets = self.buckets = IslandBuckets(
            {"main": self.bucket}, self.signing, home, clock, self.traffic
        )
        self.driven.register(layout_digest=SMALL.digest, data_identity={})

    def hand_in(self, frame: Frame) -> str:
        def saved() -> None:
            self.link.events.append("saved")

        steps = announcing.announced(self.driven.session, self.signing, frame, saved)
        return self.driven.driver.run(steps)

    def stored(self) -> dict[str, bytes]:
        found = self.bucket.contents().items()
        return {key.removeprefix(PREFIX + "/"): data for key, (_, data) in found}


def test_frame_and_statement_are_in_the_bucket_before_they_are_announced(tmp_path):
    island = Island(tmp_path, Coordinator())
    frame = made()

    assert island.hand_in(frame) == "receipt"

    # Its own copy is durable first: a later life must never state something else of the round.
    assert island.link.events == ["saved", "frame", "statement", "announced"]
    [said] = island.link.announced
    stored = island.stored()
    assert stored == {
        f"frames/{frame.sha256}": frame.data,
        "statements/00000001.json": said.document(),
    }
    assert (said.preamble_bytes(), said.sha256, said.nbytes) == (
        frame.preamble,
        frame.sha256,
        len(frame.data),
    )


def test_statement_says_what_the_header_says_and_is_signed_by_the_key_of_the_registration(tmp_path):
    island = Island(tmp_path, Coordinator())
    frame = made(3)
    island.hand_in(frame)

    stated = statements.read(island.link.announced[0].document(), island.signing.key.public)

    assert stated.plain() == {
        "run_id": clusters.RUN_ID,
        "manifest_sha256": MANIFEST.sha256(),
        "uid": "a",
        "window": 3,
        "base_digest": "b" * 64,
        "sample_digest": sample_digest(ROWS),
        "nbytes": len(frame.data),
        "sha256": frame.sha256,
    }
    [registered] = island.link.registered
    assert registered.publishes is not None
    assert registered.publishes.key == island.signing.key.public.hex
    assert registered.publishes.bucket == "main"


def test_announces_again_until_there_is_a_receipt_and_publishes_once(tmp_path):
    island = Island(tmp_path, Coordinator(patience=4))

    assert island.hand_in(made()) == "receipt"

    assert island.link.events == ["saved", "frame", "statement", *["announced"] * 4]
    assert len({said.model_dump_json() for said in island.link.announced}) == 1


def test_refusal_passes_through(tmp_path):
    island = Island(tmp_path, Coordinator(error=LeftOut("NORM: too large")))

    with pytest.raises(LeftOut):
        island.hand_in(made())


def test_later_life_publishes_and_announces_the_same_bytes(tmp_path):
    first, second = Coordinator(), Coordinator()
    island = Island(tmp_path, first)
    island.hand_in(made())
    before = island.bucket.contents()

    Island(tmp_path, second, bucket=island.bucket).hand_in(made())

    assert island.bucket.contents() == before  # its server's time too
    assert second.announced[0].document() == first.announced[0].document()


def test_round_that_is_given_again_replaces_what_was_refused(tmp_path):
    island = Island(tmp_path, Coordinator())
    island.hand_in(made(incarnation=1))
    other = made(incarnation=2)

    island.hand_in(other)

    assert sorted(island.stored()) == [f"frames/{other.sha256}", "statements/00000001.json"]
    assert island.stored()["statements/00000001.json"] == island.link.announced[1].document()


def test_bucket_keeps_as_many_rounds_as_the_run_says(tmp_path):
    island = Island(tmp_path, Coordinator())
    frames = [made(number) for number in (1, 2, 3)]
    for frame in frames:
        island.hand_in(frame)

    assert set(island.stored()) == {
        "statements/00000002.json",
        "statements/00000003.json",
        *(f"frames/{frame.sha256}" for frame in frames[1:]),
    }


def test_bucket_that_is_away_for_a_while_is_tried_again(tmp_path):
    island = Island(tmp_path, Coordinator(), failures=3)

    assert island.hand_in(made()) == "receipt"

    assert island.link.events == ["saved", "frame", "statement", "announced"]


def test_bucket_that_is_away_for_long_is_for_the_coordinator_to_judge(tmp_path):
    """It is announced all the same, and published as soon as that can be done."""
    failures = announcing.MAX_TRIES + 1
    island = Island(tmp_path, Coordinator(patience=2), failures=failures)

    assert island.hand_in(made()) == "receipt"

    assert island.link.events == ["saved", "announced", "frame", "statement", "announced"]


def test_bucket_that_refuses_ends_the_island(tmp_path):
    island = Island(tmp_path, Coordinator(), failures=1)
    island.bucket.error = ObjectRefused

    with pytest.raises(ObjectRefused):
        island.hand_in(made())

    assert island.link.announced == []


def test_bytes_into_the_bucket_are_counted_with_the_others(tmp_path):
    island, frame = Island(tmp_path, Coordinator()), made()

    island.hand_in(frame)

    assert island.buckets.told()["bucket_bytes_sent"] == len(frame.data)
    assert island.traffic.sent == len(frame.data)


def test_own_frame_stays_in_the_spool_until_the_next_round(tmp_path):
    island = Island(tmp_path, Coordinator())
    first, second = made(1), made(2)
    island.hand_in(first)
    path = tmp_path / "00000001" / first.sha256
    held = path.read_bytes()

    island.hand_in(second)

    assert held == first.data
    assert [p.name for p in tmp_path.iterdir()] == ["00000002"]


class Cut:
    """A frame of which the disk gives so many bytes and then none."""

    def __init__(self, frame: Frame, nbytes: int) -> None:
        self.preamble, self.sha256, self.nbytes = frame.preamble, frame.sha256, frame.nbytes
        self._data = frame.data[:nbytes]

    def read(self, offset: int, nbytes: int) -> bytes:
        return self._data[offset : offset + nbytes]


def test_part_of_an_earlier_frame_is_in_no_later_one(tmp_path):
    """Both have the same size: what an earlier life left would be taken for a beginning."""
    island = Island(tmp_path, Coordinator())
    cut, frame = made(incarnation=1), made(incarnation=2)
    there = len(cut.preamble) + 50
    wanted = Publish(Cut(cut, there), signings.statement_of(cut), MANIFEST.gather)
    with pytest.raises(StoreError, match=f"ends at byte {there}"):
        island.buckets.publish(wanted)

    assert island.hand_in(frame) == "receipt"

    assert island.stored()[f"frames/{frame.sha256}"] == frame.data


# Keys and buckets


def test_key_is_made_once_for_its_owner_alone(tmp_path):
    first = signings.key_in(tmp_path)

    assert signings.key_in(tmp_path) == first
    assert stat.S_IMODE((tmp_path / signings.KEY_FILE).stat().st_mode) == 0o600


def test_key_that_others_can_read_is_refused(tmp_path):
    signings.key_in(tmp_path)
    (tmp_path / signings.KEY_FILE).chmod(0o644)

    with pytest.raises(ConfigError, match="others can sign"):
        signings.key_in(tmp_path)


def settings(*names: str) -> GatherSettings:
    return GatherSettings.model_validate({"buckets": {n: {"url": "memory:"} for n in names}})


def test_runs_only_bucket_is_the_default():
    assert signings.bucket_of(settings("main"), None) == "main"
    assert signings.bucket_of(settings("main", "other"), "other") == "other"


@pytest.mark.parametrize("wanted", [None, "third"])
def test_bucket_must_be_named_where_there_are_several(wanted):
    with pytest.raises(ConfigError, match="the run has main, other; name one"):
        signings.bucket_of(settings("main", "other"), wanted)


def test_statement_is_found_where_fetchers_look_for_it(tmp_path):
    island = Island(tmp_path, Coordinator())
    island.hand_in(made(7))

    tag = island.bucket.look(publish.statement_key(PREFIX, 7), deadline=1e9)

    assert tag is not None
