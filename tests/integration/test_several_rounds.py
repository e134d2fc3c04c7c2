"""Several rounds open at a time, each with a fragment of its own, by a strategy from outside."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.coordinator.accept.uploads import UploadStream
from atoll.errors import (
    AtollError,
    ContributionError,
    FrameError,
    LeaseLost,
    StaleContribution,
    WrongBase,
    WrongRound,
)
from atoll.ledger.records import ContributionRecord, LeaseState, RoundState, SnapshotRecord
from atoll.protocol.messages import Assignment
from atoll.versions.replay import Replay, Version
from tests import clusters, distributions, overlap
from tests.clusters import SMALL, Cluster, Frame, HandIsland, TrackingIsland
from tests.ledgers import alone

SETTINGS = {"strategy": "overlap", "download.codec": "bf16"}


@pytest.fixture(autouse=True, scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The strategy is found by its entry point."""
    site = tmp_path_factory.mktemp("overlap")
    source = Path(overlap.__file__).read_text()
    distributions.write(site, "overlap", "overlapping:Overlap.of", source)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        yield


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, SETTINGS)
    yield made
    made.close()


@pytest.fixture
def trio(tmp_path: Path) -> Iterator[tuple[HandIsland, HandIsland, HandIsland]]:
    """Rounds 3 and 4 are open and have rows for three; two contributions close a round."""
    made = Cluster(tmp_path, {**SETTINGS, "membership.quorum": 2, "membership.grace_seconds": 0.0})
    a, b = made.pair()
    c = made.island("c")
    made.rounds(2, a, b)
    yield a, b, c
    made.close()


def given(island: HandIsland, number: int) -> Assignment:
    """The assignment of one round, for an island that holds the published weights."""
    cluster = island.cluster
    current = cluster.coordinator.weights.current
    mine = [x for x in cluster.leases() if (x.round, x.worker_id) == (number, island.name)]
    return Assignment(
        action="train",
        version=current.version,
        digest=current.digests.published.root,
        round=number,
        fragment=alone(cluster.ledger).rounds.fragment(number),
        ranges=tuple(x.row_range for x in mine),
    )


def hand_in(island: HandIsland, number: int, **changes: Any) -> ContributionRecord:
    return island.send(island.frame(given(island, number), **changes))


def finish(island: HandIsland, stream: UploadStream, sent: Frame, *, start: int) -> Any:
    island.coordinator.write_upload(stream, sent.data[start:])
    return island.coordinator.commit_upload(stream)


def states(cluster: Cluster) -> list[RoundState]:
    return [r.state for r in alone(cluster.ledger).rounds.all()]


# Which rounds are open


def test_as_many_rounds_are_open_as_the_strategy_leads(cluster):
    cluster.pair()

    assert states(cluster) == [RoundState.OPEN, RoundState.OPEN]
    assert [r.fragment for r in alone(cluster.ledger).rounds.all()] == [0, 1]
    assert {(x.round, x.worker_id) for x in cluster.leases()} == {
        (number, name) for number in (1, 2) for name in "ab"
    }


def test_island_goes_on_to_the_next_open_round_without_a_new_version(cluster):
    a, _ = cluster.pair()
    first = a.assignment()
    a.contribute()

    second = a.assignment()

    assert (first.round, second.round) == (1, 2)
    assert second.version == 0
    a.contribute()
    assert a.assignment().action == "wait"


def test_publishing_a_round_opens_the_one_after_those_that_are_open(cluster):
    a, b = cluster.pair()

    cluster.rounds(1, a, b)

    assert states(cluster) == [RoundState.PUBLISHED, RoundState.OPEN, RoundState.OPEN]


def test_rounds_close_in_order_whichever_is_complete_first(cluster):
    a, b = cluster.pair()

    hand_in(a, 2)
    hand_in(b, 2)

    assert cluster.settle() == 0
    hand_in(a, 1)
    hand_in(b, 1)
    assert cluster.settle() == 2
    assert cluster.coordinator.weights.current.version == 2


def test_freeze_leaves_the_leases_of_the_other_open_round(trio):
    a, b, c = trio
    hand_in(a, 3)
    hand_in(b, 3)

    assert c.cluster.settle() == 1

    found = {(x.round, x.worker_id): x.state for x in c.cluster.leases() if x.round in (3, 4)}
    assert found == {
        (3, "a"): LeaseState.DONE,
        (3, "b"): LeaseState.DONE,
        (3, "c"): LeaseState.REOPENED,
        **{(4, name): LeaseState.LEASED for name in "abc"},
    }


