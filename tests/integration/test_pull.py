"""Contributions pulled from buckets: accepted as any other, or the round goes on without them."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from atoll.blobs.bucket import Tag
from atoll.errors import (
    AtollError,
    Conflict,
    LeftOut,
    ObjectChanged,
    ObjectRefused,
    ProtocolError,
    StaleContribution,
    StorageFull,
    StoreAway,
    StoreLate,
    WrongRound,
)
from atoll.gather import statement as statements
from atoll.gather.words import Reason
from atoll.ledger.records import LeaseState
from atoll.ledger.tables.contributions import ContributionTable
from atoll.ledger.tables.rounds import RoundTable
from tests import clusters
from tests.clusters import CutOff, Frame
from tests.gather_objects import LARGE
from tests.ledgers import alone
from tests.publishing import GatherCluster, PublishingIsland


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[GatherCluster]:
    made = GatherCluster(tmp_path)
    yield made
    made.close()


@pytest.fixture
def large(tmp_path: Path) -> Iterator[GatherCluster]:
    """A run whose objects come in many pieces."""
    made = GatherCluster(tmp_path, layout=LARGE)
    made.held["main"].piece_bytes = 1000
    yield made
    made.close()


def accepted(cluster: GatherCluster, round_number: int) -> list[str]:
    return [c.worker_id for c in alone(cluster.ledger).contributions.of_round(round_number)]


def states(cluster: GatherCluster, round_number: int, worker_id: str) -> set[LeaseState]:
    """What became of the rows that the worker was given."""
    leases = alone(cluster.ledger).leases.of_round(round_number)
    return {lease.state for lease in leases if lease.worker_id == worker_id}


# Accepted


def test_announced_contributions_are_pulled_and_fold_as_any_others(cluster):
    a, b = cluster.islands("ab")
    b.bucket = "main"

    receipts = {a.contribute_by_pull().receipt, b.contribute_by_pull().receipt}

    assert len(receipts) == 2 and "" not in receipts
    assert cluster.settle() == 1
    assert cluster.audit(with_replay=True).problems == []
    assert cluster.drafts() == []


def test_statement_and_its_servers_time_are_recorded_beside_the_contribution(cluster):
    a, _ = cluster.islands("ab")
    cluster.clock.advance(seconds=77.0)
    sent = a.publish(a.frame())
    published = cluster.clock.wall()
    cluster.clock.advance(seconds=5.0)

    a.announce(sent)

    [found] = alone(cluster.ledger).announcements.of_round(1)
    assert found.statement.encode() == statements.signed(a.statement(sent), a.signing)
    assert (found.worker_id, found.stamp) == ("a", published)


def test_each_byte_of_an_object_is_read_once(large):
    a, _ = large.islands("ab")
    sent = a.publish(a.frame())

    a.announce(sent)

    assert large.held["main"].sent == {a.key_of(sent): sent.nbytes}
    assert large.coordinator.status().gather.pulled_bytes == sent.nbytes


def test_announcing_again_gives_the_first_receipt_and_changes_nothing(cluster):
    a, _ = cluster.islands("ab")
    sent = a.publish(a.frame())
    first = a.announce(sent)
    before = cluster.coordinator.state_hash()

    again = a.announce(sent)

    assert again == first
    assert cluster.coordinator.state_hash() == before


def test_later_life_that_announces_the_same_frame_gets_the_first_receipt(cluster):
    a, b = cluster.islands("ab")
    sent = a.publish(a.frame())
    first = a.announce(sent)
    b.contribute_by_pull()
    cluster.settle()
    a.join()

    assert a.announce(sent) == first


def test_frame_of_an_earlier_life_is_pulled_for_the_later_one(cluster):
    a, _ = cluster.islands("ab")
    sent = a.publish(a.frame())
    a.join()

    assert a.announce(sent).receipt
    [found] = alone(cluster.ledger).contributions.of_round(1)
    assert found.incarnation == 2


def test_window_lists_what_a_published_round_folded(cluster):
    a, b = cluster.islands("ab")
    base = cluster.published_digest
    sent = [island.publish(island.frame()) for island in (a, b)]
    for island, frame in zip((a, b), sent, strict=True):
        island.announce(frame)
    with pytest.raises(WrongRound, match="round 1 is not published"):
        a.window(1)
    cluster.settle()

    found = a.window(1)

    assert (found.base_digest, found.result_digest) == (base, cluster.published_digest)
    assert [(p.worker_id, p.key, p.bucket, p.sha256, p.nbytes) for p in found.peers] == [
        (island.name, island.signing.public.hex, "main", frame.sha256, frame.nbytes)
        for island, frame in zip((a, b), sent, strict=True)
    ]


def test_messages_of_gather_runs_are_refused_elsewhere_and_uploads_here(cluster, tmp_path):
    plain = clusters.Cluster(tmp_path / "plain")
    other = clusters.HandIsland(plain, "a").join()
    a, _ = cluster.islands("ab")
    sent = a.frame()

    with pytest.raises(ProtocolError, match="are pulled from buckets; publish it"):
        a.send(sent)
    spoken = a.announcement(sent, identity=other.identity.model_dump())
    with pytest.raises(ProtocolError, match="AnnounceRequest is not a message of run"):
        plain.coordinator.announce(spoken)
    plain.close()


# One statement, one object


def test_other_bytes_than_were_accepted_conflict_and_the_first_stand(cluster):
    a, _ = cluster.islands("ab")
    other = a.header(a.assignment())
    a.contribute_by_pull()
    before = cluster.coordinator.state_hash()
    forged = a.publish_freely(clusters.make_frame(other, bytes(other.payload_bytes)))

    with pytest.raises(Conflict, match="the first one stands"):
        a.announce(forged)

    assert cluster.coordinator.state_hash() == before


def test_second_statement_of_an_accepted_frame_conflicts(cluster):
    a, _ = cluster.islands("ab")
    sent = a.publish(a.frame())
    a.announce(sent)
    second = statements.signed(a.statement(sent, sample_digest="7" * 64), a.signing)

    with pytest.raises(Conflict, match="another statement for round 1; the first"):
        a.announce(sent, document=second)


def test_second_statement_of_what_is_not_in_ends_its_part_in_the_round(tmp_path):
    """Only refused, it would be waited for as long as nobody announces the first again."""
    cluster = GatherCluster(tmp_path, {"gather.primaries": 2})
    _, _, c = cluster.islands("abc")
    sent = c.publish(c.frame())
    assert "'c' is a reserve of round 2" in c.announce(sent).waits_for
    other = c.publish_freely(c.frame(loss_sum=3.0))

    with pytest.raises(LeftOut, match=r"^CONFLICT: .*the first one stands"):
        c.announce(other)
    assert cluster.reasons() == {"c": "CONFLICT"}
    with pytest.raises(LeftOut, match=r"^CONFLICT: "):
        c.announce(sent)
    cluster.close()


# The worker's fault


Spoil = Callable[[PublishingIsland, Frame], dict[str, Any]]


def another_key(a: PublishingIsland, sent: Frame) -> dict[str, Any]:
    b = PublishingIsland(a.cluster, "b")
    return {"document": statements.signed(a.statement(sent), b.signing)}


def field(name: str, value: object) -> Spoil:
    def spoil(a: PublishingIsland, sent: Frame) -> dict[str, Any]:
        return {"document": statements.signed(a.statement(sent, **{name: value}), a.signing)}

    return spoil


def gone(a: PublishingIsland, sent: Frame) -> dict[str, Any]:
    a.place.inner.remove(a.key_of(sent))
    return {}


def replaced(a: PublishingIsland, sent: Frame) -> dict[str, Any]:
    a.place.breaks[a.name] = [(10, ObjectChanged("another object is there"))]
    return {}


def put(change: Callable[[bytes], bytes]) -> Spoil:
    def spoil(a: PublishingIsland, sent: Frame) -> dict[str, Any]:
        a.place.inner.put(a.key_of(sent), change(sent.data))
        return {}

    return spoil


def other_preamble(a: PublishingIsland, sent: Frame) -> dict[str, Any]:
    """Announces one header and publishes another: both are good in themselves."""
    other = a.frame(loss_sum=47.0)
    assert other.nbytes == sent.nbytes
    a.place.inner.put(a.key_of(other), other.data)
    stated = statements.signed(a.statement(other), a.signing)
    return {"document": stated, "sha256": other.sha256}


FAULTS: dict[str, tuple[Spoil, Reason]] = {
    "forged": (another_key, Reason.SIGNATURE),
    "no statement": (lambda *_: {"document": b"{}"}, Reason.STATEMENT),
    "not ascii": (lambda *_: {"document": b"\xff\xfe"}, Reason.STATEMENT),
    "another window": (field("window", 3), Reason.STATEMENT),
    "another base": (field("base_digest", "0" * 64), Reason.STATEMENT),
    "another run": (field("run_id", "run-2"), Reason.STATEMENT),
    "another uid": (field("uid", "b"), Reason.STATEMENT),
    "another manifest": (field("manifest_sha256", "0" * 64), Reason.STATEMENT),
    "other rows": (field("sample_digest", "0" * 64), Reason.STATEMENT),
    "another object": (field("sha256", "0" * 64), Reason.STATEMENT),
    "another size": (field("nbytes", 4000), Reason.STATEMENT),
    "missing": (gone, Reason.MISSING),
    "replaced while read": (replaced, Reason.CHANGED),
    "longer": (put(lambda data: data + b"x"), Reason.SIZE),
    "shorter": (put(lambda data: data[:-1]), Reason.SIZE),
    "damaged": (put(lambda data: data[:-1] + bytes([data[-1] ^ 1])), Reason.FRAME),
    "another header": (other_preamble, Reason.FRAME),
}


@pytest.fixture(scope="module")
def without_a(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest after two rounds of which the second went on without island a."""
    cluster = GatherCluster(tmp_path_factory.mktemp("without"))
    _, b, c = cluster.islands("abc")
    cluster.coordinator.rounds.skip(2, "a", reason="SIZE", sentence="by hand")
    for island in (b, c):
        island.contribute_by_pull()
    cluster.settle()
    cluster.close()
    return cluster.digest


