"""Rounds of a gather run: clipped means of sparse contributions, and versions that islands fold."""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from atoll.coordinator.rounds.spool import FrameSpooler
from atoll.errors import BlobChanged, StorageFull
from atoll.layout import GROUP_ELEMENTS, Layout
from atoll.strategies.gather import local
from atoll.strategies.gather.local import Fetched
from atoll.versions import manifest_change
from atoll.versions.replay import Replay
from atoll.wire import frame
from tests import gather_reference as naive
from tests.clusters import WIDE, TrackingIsland, flip_byte, info_of, tamper, values
from tests.ledgers import alone
from tests.publishing import GatherCluster, PublishingIsland

# Three tiles and a rest; tensors end inside tiles.
DEEP = Layout.of(
    [
        ("embedding", (5 * GROUP_ELEMENTS + 33,), "float32"),
        ("norm", (257,), "float32"),
        ("head", (8 * GROUP_ELEMENTS,), "float32"),
    ]
)


class Island(TrackingIsland, PublishingIsland):
    """Publishes what it hands in, and keeps the published weights with the island's own code."""


class Run(GatherCluster):
    """Three rounds and more, of which islands a, b and c make every one."""

    def __init__(self, home: Path, layout: Layout = WIDE, **settings: Any) -> None:
        least = {"membership.min_workers": 3, "storage.snapshot_every": 2}
        super().__init__(home, {**least, **settings}, layout=layout)
        self.by_name = {name: self.join(name) for name in "abc"}

    def join(self, name: str) -> Island:
        island = Island(self, name)
        island.join()
        return island

    def go_on(self, rounds: int = 1, *, names: str = "abc") -> None:
        for _ in range(rounds):
            for name in names:
                assert self.by_name[name].contribute_by_pull().receipt
            assert self.settle() == 1

    def artifacts(self) -> list[str | None]:
        return [r.artifact_sha256 for r in alone(self.ledger).rounds.all() if r.master_digest]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.close()


def payloads(run: Run, round_number: int) -> dict[str, naive.Peer]:
    """What a round folded, from its blobs."""
    found = {}
    for c in alone(run.ledger).contributions.of_round(round_number):
        data = run.blob_path(c.sha256).read_bytes()
        header, at = frame.parse_preamble(data)
        found[c.worker_id] = naive.Peer(data[at : at + header.payload_bytes], c.weight)
    return found


def expected(run: Run, rounds: int, rates: Sequence[float] = ()) -> Tensor:
    """The weights after so many rounds, by the naive program."""
    flat = values(run.layout, "initial", scale=1.0).numpy()
    sizes = [len(tensor.span) for tensor in run.layout.tensors]
    for number in range(1, rounds + 1):
        rate = rates[number - 1] if rates else 0.7
        made = naive.window(payloads(run, number), sizes, list(flat), lr=rate)
        flat = np.array(made.weights, np.float32)
    return torch.from_numpy(flat)


def test_rounds_have_the_bits_of_the_naive_program_and_audit_is_clean(run):
    run.go_on(2)

    assert torch.equal(run.buffer("master"), expected(run, 2))
    report = run.audit(with_replay=True)
    assert report.problems == []
    assert (report.replayed_rounds, report.digest) == (2, run.digest)


def test_weights_are_not_those_of_a_plain_mean(run, monkeypatch):
    """Control: the naive program without its clip comes to other weights."""
    run.go_on()

    ones = {name: [np.float32(1.0)] * len(WIDE.tensors) for name in "abc"}
    monkeypatch.setattr(naive, "clipped", lambda _: ones)

    assert not torch.equal(run.buffer("master"), expected(run, 1))


def test_islands_follow_by_artifacts_and_end_in_the_coordinators_digest(run):
    follower = run.by_name["a"]
    follower.fetch()

    for _ in range(3):
        run.go_on()
        follower.fetch()

    assert follower.kinds == ["weights", "update", "update", "update"]
    assert follower.weights.held == (3, run.published_digest)
    assert torch.equal(follower.published(), run.buffer("published"))


def test_island_that_is_versions_behind_takes_those_in_between(run):
    late = run.by_name["c"]
    late.fetch()
    run.go_on(4)

    while late.weights.version != 4:
        late.fetch()

    assert late.kinds == ["weights"] + 4 * ["update"]
    assert late.weights.digest == run.published_digest


def test_new_island_takes_whole_weights(run):
    run.go_on(2)

    joined = run.join("z")
    joined.fetch()

    assert joined.kinds == ["weights"]
    assert joined.weights.held == (2, run.published_digest)


def test_artifact_is_a_fraction_of_the_weights(run):
    run.go_on()
    first = run.by_name["a"]
    first.fetch()
    spooled = run.coordinator.weights.spool.get("update", WIDE)

    assert spooled is not None
    assert spooled.nbytes < WIDE.nbytes / 20
    assert spooled.sha256 == run.artifacts()[-1]


def test_every_round_records_the_hash_of_the_frame_that_islands_are_given(run):
    run.go_on()
    first = run.coordinator.weights.spool.get("update", WIDE)
    assert first is not None
    data = first.read(0, first.nbytes)

    assert run.artifacts() == [hashlib.sha256(data).hexdigest()]


