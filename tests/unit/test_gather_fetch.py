"""Fetching peers: who is slow, away or wrong is skipped for what it is, and costs nobody else."""

import errno
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from atoll.blobs.bucket import Tag
from atoll.errors import ConfigError, DiskFailed, StoreError
from atoll.files import SystemFiles
from atoll.gather import places, publish
from atoll.gather.errand import Pace
from atoll.gather.fetch import Fetched
from atoll.gather.settle import settled
from atoll.gather.spool import Record, Spool
from atoll.gather.words import Reason
from atoll.simulate.fibers import Scheduler
from tests.fetching import (
    NBYTES,
    Manner,
    PlayedBucket,
    PlayedValidator,
    body,
    document,
    fetcher,
    peer,
    played,
)

UIDS = [f"w{k}" for k in range(10)]


class World:
    """A bucket with peers, and what fetches them."""

    def __init__(self, home: Path, uids: list[str] = UIDS) -> None:
        self.home = home
        self.uids = uids
        self.scheduler = Scheduler()
        self.bucket = PlayedBucket(self.scheduler)
        for uid in uids:
            self.bucket.publish(uid)

    def fetch(self, *, seconds: float = 100.0, uids: Any = None, **changes: Any) -> Fetched:
        peers = [peer(uid) for uid in uids or self.uids]
        by = fetcher(self.scheduler, {"main": self.bucket}, self.home, **changes)
        deadline = self.scheduler.now() + seconds
        return played(lambda: by.fetch(peers, deadline=deadline), scheduler=self.scheduler)[0]

    def restarted(self) -> "World":
        """The same objects and spool, another process."""
        made = World(self.home, self.uids)
        made.bucket.objects = self.bucket.objects
        return made


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "spool")


def reasons(found: Fetched) -> dict[str, Reason]:
    return {one.uid: one.reason for one in settled([found.partial(0)])[0].skipped}


@pytest.mark.parametrize("slots", [1, 3, 20])
def test_every_peer_is_fetched_once_whole_and_in_uid_order(world, slots):
    found = world.fetch(slots=slots, uids=list(reversed(UIDS)))

    assert [one.uid for one in found.accepted] == UIDS
    assert found.skipped == ()
    assert world.bucket.bytes_sent() == found.received_bytes == NBYTES * len(UIDS)
    spool = Spool(world.home)
    assert all(spool.read(a.sha256, 0, a.nbytes) == body(a.uid) for a in found.accepted)


def test_result_does_not_depend_on_slots_or_speed(world, tmp_path):
    other = World(tmp_path / "other")
    other.bucket.manners = {uid: Manner(rate=2e4 * (k + 1)) for k, uid in enumerate(UIDS)}

    assert world.fetch(slots=1).accepted == other.fetch(slots=7).accepted


def test_third_of_the_peers_at_a_kilobyte_a_second_leaves_the_others_their_time(tmp_path):
    """Others alone, then with slow ones first in order; the control gives them no room aside."""
    slow, quick = [f"a{k}" for k in range(7)], [f"b{k}" for k in range(14)]

    def seconds(name: str, uids: list[str], **changes: Any) -> float:
        world = World(tmp_path / name, uids)
        world.bucket.manners = {
            uid: Manner(rate=1e3 if uid in slow else 1e5) for uid in slow + quick
        }
        done: dict[str, float] = {}

        class Timed(PlayedValidator):
            def finish(self) -> Any:
                done[self._statement.uid] = world.scheduler.now()
                return super().finish()

        found = world.fetch(seconds=60.0, validator_of=Timed, **changes)
        assert reasons(found) == dict.fromkeys(sorted(set(uids) - set(quick)), Reason.SLOW)
        assert {one.uid for one in found.accepted} == set(quick)
        return max(done.values())

    alone = seconds("alone", quick)
    assert seconds("together", slow + quick) <= 1.2 * alone
    # The control: a slow peer that keeps its place until it is cut.
    held = Pace(turn_seconds=60.0)
    assert seconds("held", slow[:3] + quick, pace=held) > 1.2 * alone