def test_plan_does_not_count_rows_of_leases_that_ended(tmp_path):
    """They are leased again, and count where they are trained on."""
    cluster = Cluster(tmp_path, {**SETTINGS, "work.lease_seconds": 30.0})
    a, b = cluster.pair()
    c = cluster.island("c")
    cluster.rounds(2, a, b)
    for number in (3, 4):
        hand_in(a, number)
        hand_in(b, number)

    assert cluster.keep_alive(a, b, c, seconds=32) == 2  # the leases of c have ended

    each = cluster.manifest.rows_per_round * clusters.BLOCK
    found = {r.round: r.tokens // each for r in alone(cluster.ledger).rounds.all()}
    assert (found[3], found[4], found[5]) == (4, 7, 8)
    cluster.close()


# Weights


def test_round_moves_its_own_fragment_and_replays(cluster):
    a, b = cluster.pair()
    before = cluster.buffer("master").clone()

    cluster.rounds(1, a, b)

    after, edge = cluster.buffer("master"), SMALL.tensors[0].shape[0] * SMALL.tensors[0].shape[1]
    assert not torch.equal(after[:edge], before[:edge])
    assert torch.equal(after[edge:], before[edge:])
    cluster.rounds(3, a, b)
    assert cluster.audit(with_replay=True).problems == []


def test_restart_has_the_bits_of_a_run_that_went_on(cluster):
    a, b = cluster.pair()
    cluster.rounds(3, a, b)
    digests = cluster.digest, cluster.published_digest

    cluster.restart()

    assert (cluster.digest, cluster.published_digest) == digests
    assert states(cluster)[3:] == [RoundState.OPEN, RoundState.OPEN]


def test_tracking_island_follows_fragment_by_fragment(cluster):
    a = cluster.island("a")
    tracking = TrackingIsland(cluster, "b").join()
    tracking.fetch()

    for _ in range(3):
        cluster.rounds(1, a, tracking)
        tracking.fetch()

    assert tracking.kinds == ["weights", "update", "update", "update"]
    assert tracking.weights.digest == cluster.published_digest


def test_island_two_versions_behind_fetches_the_rounds_that_it_lacks(cluster):
    a = cluster.island("a")
    tracking = TrackingIsland(cluster, "b").join()
    tracking.fetch()
    cluster.rounds(2, a, tracking)

    tracking.fetch()
    tracking.fetch()

    assert tracking.kinds == ["weights", "update", "update"]
    assert (tracking.weights.version, tracking.weights.digest) == (2, cluster.published_digest)


def test_island_that_lacks_a_frame_which_is_gone_fetches_whole(cluster):
    """Each fragment's newest frame is offered: that of round 1 went when round 3 came."""
    a = cluster.island("a")
    tracking = TrackingIsland(cluster, "b").join()
    tracking.fetch()
    cluster.rounds(3, a, tracking)

    tracking.fetch()

    assert tracking.kinds == ["weights", "weights"]
    assert (tracking.weights.version, tracking.weights.digest) == (3, cluster.published_digest)


def test_base_of_a_round_is_its_fragment_in_the_version_before(cluster):
    a, b = cluster.pair()
    weights = cluster.coordinator.weights
    initial = [part.published.root for part in weights.current.parts]

    assert [weights.base_digest(n) for n in (1, 2)] == initial
    cluster.rounds(1, a, b)
    moved = weights.current.parts[0].published.root
    assert weights.base_digest(2) == initial[1]
    assert weights.base_digest(3) == moved != initial[0]
    cluster.rounds(2, a, b)
    # Of the past, from the ledger.
    assert weights.base_digest(2) == initial[1]
    assert weights.base_digest(3) == moved
    assert weights.base_digest(4) == weights.current.parts[1].published.root


def test_initial_digests_are_read_once_however_many_threads_ask(cluster, monkeypatch):
    a, b = cluster.pair()
    weights, restore = cluster.coordinator.weights, Replay.restore
    expected = weights.base_digest(1)
    cluster.rounds(1, a, b)
    readers: list[Replay] = []
    both = threading.Barrier(2)

    def recorded(self: Replay, snapshot: SnapshotRecord | None) -> Version:
        readers.append(self)
        with suppress(threading.BrokenBarrierError):
            both.wait(timeout=0.5)  # for another that reads at the same time
        return restore(self, snapshot)

    monkeypatch.setattr(Replay, "restore", recorded)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(weights.base_digest, [1, 1]))

    assert found == [expected, expected]
    assert len(readers) == 1
    assert readers[0] is not weights.replay  # that one is the closing thread's


def test_versions_within_the_lead_are_known_and_older_ones_forgotten(cluster):
    a, b = cluster.pair()
    weights, seen = cluster.coordinator.weights, []
    for _ in range(3):
        seen.append((weights.current.version, weights.current.digests.published.root))
        cluster.rounds(1, a, b)
    seen.append((weights.current.version, weights.current.digests.published.root))

    assert [weights.has_been(*held) for held in seen] == [False, False, True, True]
    assert not weights.has_been(3, seen[2][1])
    assert not weights.has_been(None, seen[3][1])


# What is refused

WRONG: dict[str, tuple[dict[str, Any], type[AtollError], str]] = {
    "fragment": ({"fragment": 1}, FrameError, "which carries fragment 0; hand in that one"),
    "whole model": ({"fragment": -1}, FrameError, "fragment=-1 of the contribution to round 1"),
    "first": ({"first": 2}, ContributionError, "first=2 of the contribution is after its round=1"),
    "base": ({"base_digest": "f" * 64}, WrongBase, "download them and train again"),
}