def test_island_makes_the_same_frame_of_what_lies_in_buckets(run):
    run.go_on(2)
    island = run.by_name["b"]
    said = island.window(2)

    def fetched(peer: Any) -> Fetched:
        key = f"run-{island.identity.run_id}/{peer.worker_id}/frames/{peer.sha256}"
        bucket = run.held[peer.bucket].inner
        tag = bucket.look(key, deadline=1e12)
        data = b"".join(bucket.pieces(key, tag, 0, tag.nbytes, deadline=1e12))
        _, at = frame.parse_preamble(data)
        return Fetched(peer.sha256, peer.weight, at, lambda offset, n: data[offset : offset + n])

    made = local.frame_of(
        run.coordinator.manifests.run_strategy,
        WIDE,
        [fetched(peer) for peer in said.peers],
        run_id=island.identity.run_id,
        manifest_sha256=run.manifest.sha256(),
        round_number=2,
        base_digest=said.base_digest,
        result_digest=said.result_digest,
    )

    assert made is not None
    assert hashlib.sha256(b"".join(made)).hexdigest() == run.artifacts()[1]


def test_threads_change_neither_weights_nor_artifacts(tmp_path):
    runs = []
    for threads in (1, 3):
        made = Run(tmp_path / str(threads), DEEP)
        made.threads = threads
        made.restart()
        for island in made.by_name.values():
            island.join()
        made.go_on()
        runs.append((made.digests_by_round(), made.artifacts()))
        made.close()

    assert runs[0] == runs[1]


def test_restart_replays_to_the_same_weights_and_goes_on(run):
    run.go_on(3)
    before, artifacts = run.digest, run.artifacts()

    run.restart()

    assert (run.version, run.digest, run.artifacts()) == (3, before, artifacts)
    late = run.join("z")
    late.fetch()
    assert late.weights.held == (3, before)
    for island in run.by_name.values():
        island.join()
    run.go_on()
    late.fetch()
    assert late.kinds == ["weights", "update"]
    assert run.audit(with_replay=True).problems == []


def spooled_rounds(run: Run) -> list[int]:
    """The rounds whose frames are offered as their contributions."""
    names = (path.name for path in (run.home / "spool").glob("update-*"))
    return sorted(int(name.split("-")[1]) for name in names)


def test_restarted_coordinator_offers_the_artifacts_that_it_offered_before(run):
    """Also those before the newest snapshot, which replay does not compute again."""
    late = run.by_name["c"]
    late.fetch()
    run.go_on(4)

    run.restart()

    assert spooled_rounds(run) == [1, 2, 3, 4]
    newest = run.coordinator.weights.spool.get("update", WIDE)
    assert newest is not None
    data = newest.read(0, newest.nbytes)
    assert hashlib.sha256(data).hexdigest() == newest.sha256 == run.artifacts()[-1]
    for island in run.by_name.values():
        island.join()
    while late.weights.version != 4:
        late.fetch()
    assert late.kinds == ["weights"] + 4 * ["update"]
    assert late.weights.digest == run.published_digest