@pytest.mark.parametrize("slots", [1, 8])
@pytest.mark.parametrize("order", ["first", "between", "more than are tried at once"])
def test_slow_peers_hold_nobodys_place_with_few_slots_or_many(tmp_path, monkeypatch, slots, order):
    """The others take a second or two alone. The control: places without a trial before them."""
    uids = [f"w{k:02d}" for k in range(24 if order != "first" else 21)]
    slow = {"first": uids[:7], "between": uids[::3]}.get(order, uids[:17])

    def seconds(name: str, asked: list[str]) -> float:
        world = World(tmp_path / name, asked)
        world.bucket.manners = {u: Manner(rate=1e3 if u in slow else 2e6) for u in asked}
        done: dict[str, float] = {}

        class Timed(PlayedValidator):
            def finish(self) -> Any:
                done[self._statement.uid] = world.scheduler.now()
                return super().finish()

        found = world.fetch(seconds=20.0, slots=slots, validator_of=Timed)
        assert reasons(found) == {uid: Reason.SLOW for uid in asked if uid in slow}
        return max(done.values())

    alone = seconds("alone", [uid for uid in uids if uid not in slow])
    # A trial that takes longer than its grace, a quarter of a second, lets the next one begin.
    assert seconds("together", uids) <= max(1.2 * alone, alone + 0.3)
    monkeypatch.setattr(places, "TRIALS", 1)
    monkeypatch.setattr(places, "MOST_TRIALS", 3)
    assert seconds("control", uids) > max(1.2 * alone, alone + 0.3)


@pytest.mark.parametrize("slots", [1, 2])
def test_slow_peers_before_anybody_quick_are_no_measure_of_speed(tmp_path, slots):
    """They made each other look quick, held all places, and nobody else was fetched."""
    slow, quick = [f"a{k}" for k in range(7)], [f"b{k}" for k in range(6)]
    world = World(tmp_path / "spool", slow + quick)
    world.bucket.manners = {uid: Manner(rate=1e3) for uid in slow}

    found = world.fetch(seconds=60.0, slots=slots)

    assert [one.uid for one in found.accepted] == quick
    assert reasons(found) == dict.fromkeys(slow, Reason.SLOW)


def test_slow_link_of_ours_cuts_no_piece(world):
    """All alike are slow: nobody gives up what is under way, so nothing comes twice."""
    world.bucket.manners = {uid: Manner(rate=3e4) for uid in UIDS}

    found = world.fetch(seconds=1000.0)

    assert len(found.accepted) == len(UIDS)
    assert world.bucket.bytes_sent() == NBYTES * len(UIDS)


def test_what_is_finished_at_the_deadline_is_kept_and_the_rest_is_whose_fault_it_is(world):
    world.bucket.manners = {"w0": Manner(rate=1e3), **{uid: Manner(rate=2e5) for uid in UIDS[1:]}}

    found = world.fetch(seconds=3.0, slots=2)

    told = Counter(reasons(found).values())
    assert reasons(found)["w0"] is Reason.SLOW
    assert told[Reason.SLOW] == 1 and told[Reason.DEADLINE] == len(found.skipped) - 1 > 0
    assert 2 <= len(found.accepted) < 9
    assert world.scheduler.now() == pytest.approx(3.0, abs=0.01)


def test_restarted_process_downloads_only_the_rest(world):
    world.bucket.manners = {uid: Manner(rate=2e5) for uid in UIDS}
    first = world.fetch(seconds=3.0, slots=3)
    assert 0 < len(first.accepted) < len(UIDS)
    begun = first.received_bytes

    again = world.restarted()
    second = again.fetch()

    assert [one.uid for one in second.accepted] == UIDS
    assert begun + second.received_bytes == NBYTES * len(UIDS)
    statements = [key for key in again.bucket.sent if "/statements/" in key]
    assert len(statements) == len([u for u in UIDS if not _was_pinned(world, u)])


def _was_pinned(world: World, uid: str) -> bool:
    return any(key.startswith(f"peers/{uid}/frames") for key in world.bucket.looks)