@pytest.mark.parametrize("name", FAULTS)
def test_round_goes_on_without_a_worker_at_fault(cluster, without_a, name):
    spoil, reason = FAULTS[name]
    a, b, c = cluster.islands("abc")
    b.contribute_by_pull()
    sent = a.publish(a.frame())
    changes = spoil(a, sent)
    before = len(cluster.held["main"].looked)

    with pytest.raises(LeftOut, match=f"^{reason}: .*go on with the next assignment"):
        a.announce(sent, **changes)

    assert cluster.reasons() == {"a": reason}
    assert states(cluster, 2, "a") == {LeaseState.REOPENED}
    assert cluster.drafts() == []
    looked = any("/a/" in key for key in cluster.held["main"].looked[before:])
    assert looked == (reason not in (Reason.STATEMENT, Reason.SIGNATURE))
    with pytest.raises(LeftOut, match=f"^{reason}: "):
        a.announce(sent, **changes)
    assert a.assignment().action == "wait"
    c.contribute_by_pull()
    assert cluster.settle() == 1
    assert (accepted(cluster, 2), cluster.digest) == (["b", "c"], without_a)
    assert cluster.drafts() == []
    for island in (a, b, c):
        assert island.contribute_by_pull().receipt
    assert cluster.settle() == 1
    assert cluster.audit(with_replay=True).problems == []


