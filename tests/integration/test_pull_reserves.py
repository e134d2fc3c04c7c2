"""Reserves step in for primaries that are missing, in order, and are stale where none is."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.errors import LeftOut, StaleContribution
from atoll.ledger.records import LeaseState
from tests.ledgers import alone
from tests.publishing import GatherCluster, PublishingIsland


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[GatherCluster]:
    """Two primaries, the others are reserves."""
    made = GatherCluster(tmp_path, {"gather.primaries": 2})
    yield made
    made.close()


@pytest.fixture
def hurried(tmp_path: Path) -> Iterator[GatherCluster]:
    """The same, and primaries have 8 s."""
    made = GatherCluster(tmp_path, {"gather.primaries": 2, "gather.primary_seconds": 8.0})
    yield made
    made.close()


def folded(cluster: GatherCluster, round_number: int) -> list[str]:
    return [c.worker_id for c in alone(cluster.ledger).contributions.of_round(round_number)]


def fail(island: PublishingIsland) -> None:
    """Announces an object that is not there."""
    sent = island.publish(island.frame())
    island.place.inner.remove(island.key_of(sent))
    with pytest.raises(LeftOut, match="MISSING"):
        island.announce(sent)


def test_reserve_waits_while_a_primary_may_come(cluster):
    a, _, c, _ = cluster.islands("abcd")
    sent = c.publish(c.frame())
    a.contribute_by_pull()

    reply = c.announce(sent)

    assert (reply.receipt, reply.waits_for) == ("", "b: 'c' is a reserve of round 2")
    assert cluster.held["main"].sent.get(c.key_of(sent)) is None


def test_reserves_not_needed_are_stale_and_their_rows_open_again(cluster):
    a, b, c, d = cluster.islands("abcd")
    frames = {island.name: island.publish(island.frame()) for island in (a, b, c, d)}
    for island in (d, c, b, a):
        island.announce(frames[island.name])

    assert cluster.settle() == 1

    assert folded(cluster, 2) == ["a", "b"]
    for island in (c, d):
        with pytest.raises(StaleContribution, match="round=2 closed without"):
            island.announce(frames[island.name])
    ended = [x for x in alone(cluster.ledger).leases.of_round(2) if x.worker_id in "cd"]
    assert {lease.state for lease in ended} == {LeaseState.REOPENED}
    assert cluster.audit(with_replay=True).problems == []


def test_first_reserve_steps_in_for_a_primary_that_is_skipped(cluster):
    a, b, c, d = cluster.islands("abcd")
    fail(b)
    assert "is a reserve" in c.contribute_by_pull().waits_for  # a may still come

    a.contribute_by_pull()

    assert "c: 'd' is a reserve" in d.contribute_by_pull().waits_for
    assert c.contribute_by_pull().receipt
    assert cluster.settle() == 1
    assert folded(cluster, 2) == ["a", "c"]
    assert cluster.coordinator.status().gather.reserves_used == 1


def test_next_reserve_steps_in_when_the_first_fails_too(cluster):
    a, b, c, d = cluster.islands("abcd")
    a.contribute_by_pull()
    fail(b)
    fail(c)

    assert d.contribute_by_pull().receipt
    assert cluster.settle() == 1
    assert folded(cluster, 2) == ["a", "d"]
    assert cluster.reasons(2) == {"b": "MISSING", "c": "MISSING"}


def test_reserve_steps_in_for_a_primary_that_is_gone(cluster):
    a, b, c, _ = cluster.islands("abcd")
    a.contribute_by_pull()
    assert c.contribute_by_pull().waits_for

    b.leave()

    assert c.contribute_by_pull().receipt
    assert cluster.settle() == 1


def test_round_closes_with_fewer_when_nobody_is_left_to_wait_for(tmp_path):
    cluster = GatherCluster(tmp_path, {"gather.primaries": 3})
    a, b, c, d = cluster.islands("abcd")
    for island in (a, b):
        island.contribute_by_pull()
    for island in (c, d):
        assert cluster.settle() == 0
        fail(island)

    assert cluster.settle() == 1
    assert folded(cluster, 2) == ["a", "b"]
    cluster.close()


def test_round_never_closes_with_fewer_than_min_workers(cluster):
    a, b, c, d = cluster.islands("abcd")
    a.contribute_by_pull()
    for island in (b, c, d):
        fail(island)

    assert cluster.settle() == 0
    assert cluster.coordinator.rounds.find(2).holding == {"a", "b"}  # b has rows again


def test_late_primary_is_missing_and_those_that_have_announced_step_in(hurried):
    a, b, c, d = hurried.islands("abcd")
    a.contribute_by_pull()
    waiting = {island: island.publish(island.frame()) for island in (d, c)}
    for island, sent in waiting.items():
        assert island.announce(sent).waits_for
    hurried.keep_alive(a, b, c, d, seconds=8.0)

    assert d.announce(waiting[d]).waits_for == "c: 'd' is a reserve of round 2"
    assert c.announce(waiting[c]).receipt

    assert hurried.settle() == 1
    assert folded(hurried, 2) == ["a", "c"]


def test_late_reserve_is_not_waited_for_when_another_has_announced(hurried):
    a, b, c, d = hurried.islands("abcd")
    a.contribute_by_pull()
    sent = d.publish(d.frame())
    d.announce(sent)
    hurried.keep_alive(a, b, c, d, seconds=8.0)

    assert d.announce(sent).receipt
    assert hurried.settle() == 1
    assert folded(hurried, 2) == ["a", "d"]


def test_late_primary_still_counts_while_its_place_is_free(tmp_path):
    settings = {"gather.primaries": 3, "gather.primary_seconds": 8.0, "membership.min_workers": 3}
    hurried = GatherCluster(tmp_path, settings)
    islands = hurried.islands("abcd")
    a, b, c, _ = islands
    for island in (a, b):
        island.contribute_by_pull()
    assert hurried.keep_alive(*islands, seconds=12.0) == 0

    assert c.contribute_by_pull().receipt
    assert hurried.settle() == 1
    assert folded(hurried, 2) == ["a", "b", "c"]
    hurried.close()


def test_late_round_closes_with_those_that_are_in(hurried):
    islands = hurried.islands("abc")
    a, b, _ = islands
    assert hurried.coordinator.status().gather.reserves == ("c",)
    a.contribute_by_pull()
    b.contribute_by_pull()
    assert hurried.settle() == 1
    a.contribute_by_pull()
    assert hurried.keep_alive(*islands, seconds=8.0) == 0  # below min_workers

    assert b.contribute_by_pull().receipt
    assert hurried.settle() == 1


def test_time_of_primaries_begins_anew_with_a_new_life_of_the_coordinator(hurried):
    a, b, c, d = hurried.islands("abcd")
    a.contribute_by_pull()
    sent = c.publish(c.frame())
    hurried.keep_alive(a, b, c, d, seconds=4.0)
    hurried.restart()
    hurried.keep_alive(a, b, c, d, seconds=4.0)

    assert c.announce(sent).waits_for
    hurried.keep_alive(a, b, c, d, seconds=4.0)
    assert c.announce(sent).receipt


def test_pause_does_not_count_against_primaries(hurried):
    a, b, c, d = hurried.islands("abcd")
    a.contribute_by_pull()
    sent = c.publish(c.frame())
    hurried.coordinator.order("pause")
    hurried.keep_alive(a, b, c, d, seconds=20.0)
    hurried.coordinator.order("run")

    assert c.announce(sent).waits_for
    assert b.contribute_by_pull().receipt


def test_reserves_and_skips_are_shown(cluster):
    a, b, *_ = cluster.islands("abcd")
    a.contribute_by_pull()
    fail(b)

    found = cluster.coordinator.status()

    assert (found.gather.primaries, found.gather.reserves) == (("a", "b"), ("c", "d"))
    assert (found.gather.skips, found.waiting_for) == ({"MISSING": 1}, ("c",))


@pytest.mark.parametrize("primaries", [1, 2, 3])
def test_any_order_of_announcing_folds_the_same(tmp_path, primaries):
    """Who is folded depends on names, faults and settings, not on who is quick."""
    digests = set()
    for turn, order in enumerate(("abcd", "dcba", "bdac")):
        settings = {"gather.primaries": primaries, "membership.min_workers": 1}
        cluster = GatherCluster(tmp_path / f"{turn}", settings)
        islands = {island.name: island for island in cluster.islands("abcd")}
        frames = {name: islands[name].publish(islands[name].frame()) for name in islands}
        islands["a"].place.inner.remove(islands["a"].key_of(frames["a"]))
        for _ in range(3):
            for name in order:
                try:
                    islands[name].announce(frames[name])
                except (LeftOut, StaleContribution):
                    continue
        cluster.settle()
        assert folded(cluster, 2) == list("bcd")[:primaries]
        digests.add(cluster.digest)
        cluster.close()

    assert len(digests) == 1