@pytest.mark.parametrize("name", WRONG)
def test_contribution_that_says_otherwise_is_refused(cluster, name):
    changes, error, says = WRONG[name]
    a, _ = cluster.pair()
    sent = a.frame(given(a, 1), delta=clusters.values(SMALL, "x")[:800], **changes)
    before = cluster.coordinator.state_hash()

    with pytest.raises(error, match=says):
        a.send(sent)

    assert cluster.coordinator.state_hash() == before


def test_base_of_another_version_is_refused(cluster):
    """Round 3 moves what round 1 moved: from before it, it is another base."""
    a, b = cluster.pair()
    old = cluster.coordinator.weights.base_digest(1)
    cluster.rounds(2, a, b)

    with pytest.raises(WrongBase):
        hand_in(a, 3, base_digest=old)

    assert hand_in(a, 3).base != old


def test_first_round_of_a_contribution_is_recorded(cluster):
    a, _ = cluster.pair()

    records = [hand_in(a, 1), hand_in(a, 2, first=1)]

    assert [(r.round, r.first, r.fragment, r.applied) for r in records] == [
        (1, 1, 0, 1),
        (2, 1, 1, 2),
    ]


def test_rows_of_a_round_that_was_not_handed_in_are_refused(cluster):
    a, _ = cluster.pair()

    with pytest.raises(LeaseLost, match="handed nothing in for its rows of round 1"):
        hand_in(a, 2, first=1)

    assert hand_in(a, 2).first == 2


def test_contribution_that_reaches_back_too_far_is_refused(cluster):
    """What it says to contain is what it weighs, and in which fragments its rows are."""
    a, b = cluster.pair()
    cluster.rounds(2, a, b)

    with pytest.raises(ContributionError, match="first=1 of the contribution to round 3 is before"):
        hand_in(a, 3, first=1)

    assert hand_in(a, 3, first=2).first == 2


def test_round_that_is_planned_takes_nothing_yet(cluster):
    a, b = cluster.pair()
    hand_in(a, 1)
    hand_in(b, 1)
    cluster.freeze()

    with pytest.raises(WrongRound, match="round=3 is planned but not open yet"):
        hand_in(b, 3)


# Uploads


def test_uploads_of_two_rounds_by_one_worker_go_side_by_side(cluster):
    a, _ = cluster.pair()
    frames = [a.frame(given(a, number)) for number in (1, 2)]

    streams = [a.begin(sent, sent.data[:1000]) for sent in frames]
    offsets = [a.coordinator.upload_offset(a.request(sent)) for sent in frames]
    done = [
        finish(a, stream, sent, start=1000) for stream, sent in zip(streams, frames, strict=True)
    ]

    assert offsets == [1000, 1000]
    assert [(record.round, record.sha256) for record in done] == [
        (number, sent.sha256) for number, sent in zip((1, 2), frames, strict=True)
    ]


def test_freeze_drops_the_uploads_that_are_stale_and_no_others(trio):
    a, b, c = trio
    late, early = (c.frame(given(c, number)) for number in (3, 4))
    dropped, kept = (c.begin(sent, sent.data[:1000]) for sent in (late, early))
    hand_in(a, 3)
    hand_in(b, 3)

    assert c.cluster.settle() == 1

    with pytest.raises(StaleContribution):
        c.coordinator.write_upload(dropped, late.data[1000:1100])
    assert finish(c, kept, early, start=1000).round == 4


# Audit


@pytest.fixture
def run(cluster: Cluster) -> Cluster:
    a, b = cluster.pair()
    cluster.rounds(3, a, b)
    return cluster


def test_audit_of_the_run_is_clean_and_knows_its_digest(run):
    report = run.audit()

    assert report.problems == []
    assert report.digest == run.digest


def test_audit_finds_a_round_with_another_fragment(run):
    clusters.tamper(run.ledger, "rounds", {"round": 2}, fragment=0)

    found = {(p.round, p.what, p.detail) for p in run.audit().problems}

    assert (2, "fragment", "the round records 0, its strategy says 1") in found


@pytest.mark.parametrize(
    ("column", "value", "what"),
    [
        ("fragment", 0, "fragment of a"),
        ("first", 1, "first of a"),
        ("base", "f" * 64, "base_digest of a"),
    ],
)
def test_audit_finds_a_contribution_that_is_recorded_otherwise(run, column, value, what):
    clusters.tamper(run.ledger, "contributions", {"round": 2, "worker_id": "a"}, **{column: value})

    assert (2, what) in {(p.round, p.what) for p in run.audit().problems}


def test_paused_run_waits_for_an_island_that_was_given_a_later_round_ahead(cluster):
    """It has both rounds and hands both in: the run is not at rest before that."""
    a, b = cluster.pair()
    hand_in(b, 1)
    a.assignment()
    a.assignment(under_way=(1,))

    cluster.coordinator.order("pause")

    assert cluster.coordinator.status().waiting_for == ("a",)