def test_header_that_breaks_the_runs_rules_is_the_workers_fault(cluster):
    a, *_ = cluster.islands("abc")
    sent = a.publish_freely(a.frame(weight=10**6))

    with pytest.raises(LeftOut, match="do not fit the lease"):
        a.announce(sent)

    assert cluster.reasons() == {"a": "FRAME"}


def test_short_round_gives_rows_again_to_a_worker_that_it_went_on_without(cluster):
    """A round needs its `min_workers`; what was stated before the skip counts no more."""
    a, b = cluster.islands("ab")
    sent = a.publish(a.frame())
    a.place.inner.remove(a.key_of(sent))
    with pytest.raises(LeftOut, match="MISSING"):
        a.announce(sent)
    cluster.settle()

    given = a.assignment()
    again = a.publish_freely(a.frame(given, loss_sum=47.0))

    assert (given.action, given.round) == ("train", 1)
    assert a.announce(again).receipt
    b.contribute_by_pull()
    assert cluster.settle() == 1
    assert cluster.audit(with_replay=True).problems == []


def spoil(island: PublishingIsland) -> None:
    """Announces what is not there."""
    sent = island.publish_freely(island.frame())
    gone(island, sent)
    with pytest.raises(LeftOut, match="MISSING"):
        island.announce(sent)


