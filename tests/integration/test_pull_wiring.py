"""Who is told, who is heard and what is left when announced contributions are pulled."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator import handlers
from atoll.coordinator.handlers import Arrival
from atoll.coordinator.pull.places import SLOTS
from atoll.coordinator.pull.pulls import Pulls
from atoll.errors import (
    LeftOut,
    ObjectChanged,
    StaleContribution,
    StaleGeneration,
    StoreAway,
    StoreLate,
    UnknownWorker,
    WrongBase,
)
from atoll.gather.partial import MAX_SENTENCE
from atoll.ledger.records import LeaseState
from tests import clusters
from tests.clusters import Frame
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


def pulls_of(cluster: GatherCluster) -> Pulls:
    assert cluster.coordinator.pulls is not None
    return cluster.coordinator.pulls


def missing(island: PublishingIsland) -> Frame:
    """A frame that its statement points to and nobody finds."""
    sent = island.publish_freely(island.frame())
    island.place.inner.remove(island.key_of(sent))
    return sent


# Who is told


def test_those_who_wait_are_told_of_what_is_accepted(cluster):
    a, _ = cluster.islands("ab")
    sent = a.publish(a.frame())
    seen: list[list[str]] = []
    cluster.coordinator.on_change(lambda: seen.append(accepted(cluster, 1)))

    a.announce(sent)

    assert seen[-1] == ["a"]


def test_those_who_wait_are_told_of_a_skip_before_anything_is_pulled(cluster):
    a, *_ = cluster.islands("abc")
    sent = a.publish(a.frame())
    seen: list[dict[str, str]] = []
    cluster.coordinator.on_change(lambda: seen.append(cluster.reasons()))

    with pytest.raises(LeftOut):
        a.announce(sent, document=b"{}")

    assert seen[-1] == {"a": "STATEMENT"}


def test_those_who_wait_for_a_server_are_told_when_it_is_to_be_asked_again(cluster):
    a, _ = cluster.islands("ab")
    sent = a.publish(a.frame())
    a.place.errors = [StoreAway("down")]
    a.announce(sent)
    cluster.coordinator.advance()
    told: list[float] = []
    cluster.coordinator.on_change(lambda: told.append(cluster.clock.now()))

    cluster.coordinator.advance()
    assert told == []
    cluster.clock.advance(seconds=1.0)
    cluster.coordinator.advance()

    assert len(told) == 1
    assert a.announce(sent).receipt


def test_those_who_wait_for_a_place_are_told_when_one_is_free(cluster):
    a, _ = cluster.islands("ab")
    places = pulls_of(cluster).places
    for number in range(SLOTS):
        places.take((7, f"{number}"), room=lambda: SLOTS)
    sent = a.publish(a.frame())
    assert a.announce(sent).waits_for == "one of 8 places to pull with"
    cluster.coordinator.advance()
    told: list[float] = []
    cluster.coordinator.on_change(lambda: told.append(cluster.clock.now()))

    cluster.coordinator.advance()
    assert told == []
    places.leave((7, "0"))
    cluster.coordinator.advance()

    assert len(told) == 1
    assert a.announce(sent).receipt


def test_reserve_that_waits_is_told_when_the_time_of_primaries_is_over(tmp_path):
    settings = {"gather.primaries": 2, "gather.primary_seconds": 6.0}
    cluster = GatherCluster(tmp_path, settings)
    a, b, c = cluster.islands("abc")
    a.contribute_by_pull()
    sent = c.publish(c.frame())
    assert c.announce(sent).waits_for == "b: 'c' is a reserve of round 2"
    cluster.keep_alive(a, b, c, seconds=4.0)
    told: list[float] = []
    cluster.coordinator.on_change(lambda: told.append(cluster.clock.now()))

    for _ in range(2):
        cluster.coordinator.advance()
    assert told == []
    cluster.clock.advance(seconds=2.0)
    for _ in range(2):
        cluster.coordinator.advance()

    assert len(told) == 1
    assert c.announce(sent).receipt
    cluster.close()


def test_who_waits_is_told_when_a_short_round_gives_rows_again(tmp_path):
    """In any run: that its lease was over it heard before, and there was nothing to do then."""
    plain = clusters.Cluster(tmp_path, {"work.lease_seconds": 8.0})
    a, b = (clusters.HandIsland(plain, name).join() for name in "ab")
    b.send(b.frame())
    plain.clock.advance(seconds=4.0)
    for island in (a, b):
        island.beat()
    plain.clock.advance(seconds=4.0)
    told: list[str] = []
    plain.coordinator.on_change(lambda: told.append(a.assignment().action))

    plain.coordinator.advance()

    assert told == ["wait", "train"]
    plain.close()


def test_worker_that_was_skipped_twice_is_told_the_newer_reason(cluster):
    a, _ = cluster.islands("ab")
    with pytest.raises(LeftOut, match=r"^MISSING"):
        a.announce(missing(a))
    cluster.settle()
    sent = a.publish(a.frame())
    with pytest.raises(LeftOut, match=r"^STATEMENT"):
        a.announce(sent, document=b"{}")

    with pytest.raises(LeftOut, match=r"^STATEMENT"):
        a.announce(sent)


def test_sentence_of_a_skip_is_bounded_whatever_a_server_says(cluster):
    a, b, c = cluster.islands("abc")
    sent = a.publish(a.frame())
    a.place.errors = [StoreAway("down")]
    a.announce(sent)
    cluster.keep_alive(a, b, c, seconds=60.0)
    b.contribute_by_pull()
    a.place.errors = [StoreAway("x" * 5000)]

    with pytest.raises(LeftOut, match=r"^SLOW"):
        a.announce(sent)

    [skip] = cluster.coordinator.rounds.skips(2)
    assert "xxx" in skip.sentence and len(skip.sentence) == MAX_SENTENCE


# Who is heard


def test_announcing_is_a_sign_of_life(cluster):
    a, b = cluster.islands("ab")
    sent = a.publish(a.frame())
    a.place.errors = [StoreAway("down")]
    cluster.clock.advance(seconds=8.0)

    a.announce(sent)
    cluster.clock.advance(seconds=8.0)

    assert cluster.coordinator.members() == ["a"] != [b.name]


def test_announcement_that_waits_outlives_a_new_generation(cluster):
    """The same request looked at again: whoever joined meanwhile is no reason to refuse it."""
    a, _ = cluster.islands("ab")
    said = a.announcement(a.publish(a.frame()))
    a.place.errors = [StoreAway("down")]
    assert handlers.answer(cluster.coordinator, said, Arrival()).waits_for
    cluster.island("c")
    cluster.clock.advance(seconds=1.0)

    with pytest.raises(StaleGeneration):
        handlers.answer(cluster.coordinator, said, Arrival())

    assert handlers.answer(cluster.coordinator, said, Arrival(again=True)).receipt


def test_window_is_for_members_alone(cluster):
    a, b = cluster.islands("ab")
    for island in (a, b):
        island.contribute_by_pull()
    cluster.settle()
    a.leave()

    with pytest.raises(UnknownWorker):
        a.window(1)


def test_server_that_gives_an_object_late_has_answered(large, monkeypatch):
    """Not only when it was looked up: who began to wait in between is denied something."""
    a, b, c = large.islands("abc")
    late, early = a.publish(a.frame()), b.publish(b.frame())
    a.place.breaks["a"] = [(1000, StoreAway("broke off")), (1000, StoreLate("late"))]
    real = a.place.inner.pieces

    def pieces(key: str, *given: Any, **more: Any) -> Iterator[memoryview]:
        if "/b/" in key:
            large.clock.advance(seconds=1.0)
            a.announce(late)
            large.clock.advance(seconds=1.0)
        yield from real(key, *given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(a.place.inner, "pieces", pieces)
        assert b.announce(early).receipt
    large.keep_alive(a, b, c, seconds=60.0)

    with pytest.raises(LeftOut, match=r"^SLOW"):
        a.announce(late)


def test_server_that_breaks_off_everybodys_objects_has_answered_them(large):
    """It says what there is: two that trickle must not excuse each other for ever."""
    a, b, c = large.islands("abc")
    sent = {island: island.publish(island.frame()) for island in (a, b)}
    for island in (a, b):
        large.clock.advance(seconds=1.0)
        island.place.breaks[island.name] = [(1000, StoreAway("broke off"))] * 2
        island.announce(sent[island])
    large.keep_alive(a, b, c, seconds=60.0)

    with pytest.raises(LeftOut, match=r"^SLOW"):
        a.announce(sent[a])


# What is taken


def test_late_primary_is_not_pulled_while_its_place_is_being_filled(tmp_path, monkeypatch):
    cluster = GatherCluster(tmp_path, {"gather.primaries": 2, "gather.primary_seconds": 8.0})
    a, b, c, d = cluster.islands("abcd")
    a.contribute_by_pull()
    reserve, late = c.publish(c.frame()), b.publish(b.frame())
    assert c.announce(reserve).waits_for
    cluster.keep_alive(a, b, c, d, seconds=8.0)
    real, told = c.place.inner.pieces, list[str]()

    def pieces(key: str, *given: Any, **more: Any) -> Iterator[memoryview]:
        if "/c/" in key:
            told.append(b.announce(late).waits_for)
        yield from real(key, *given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(c.place.inner, "pieces", pieces)
        assert c.announce(reserve).receipt

    assert told == ["pulls of round 2 that are under way"]
    assert cluster.settle() == 1
    assert accepted(cluster, 2) == ["a", "c"]
    with pytest.raises(StaleContribution):
        b.announce(late)
    cluster.close()


def test_later_life_does_not_go_on_with_what_came_for_an_earlier_one(large):
    a, _ = large.islands("ab")
    sent = a.publish(a.frame())
    a.place.breaks["a"] = [(5000, StoreAway("broke off"))]
    a.announce(sent)
    a.join()
    large.clock.advance(seconds=1.0)

    assert a.announce(sent).receipt

    [found] = alone(large.ledger).contributions.of_round(1)
    assert found.incarnation == 2
    assert large.drafts() == []


def test_contribution_from_other_weights_is_refused_and_its_worker_keeps_its_rows(cluster):
    """It goes on from the right ones, as in any run."""
    a, *_ = cluster.islands("abc")
    sent = a.publish_freely(a.frame(base_digest="0" * 64))

    with pytest.raises(WrongBase):
        a.announce(sent)

    assert cluster.reasons() == {}
    assert a.contribute_by_pull().receipt


# What is left


def test_rows_of_a_skip_are_given_up_where_none_is_issued_twice(tmp_path):
    cluster = GatherCluster(tmp_path, {"work.policy": "at_most_once"})
    a, *_ = cluster.islands("abc")
    with pytest.raises(LeftOut):
        a.announce(missing(a))

    ended = [x for x in alone(cluster.ledger).leases.of_round(2) if x.worker_id == "a"]
    assert {lease.state for lease in ended} == {LeaseState.GIVEN_UP}
    cluster.close()


def test_round_that_closed_is_stale_for_an_object_that_is_bad(large, monkeypatch):
    """It is not blamed on the worker: nobody wanted it any more."""
    a, b, c = large.islands("abc")
    sent = a.publish(a.frame())

    def pieces(*_: Any, **__: Any) -> Iterator[memoryview]:
        patch.undo()
        large.coordinator.rounds.skip(2, "a", reason="SLOW", sentence="by hand")
        for island in (b, c):
            island.contribute_by_pull()
        large.settle()
        raise ObjectChanged("another object is there")

    with monkeypatch.context() as patch:
        patch.setattr(a.place.inner, "pieces", pieces)
        with pytest.raises(StaleContribution, match="round=2 closed") as refused:
            a.announce(sent)

    assert not isinstance(refused.value, LeftOut)
    assert large.reasons(2) == {"a": "SLOW"}


def test_nothing_of_an_interrupted_pull_outlives_its_round(tmp_path):
    cluster = GatherCluster(tmp_path, {"membership.quorum": 2}, layout=LARGE)
    a, b, c = cluster.islands("abc")
    sent = a.publish(a.frame())
    a.place.piece_bytes, a.place.breaks["a"] = 1000, [(5000, StoreAway("broke off"))]
    a.announce(sent)
    assert len(cluster.drafts()) == 1

    for island in (b, c):
        island.contribute_by_pull()
    assert cluster.settle() == 1

    assert cluster.drafts() == []
    assert vars(pulls_of(cluster))["_open"] == {}
    assert not pulls_of(cluster).servers.is_waited_for((2, "a"))
    cluster.close()