def test_spooled_bytes_that_are_damaged_are_fetched_anew_and_blamed_on_nobody(world):
    world.fetch()
    files = sorted(path for path in world.home.iterdir() if len(path.name) == 64)
    files[0].write_bytes(b"\0" * NBYTES)

    second = world.restarted().fetch()

    assert [one.uid for one in second.accepted] == UIDS
    assert second.received_bytes == NBYTES


def test_part_that_is_damaged_is_fetched_anew(world):
    world.bucket.manners = {"w0": Manner(rate=1e5)}
    world.fetch(seconds=1.5, uids=["w0"])
    part = world.home / "w0.part"
    data = bytearray(part.read_bytes())
    data[0] ^= 1
    part.write_bytes(data)

    second = world.restarted().fetch(uids=["w0"])

    assert [one.uid for one in second.accepted] == ["w0"]


def test_object_replaced_between_two_lives_is_fetched_from_its_first_byte(world):
    world.bucket.manners = {"w0": Manner(rate=1e5)}
    world.fetch(seconds=1.5, uids=["w0"])
    world.bucket.publish("w0", b"another" * 50_000)

    # The statement is pinned, and its object is still there under its own name.
    second = world.restarted().fetch(uids=["w0"])

    assert second.accepted[0].nbytes == NBYTES


def test_broken_connection_goes_on_where_it_was(world):
    world.bucket.manners = {"w3": Manner(breaks_at=200_000), "w4": Manner(away=(0.0, 2.0))}

    found = world.fetch()

    assert [one.uid for one in found.accepted] == UIDS
    assert world.bucket.bytes_sent() == NBYTES * len(UIDS)


def test_server_away_for_ten_seconds_costs_only_these(world):
    world.bucket.manners = {uid: Manner(rate=2e5, away=(1.0, 11.0)) for uid in UIDS}

    found = world.fetch(seconds=60.0)

    assert [one.uid for one in found.accepted] == UIDS
    assert world.scheduler.now() < 20.0
    looked = Counter(world.bucket.looks)
    assert max(looked.values()) < 20  # backoff


def test_server_that_answers_nobody_is_our_trouble_and_one_peer_alone_its_own(world):
    world.bucket.manners = {uid: Manner(away=(0.0, 1e9)) for uid in UIDS}
    all_away = world.fetch(seconds=5.0)
    world.bucket.manners = {"w1": Manner(away=(0.0, 1e9)), "w2": Manner(is_stalled=True)}
    one_away = world.restarted()
    one_away.bucket.manners = world.bucket.manners
    found = one_away.fetch(seconds=5.0)

    assert set(reasons(all_away).values()) == {Reason.SERVER_AWAY}
    assert all(reason.fault == "ours" for reason in reasons(all_away).values())
    assert reasons(found) == {"w1": Reason.SLOW, "w2": Reason.SLOW}


def test_server_that_goes_away_after_it_served_some_is_our_trouble(world):
    world.bucket.manners = {uid: Manner(rate=1e5, away=(4.0, 1e9)) for uid in UIDS}

    found = world.fetch(seconds=20.0, slots=2)

    assert found.accepted
    assert set(reasons(found).values()) == {Reason.SERVER_AWAY}


def test_each_fault_is_named_and_changes_nobody_elses_result(world, tmp_path):
    bucket = world.bucket
    del bucket.objects[publish.statement_key("peers/w0", 7)]
    bucket.publish("w1", window=8)
    bucket.publish("w2", nbytes=NBYTES + 1)
    bucket.objects[publish.statement_key("peers/w3", 7)] = bucket.objects[
        publish.statement_key("peers/w4", 7)
    ]
    bucket.publish("w5", sha256="0" * 64)
    bucket.manners["w6"] = Manner(changes_at=100_000)
    bucket.objects[publish.statement_key("peers/w7", 7)] = b"x" * 5_000

    def validator_of(peer: Any, statement: Any) -> PlayedValidator:
        if peer.uid == "w9":
            raise ZeroDivisionError
        return PlayedValidator(peer, statement, bad_byte=70_000 if peer.uid == "w8" else None)

    found = world.fetch(validator_of=validator_of)

    assert reasons(found) == {
        "w0": Reason.MISSING,
        "w1": Reason.STATEMENT,
        "w2": Reason.SIZE,
        "w3": Reason.SIGNATURE,
        "w5": Reason.MISSING,
        "w6": Reason.CHANGED,
        "w7": Reason.STATEMENT,
        "w8": Reason.INDICES,
        "w9": Reason.FRAME,
    }
    alone = World(tmp_path / "alone").fetch(uids=["w4"])
    assert found.accepted == alone.accepted
    kept = {path.name for path in world.home.iterdir()}
    assert kept == {"w4.record", found.accepted[0].sha256}