def test_worker_that_always_fails_keeps_a_short_round_from_nobody(cluster):
    """Who has had no rows yet comes before who has lost some, whatever their names."""
    a, b = cluster.islands("ab")
    z = cluster.island("z")
    b.contribute_by_pull()

    spoil(a)
    cluster.settle()

    assert cluster.coordinator.rounds.find(1).holding == {"b", "z"}
    assert z.contribute_by_pull().receipt
    assert cluster.settle() == 1
    assert accepted(cluster, 1) == ["b", "z"]


def test_worker_that_fails_again_and_again_is_given_rows_later_and_later(cluster):
    """At once, it would be recorded as often as it can announce."""
    a, _ = cluster.islands("ab")
    waits = []
    for _ in range(4):
        spoil(a)
        cluster.settle()
        seconds = 0.0
        while "a" not in cluster.coordinator.rounds.find(1).holding:
            cluster.clock.advance(seconds=0.5)
            seconds += 0.5
            cluster.settle()
        waits.append(seconds)

    assert waits == [0.0, 1.0, 2.0, 4.0]


@pytest.mark.parametrize("is_the_same", [True, False])
def test_worker_whose_lease_was_over_may_state_the_same_rows_anew(tmp_path, is_the_same):
    """They may be the very rows again: only of one lease there is one statement."""
    cluster = GatherCluster(tmp_path, {"work.lease_seconds": 8.0})
    a, b = cluster.islands("ab")
    given = a.assignment()
    sent = a.publish(a.frame(given))
    a.place.errors = [StoreAway("down")]
    assert "to answer" in a.announce(sent).waits_for
    b.contribute_by_pull()

    cluster.keep_alive(a, b, seconds=12.0)
    anew = a.assignment()
    again = sent if is_the_same else a.publish_freely(a.frame(anew, loss_sum=47.0))

    assert (anew.round, anew.ranges) == (given.round, given.ranges)
    seen = cluster.coordinator.rounds.view(1)
    assert seen is not None and seen.announced == {"b"}  # of what it was given now
    assert a.announce(again).receipt
    assert (cluster.reasons(), cluster.settle()) == ({}, 1)
    assert cluster.audit(with_replay=True).problems == []
    cluster.close()


# Ours


def test_server_that_is_away_ends_nothing(cluster):
    a, b = cluster.islands("ab")
    sent = a.publish(a.frame())
    a.place.errors = [StoreAway("down")]

    reply = a.announce(sent)

    assert reply.receipt == "" and "bucket 'main' to answer" in reply.waits_for
    assert (cluster.reasons(), states(cluster, 1, "a")) == ({}, {LeaseState.LEASED})
    assert "to answer" in a.announce(sent).waits_for  # not asked again at once
    cluster.clock.advance(seconds=1.0)
    assert a.announce(sent).receipt
    b.contribute_by_pull()
    assert cluster.settle() == 1


def test_broken_download_goes_on_behind_what_came(large):
    a, _ = large.islands("ab")
    sent = a.publish(a.frame())
    a.place.breaks["a"] = [(5000, StoreAway("broke off")), (0, StoreAway("down"))]

    replies = []
    for _ in range(3):
        replies.append(a.announce(sent).receipt)
        large.clock.advance(seconds=1.0)

    assert replies[:2] == ["", ""] and replies[2]
    assert large.held["main"].sent == {a.key_of(sent): sent.nbytes}


@pytest.mark.parametrize("other_answers", [True, False])
def test_object_that_does_not_come_in_time_is_slow_only_if_others_came(large, other_answers):
    a, b, c = large.islands("abc")
    sent = a.publish(a.frame())
    a.place.breaks["a"] = [(1000, StoreAway("broke off")), (1000, StoreLate("late"))]
    a.announce(sent)
    large.keep_alive(a, b, c, seconds=60.0)
    if other_answers:
        b.contribute_by_pull()

    if other_answers:
        with pytest.raises(LeftOut, match=r"^SLOW: .*within 60 s, and gave others'"):
            a.announce(sent)
    else:
        assert "to answer" in a.announce(sent).waits_for
        large.clock.advance(seconds=2.0)
        assert a.announce(sent).receipt