def otherwise_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program, say: its frame of round 2 is not the one that was recorded."""
    real = Replay.bundled

    def bundled(self: Replay, bundle: Any, header: Any, *given: Any) -> Iterator[bytes]:
        for piece in real(self, bundle, header, *given):
            yield bytes([piece[0] ^ (header.round == 2)]) + piece[1:]

    monkeypatch.setattr(Replay, "bundled", bundled)


@pytest.mark.parametrize("damage", ["blob", "frame"])
def test_artifact_that_cannot_be_made_again_is_not_offered_nor_any_before_it(
    run, monkeypatch, damage
):
    late = run.by_name["c"]
    late.fetch()
    run.go_on(4)
    if damage == "blob":
        [first, *_] = alone(run.ledger).contributions.of_round(2)
        flip_byte(run.blob_path(first.sha256), -40)
    else:
        otherwise_made(monkeypatch)

    run.restart()

    assert spooled_rounds(run) == [3, 4]
    for island in run.by_name.values():
        island.join()
    late.fetch()
    assert late.kinds == ["weights", "weights"]
    assert late.weights.held == (4, run.published_digest)


def test_round_that_froze_before_a_crash_gets_the_artifact_it_would_have_had(tmp_path):
    calm, crashed = Run(tmp_path / "calm"), Run(tmp_path / "crashed")
    calm.go_on()
    for island in crashed.by_name.values():
        island.contribute_by_pull()
    assert len(crashed.freeze()) == 3

    crashed.restart()
    assert crashed.settle() == 1

    assert crashed.artifacts() == calm.artifacts() != [None]
    assert crashed.digest == calm.digest
    for made in (calm, crashed):
        made.close()


@pytest.mark.parametrize("forged", ["0" * 64, None])
def test_audit_names_the_round_whose_recorded_artifact_is_another(run, forged):
    run.go_on(3)
    tamper(run.ledger, "rounds", {"round": 2}, artifact_sha256=forged)

    found = run.audit(with_replay=True).problems

    assert (2, "artifact") in {(problem.round, problem.what) for problem in found}
    assert {problem.round for problem in found} == {2}


def test_version_larger_than_the_weights_travels_as_weights(tmp_path):
    tiny = Layout.of([("p", (16,), "float32")])
    run = Run(tmp_path, tiny)
    follower = run.by_name["a"]
    follower.fetch()
    run.go_on(2)
    follower.fetch()

    assert run.artifacts() == [None, None]
    assert follower.kinds == ["weights", "weights"]
    assert follower.weights.held == (2, run.published_digest)
    assert run.audit(with_replay=True).problems == []
    run.close()


def test_island_follows_over_another_outer_rate(run):
    """The rate stands in the frame: who is versions behind knows no manifest of them."""
    late = run.by_name["c"]
    late.fetch()
    run.go_on()
    coordinator = run.coordinator
    coordinator.rounds.add_manifest(lambda newest: manifest_change.with_outer_lr(newest, 0.2))
    run.go_on()
    info = info_of(coordinator.manifests.newest.manifest)
    for island in run.by_name.values():
        island.adopt(info)
    run.go_on()

    while late.weights.version != 3:
        late.fetch()

    assert late.kinds == ["weights", "update", "update", "update"]
    assert torch.equal(late.published(), expected(run, 3, [0.7, 0.7, 0.2]))


# What people are told


def events(caplog: Any) -> list[Any]:
    return [record for record in caplog.records if record.message == "window applied"]


def test_each_round_is_told_once_with_quality_and_overlap(run, caplog):
    caplog.set_level(logging.INFO)

    run.go_on(2)

    [first, second] = events(caplog)
    assert (first.window, second.window) == (1, 2)
    assert second.uids == ["a", "b", "c"]
    assert (second.intended, second.actual, second.reserves_used) == (3, 3, 0)
    assert (second.pairs_checked, second.pairs_high_ovlap) == (3, 0)
    assert second.params_digest == run.published_digest
    assert second.download_bytes == sum(
        c.nbytes for c in alone(run.ledger).contributions.of_round(2)
    )
    sent = {uid: naive.sent(p.payload, WIDE.size) for uid, p in payloads(run, 2).items()}
    kept = sum(-(-min(4096, WIDE.size - at) // 64) for at in range(0, WIDE.size, 4096))
    assert second.max_overlap == max(naive.compared(sent)[0].values()) / kept
    assert run.coordinator.counters.measured["overlap"] == second.max_overlap


def test_copy_is_named_by_its_servers_time_and_folded_all_the_same(run, caplog):
    caplog.set_level(logging.INFO)
    stolen = values(WIDE, "somebody's")
    for name, delta in (("b", stolen), ("c", None), ("a", stolen)):
        island = run.by_name[name]
        run.clock.advance(seconds=1)
        assert island.announce(island.publish(island.frame(delta=delta))).receipt
    assert run.settle() == 1

    [told] = events(caplog)
    assert told.uids_over_thresh == {"a": "mega"}
    assert (told.uids, told.copies) == (["a", "b", "c"], [])
    assert told.max_overlap == 1.0
    assert torch.equal(run.buffer("master"), expected(run, 1))


def test_replay_after_a_restart_tells_nothing_again(run, caplog):
    run.go_on(2)
    caplog.set_level(logging.INFO)
    caplog.clear()

    run.restart()

    assert events(caplog) == []


# Windows between two steps


def test_disk_that_fills_up_after_the_step_leaves_the_version_and_the_round_closes_later(
    run, monkeypatch
):
    real = FrameSpooler.stream

    def full(self: FrameSpooler, header: Any, pieces: Any) -> Any:
        next(iter(pieces))
        raise StorageFull("no room")

    for island in run.by_name.values():
        island.contribute_by_pull()
    monkeypatch.setattr(FrameSpooler, "stream", full)
    with pytest.raises(StorageFull):
        run.coordinator.closing.close_due()
    assert (run.version, run.artifacts()) == (0, [])
    monkeypatch.setattr(FrameSpooler, "stream", real)

    assert run.settle() == 1

    assert torch.equal(run.buffer("master"), expected(run, 1))
    assert run.audit(with_replay=True).problems == []


def test_blob_that_is_damaged_before_the_step_moves_nothing(run):
    for island in run.by_name.values():
        island.contribute_by_pull()
    [first, *_] = run.freeze()
    flip_byte(run.blob_path(first.sha256), -40)

    with pytest.raises(BlobChanged, match=first.sha256):
        run.coordinator.closing.close_due()

    assert run.artifacts() == []


def test_run_that_keeps_snapshots_alone_is_audited_from_the_oldest(tmp_path):
    kept: dict[str, Any] = {"storage.retain": "snapshots", "storage.keep_snapshots": 1}
    run = Run(tmp_path, **kept)
    run.go_on(5)

    report = run.audit(with_replay=True)

    assert report.problems == []
    assert report.pruned > 0 and report.replayed_rounds < 5
    run.close()