def test_refused_object_is_not_read_on(world):
    found = world.fetch(uids=["w0"], validator_of=lambda p, s: PlayedValidator(p, s, bad_byte=10))

    assert reasons(found) == {"w0": Reason.INDICES}
    assert world.bucket.bytes_sent() <= 64 << 10


def test_late_statement_is_waited_for(world):
    world.bucket.manners = {
        "w0": Manner(missing_until=4.0),
        "w1": Manner(missing_until=4.0, rate=1e3),
    }

    found = world.fetch(seconds=30.0)

    assert reasons(found) == {"w1": Reason.LATE}


def test_other_peers_object_cannot_be_lost_by_a_statement_that_names_it(world):
    """In an earlier life `w1` stated `w0`'s object and was not done."""
    world.fetch(uids=["w0"])
    world.bucket.objects[publish.frame_key("peers/w1", _sha(world))] = body("w0")
    world.bucket.publish("w1", body("w0"))
    stated = document("w1", body("w0"))
    Spool(world.home).keep("w1", Record(stated, Tag(NBYTES, "e", 5.0)))

    def validator_of(peer: Any, statement: Any) -> PlayedValidator:
        return PlayedValidator(peer, statement, bad_byte=100 if peer.uid == "w1" else None)

    found = world.restarted().fetch(uids=["w0", "w1"], validator_of=validator_of)

    assert [one.uid for one in found.accepted] == ["w0"]
    assert Spool(world.home).read(_sha(world), 0, NBYTES) == body("w0")


def test_part_without_its_record_is_not_taken_for_another_object_of_its_size(world):
    """A crash, or a hand, between the two files; the peer has published something else since."""
    world.bucket.manners = {"w0": Manner(rate=1e5)}
    world.fetch(seconds=1.5, uids=["w0"])
    (world.home / "w0.record").unlink()
    world.bucket.publish("w0", body("another"))

    second = world.restarted().fetch(uids=["w0"])

    assert [one.uid for one in second.accepted] == ["w0"]


def test_server_whose_every_answer_takes_longer_than_a_turn_is_given_the_time(world):
    world.bucket.manners = {"w0": Manner(latency=2.5)}

    found = world.fetch(uids=["w0"])

    assert [one.uid for one in found.accepted] == ["w0"]
    assert world.bucket.bytes_sent() == NBYTES


def _sha(world: World) -> str:
    [name] = [path.name for path in world.home.iterdir() if len(path.name) == 64]
    return name


class FullDisk(SystemFiles):
    def __init__(self, error: int) -> None:
        self._error = error

    def reserve(self, fd: int, nbytes: int) -> None:
        raise OSError(self._error, "no")


def test_full_disk_skips_with_our_fault_before_a_byte_is_asked_for(world):
    found = world.fetch(spool=Spool(world.home, files=FullDisk(errno.ENOSPC)))

    assert set(reasons(found).values()) == {Reason.DISK_FULL}
    assert world.bucket.bytes_sent() == 0
    assert list(world.home.iterdir()) == []


def test_disk_that_fails_raises_once_all_places_are_quiet(world):
    with pytest.raises(StoreError, match="reserve"):
        world.fetch(spool=Spool(world.home, files=FullDisk(errno.EIO)))

    assert issubclass(DiskFailed, StoreError)


def test_bucket_that_the_run_does_not_have_is_refused_by_name(world):
    by = fetcher(world.scheduler, {"main": world.bucket}, world.home)

    with pytest.raises(ConfigError, match="'elsewhere'"):
        by.fetch([peer("w0", "elsewhere")], deadline=1.0)