def test_server_that_says_that_there_is_none_has_answered(large):
    a, b, c = large.islands("abc")
    sent = a.publish(a.frame())
    a.place.breaks["a"] = [(1000, StoreAway("broke off")), (1000, StoreLate("late"))]
    a.announce(sent)
    large.keep_alive(a, b, c, seconds=60.0)
    spoil(b)

    with pytest.raises(LeftOut, match=r"^SLOW: "):
        a.announce(sent)


@pytest.mark.parametrize("other_answers", [True, False])
def test_server_that_refuses_is_the_workers_fault_only_if_it_serves_others(large, other_answers):
    a, b, c = large.islands("abc")
    sent = a.publish(a.frame())
    a.place.errors = [ObjectRefused("403"), ObjectRefused("403")]
    a.announce(sent)
    large.keep_alive(a, b, c, seconds=60.0)
    if other_answers:
        a.place.errors, later = [], a.place.errors
        b.contribute_by_pull()
        a.place.errors = later
        with pytest.raises(LeftOut, match=r"^MISSING: "):
            a.announce(sent)
    else:
        assert "to answer" in a.announce(sent).waits_for
        assert large.reasons() == {}


def test_full_disk_ends_nothing(cluster, monkeypatch):
    a, _ = cluster.islands("ab")
    sent = a.publish(a.frame())
    with monkeypatch.context() as patch:
        patch.setattr(cluster.blobs, "writer", _full)

        with pytest.raises(StorageFull):
            a.announce(sent)

    assert (cluster.reasons(), states(cluster, 1, "a")) == ({}, {LeaseState.LEASED})
    assert a.announce(sent).receipt


def _full(**_: object) -> None:
    raise StorageFull("no room")


# Crashes between the steps


def cut_off(*_: object, **__: object) -> None:
    raise CutOff


def test_crash_before_the_record_leaves_nothing_and_the_island_announces_again(
    cluster, monkeypatch
):
    a, b = cluster.islands("ab")
    sent = a.publish(a.frame())
    before = cluster.coordinator.state_hash()
    with monkeypatch.context() as patch:
        patch.setattr(ContributionTable, "accept", cut_off)
        with pytest.raises(CutOff):
            a.announce(sent)

    cluster.restart()

    assert cluster.coordinator.state_hash() == before
    assert a.announce(sent).receipt
    b.contribute_by_pull()
    assert cluster.settle() == 1
    assert cluster.audit(with_replay=True).problems == []


def test_crash_halfway_through_a_skip_leaves_the_lease_and_no_record(cluster, monkeypatch):
    a, b, c = cluster.islands("abc")
    sent = a.publish(a.frame())
    gone(a, sent)
    before = cluster.coordinator.state_hash()
    with monkeypatch.context() as patch:
        patch.setattr(RoundTable, "expire", cut_off)
        with pytest.raises(CutOff):
            a.announce(sent)

    cluster.restart()

    assert cluster.coordinator.state_hash() == before
    with pytest.raises(LeftOut, match="MISSING"):
        a.announce(sent)
    for island in (b, c):
        island.contribute_by_pull()
    assert cluster.settle() == 1


def test_skip_outlives_the_coordinator(cluster):
    a, *_ = cluster.islands("abc")
    sent = a.publish(a.frame())
    gone(a, sent)
    with pytest.raises(LeftOut):
        a.announce(sent)

    cluster.restart()

    with pytest.raises(LeftOut, match=r"^MISSING: 'a' has no object"):
        a.announce(sent)
    assert cluster.coordinator.status().gather.skips == {"MISSING": 1}


def test_announcement_of_a_closed_round_is_stale(tmp_path):
    cluster = GatherCluster(tmp_path, {"membership.quorum": 2})
    a, b, c = cluster.islands("abc")
    sent = c.publish(c.frame())
    for island in (a, b):
        island.contribute_by_pull()
    cluster.settle()

    with pytest.raises(StaleContribution, match="closed without this contribution") as refused:
        c.announce(sent)
    assert not isinstance(refused.value, LeftOut)
    cluster.close()


def test_round_that_closes_during_a_pull_takes_nothing_of_it(large, monkeypatch):
    a, b, c = large.islands("abc")
    sent = a.publish(a.frame())
    pieces = large.held["main"].inner.pieces

    def freeze_meanwhile(*given: Any, **more: Any) -> Iterator[memoryview]:
        for piece in pieces(*given, **more):
            large.coordinator.rounds.skip(2, "a", reason="SLOW", sentence="by hand")
            for island in (b, c):
                island.contribute_by_pull()
            large.settle()
            yield piece

    with monkeypatch.context() as patch:
        patch.setattr(large.held["main"].inner, "pieces", _once(freeze_meanwhile, pieces))
        with pytest.raises(AtollError) as refused:
            a.announce(sent)

    assert isinstance(refused.value, StaleContribution)
    assert (accepted(large, 2), large.drafts()) == (["b", "c"], [])


def _once(first: Callable[..., Any], then: Callable[..., Any]) -> Callable[..., Any]:
    calls = iter([first])
    return lambda *given, **more: next(calls, then)(*given, **more)


# Several at once


class HeldUp(NamedTuple):
    """A run with an island whose object does not come before it may."""

    cluster: GatherCluster
    begun: threading.Semaphore
    go_on: threading.Event


@pytest.fixture
def held_up(cluster, monkeypatch) -> Iterator[HeldUp]:
    """The object of island a does not come before the event is set."""
    go_on, bucket = threading.Event(), cluster.held["main"]
    pieces = bucket.pieces

    def slow(key: str, *given: Any, **more: Any) -> Iterator[memoryview]:
        if "/a/" in key:
            begun.release()
            assert go_on.wait(30.0)
        yield from pieces(key, *given, **more)

    begun = threading.Semaphore(0)
    monkeypatch.setattr(bucket, "pieces", slow)
    yield HeldUp(cluster, begun, go_on)
    go_on.set()


def test_slow_object_holds_up_nobody_else(held_up):
    cluster, begun, go_on = held_up
    a = cluster.island("a")
    others = [cluster.island(name) for name in "bcde"]
    receipts: list[str] = []
    sent = a.publish(a.frame())
    pulling = threading.Thread(target=lambda: receipts.append(a.announce(sent).receipt))
    pulling.start()
    assert begun.acquire(timeout=30.0)

    assert others[0].contribute_by_pull().receipt
    assert a.announce(sent).waits_for == "the pull that is under way"
    assert cluster.settle() == 0  # it waits for a

    go_on.set()
    pulling.join(30.0)
    assert receipts[0]
    assert cluster.settle() == 1
    assert accepted(cluster, 1) == ["a", "b"]


def test_bucket_that_was_away_has_its_full_time_when_it_is_asked_again(tmp_path):
    """Waits between two tries grow beyond the time of a pull: none must begin in the past."""
    cluster = GatherCluster(tmp_path, {"gather.pull_seconds": 1.0})
    a, b = cluster.islands("ab")
    sent = a.publish(a.frame())
    a.place.errors = [StoreAway("the server is away")] * 5
    real, left = a.place.look, list[float]()  # of its time, whenever it is asked

    def look(key: str, *, deadline: float) -> Tag | None:
        left.append(deadline - cluster.clock.now())
        return real(key, deadline=deadline)

    a.place.look = look  # type: ignore[method-assign]
    while a.place.errors:
        a.announce(sent)
        cluster.keep_alive(a, b, seconds=4)

    assert left[0] == 1.0
    assert 1.0 in left[1:]
    cluster.close()


def test_same_announcement_twice_at_once_is_accepted_once(cluster, monkeypatch):
    """The second has found no receipt, and gets its place when the first has left it."""
    a, _ = cluster.islands("ab")
    sent = a.publish(a.frame())
    pulls = cluster.coordinator.pulls
    assert pulls is not None
    receipts: list[str] = []

    def late(*_: object) -> str:
        patch.undo()
        receipts.append(a.announce(sent).receipt)
        return str(pulls.places.take((1, "a"), room=lambda: 9))

    with monkeypatch.context() as patch:
        patch.setattr(pulls, "_turn", late)
        reply = a.announce(sent)

    assert [reply.receipt] == receipts != [""]
    assert accepted(cluster, 1) == ["a"]
    assert cluster.drafts() == []
