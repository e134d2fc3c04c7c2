"""The proof: a clean run is clean, and every tampering is found and named."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from atoll.layout import LEAF_ELEMENTS
from atoll.ledger import chain
from atoll.ledger.records import RoundState
from atoll.proof.report import AuditReport
from atoll.sums.digest import LEAF_DIGEST_BYTES, root_of
from atoll.versions import weights
from tests import clusters
from tests.clusters import SMALL, Cluster
from tests.ledgers import alone

OTHER = "f" * 64
ROUNDS = 6


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six rounds, snapshots of rounds 2, 4 and 6, and a seventh with one contribution."""
    cluster = Cluster(tmp_path_factory.mktemp("original"), {"storage.snapshot_every": 2})
    a, b = cluster.pair()
    cluster.rounds(ROUNDS, a, b)
    a.contribute()
    cluster.close()
    return cluster.home


@pytest.fixture
def cluster(original: Path, tmp_path: Path) -> Iterator[Cluster]:
    """A copy of the run to tamper with; nothing of it is verified yet in this process."""
    shutil.copytree(original, tmp_path / "copy")
    made = Cluster(tmp_path / "copy", {"storage.snapshot_every": 2})
    made.restart()
    yield made
    made.close()


def first(report: AuditReport) -> tuple[int, str]:
    return report.problems[0].round, report.problems[0].what


# A clean run


def test_clean_run_is_clean(cluster):
    report = cluster.audit(with_replay=True)

    assert report.problems == []
    assert report.clean


def test_audit_counts_what_it_saw(cluster):
    report = cluster.audit(with_replay=True)

    assert (report.rounds, report.contributions, report.pruned) == (6, 13, 0)
    assert (report.rows, report.tokens) == (13 * 6, 13 * 24)
    assert (report.replayed_from, report.replayed_rounds) == (0, 6)
    assert report.digest == cluster.digest


def test_audit_changes_nothing(cluster):
    before = cluster.coordinator.state_hash(), cluster.blob_names()

    cluster.audit(with_replay=True)

    assert (cluster.coordinator.state_hash(), cluster.blob_names()) == before


def test_audit_without_replay_says_so(cluster):
    report = cluster.audit()

    assert (report.replayed_from, report.replayed_rounds) == (None, 0)


def test_audit_reports_as_json(cluster):
    clusters.tamper(cluster.ledger, "rounds", {"round": 2}, hash=OTHER)

    found = json.loads(json.dumps(cluster.audit().as_json()))

    assert found["clean"] is False
    assert found["problems"][0]["round"] == 2


def test_audit_of_a_run_that_has_not_begun_is_clean(tmp_path):
    cluster = Cluster(tmp_path)

    report = cluster.audit(with_replay=True)

    assert report.clean
    assert report.digest == cluster.manifest.model.initial_digest


def test_audit_of_a_frozen_round_is_clean(cluster):
    clusters.HandIsland(cluster, "b").join().contribute()
    cluster.freeze()

    assert cluster.audit(with_replay=True).clean


def test_audit_of_a_run_that_lost_islands_is_clean(tmp_path):
    """Reopened and taken leases are part of an honest history."""
    cluster = Cluster(tmp_path, {"membership.quorum": 2})
    a, b = cluster.pair()
    cluster.island("c")
    cluster.rounds(5, a, b)

    report = cluster.audit(with_replay=True)

    assert report.clean
    assert {x.state.value for x in cluster.leases()} >= {"done", "taken"}


# Retention


def test_audit_of_a_pruned_run_says_from_where_it_replayed(tmp_path):
    cluster = Cluster(
        tmp_path,
        {
            "storage.snapshot_every": 2,
            "storage.retain": "snapshots",
            "storage.keep_snapshots": 2,
        },
    )
    cluster.rounds(7, *cluster.pair())

    report = cluster.audit(with_replay=True)

    assert report.clean
    assert (report.replayed_from, report.replayed_rounds) == (4, 3)
    assert (report.contributions, report.pruned) == (14, 8)
    assert report.digest == cluster.digest


def test_missing_blob_after_the_oldest_kept_snapshot_is_found(tmp_path):
    """Pruning explains a missing blob only before it."""
    cluster = Cluster(tmp_path, {"storage.snapshot_every": 2, "storage.retain": "snapshots"})
    cluster.rounds(7, *cluster.pair())
    cluster.blobs.delete(alone(cluster.ledger).contributions.of_round(5)[0].sha256)

    assert first(cluster.audit()) == (5, "blob of a")


# Tampering


@dataclass(frozen=True)
class Tampering:
    """A change behind the ledger's back, and what the audit must name first."""

    change: Callable[[Cluster], object]
    round: int
    what: str


def _row(table: str, where: dict[str, object], **changes: object) -> Callable[[Cluster], object]:
    return lambda cluster: clusters.tamper(cluster.ledger, table, where, **changes)


def _contribution(number: int, **changes: object) -> Callable[[Cluster], object]:
    return _row("contributions", {"round": number, "worker_id": "b"}, **changes)


def _blob(number: int, worker: int = 1) -> Callable[[Cluster], Path]:
    return lambda cluster: cluster.blob_path(
        alone(cluster.ledger).contributions.of_round(number)[worker].sha256
    )


def _swap_blobs(cluster: Cluster) -> None:
    """The files of two contributions change names."""
    one, other = _blob(3, 0)(cluster), _blob(3, 1)(cluster)
    first_bytes, second_bytes = one.read_bytes(), other.read_bytes()
    one.write_bytes(second_bytes)
    other.write_bytes(first_bytes)


def _swap_names(cluster: Cluster) -> None:
    """The ledger says that each sent what the other did."""
    one, other = alone(cluster.ledger).contributions.of_round(3)
    clusters.tamper(
        cluster.ledger, "contributions", {"round": 3, "worker_id": "a"}, sha256=other.sha256
    )
    clusters.tamper(
        cluster.ledger, "contributions", {"round": 3, "worker_id": "b"}, sha256=one.sha256
    )


def _drop_round(cluster: Cluster) -> None:
    for table in ("leases", "contributions", "rounds"):
        clusters.remove(cluster.ledger, table, round=3)


def _rewrite_manifest(cluster: Cluster) -> None:
    body = cluster.manifest.body().replace('"lr":0.7', '"lr":0.8')
    clusters.tamper(cluster.ledger, "manifests", {"version": 1}, body=body)


def _lease(number: int, **changes: object) -> Callable[[Cluster], object]:
    return _row("leases", {"round": number, "worker_id": "b"}, **changes)


def _leaves(cluster: Cluster) -> None:
    record = alone(cluster.ledger).rounds.all(first=4, last=4)[0]
    assert record.leaves is not None
    clusters.tamper(
        cluster.ledger,
        "rounds",
        {"round": 4},
        leaves=bytes([record.leaves[0] ^ 1]) + record.leaves[1:],
    )


TAMPERINGS = {
    "weight": Tampering(_contribution(3, weight=5), 3, "chain: hash"),
    "tokens": Tampering(_contribution(3, tokens=25), 3, "chain: hash"),
    "rows": Tampering(_contribution(3, rows=7), 3, "chain: hash"),
    "sha256": Tampering(_contribution(3, sha256=OTHER), 3, "chain: hash"),
    "nbytes": Tampering(_contribution(3, nbytes=1), 3, "nbytes of b"),
    "loss": Tampering(_contribution(3, loss_sum=0.0), 3, "loss_sum of b"),
    "worker": Tampering(_contribution(3, worker_id="c"), 3, "chain: hash"),
    "contribution removed": Tampering(
        lambda c: clusters.remove(c.ledger, "contributions", round=3, worker_id="b"),
        3,
        "chain: hash",
    ),
    "contribution of the open round": Tampering(
        _row("contributions", {"round": 7, "worker_id": "a"}, weight=9), 7, "weight of a"
    ),
    "master digest": Tampering(_row("rounds", {"round": 4}, master_digest=OTHER), 4, "chain: hash"),
    "published digest": Tampering(
        _row("rounds", {"round": 4}, published_digest=OTHER), 4, "chain: hash"
    ),
    "hash": Tampering(_row("rounds", {"round": 4}, hash=OTHER), 4, "chain: hash"),
    "prev_hash": Tampering(_row("rounds", {"round": 4}, prev_hash=OTHER), 4, "chain: prev_hash"),
    "leaves": Tampering(_leaves, 4, "leaves"),
    "round missing": Tampering(_drop_round, 3, "chain: round"),
    "round state": Tampering(_row("rounds", {"round": 4}, state="frozen"), 5, "chain: state"),
    "manifest body": Tampering(_rewrite_manifest, 1, "chain: manifest body"),
    "initial weights": Tampering(
        _row("runs", {"run_id": clusters.RUN_ID}, initial_sha256=OTHER), 1, "chain: prev_hash"
    ),
    "run": Tampering(
        _row("runs", {"run_id": clusters.RUN_ID}, run_id="another"), 1, "chain: prev_hash"
    ),
    "blobs swapped": Tampering(_swap_blobs, 3, "blob of a"),
    "names swapped": Tampering(_swap_names, 3, "chain: hash"),
    "blob byte": Tampering(lambda c: clusters.flip_byte(_blob(3)(c), 3000), 3, "blob of b"),
    "blob checksum": Tampering(lambda c: clusters.flip_byte(_blob(3)(c), -1), 3, "blob of b"),
    "blob missing": Tampering(lambda c: _blob(3)(c).unlink(), 3, "blob of b"),
    "blob of the open round": Tampering(
        lambda c: clusters.flip_byte(_blob(7, 0)(c), 3000), 7, "blob of a"
    ),
    "lease not done": Tampering(_lease(3, state="reopened"), 3, "rows"),
    "lease done in vain": Tampering(_lease(7, state="done"), 7, "rows"),
    "lease moved": Tampering(_lease(3, start=0, stop=6), 3, "row twice"),
    "lease taken": Tampering(_lease(7, state="taken"), 7, "row lost"),
    "lease removed": Tampering(
        lambda c: clusters.remove(c.ledger, "leases", round=7, worker_id="b"), 7, "row lost"
    ),
    "cursor back": Tampering(_row("rounds", {"round": 7}, cursor=80), 7, "cursor"),
}


@pytest.mark.parametrize("tampering", TAMPERINGS.values(), ids=TAMPERINGS.keys())
def test_tampering_is_found_and_its_round_named(cluster, tampering):
    tampering.change(cluster)

    report = cluster.audit()

    assert first(report) == (tampering.round, tampering.what), report.problems


def test_row_that_two_contributions_trained_is_found(cluster):
    """Every count is as it should be, so only the list of rows can show it."""
    clusters.tamper(cluster.ledger, "leases", {"round": 3, "worker_id": "b"}, start=0, stop=6)

    found = [p for p in cluster.audit().problems if p.what == "row twice"]

    assert [(p.round, p.detail) for p in found] == [
        (3, "rows [0, 6) of round 1 and [0, 6) of round 3 overlap")
    ]


# Tampering that keeps the chain whole: only replay sees it


def rehash(cluster: Cluster) -> None:
    """Makes the chain hold again over whatever the rows say now."""
    run = alone(cluster.ledger).run.get()
    assert run is not None
    previous = chain.genesis_hash(run, cluster.manifest.sha256())
    for record in alone(cluster.ledger).rounds.all():
        if record.state is RoundState.PUBLISHED:
            mine = chain.round_hash(
                replace(record, prev_hash=previous),
                alone(cluster.ledger).contributions.of_round(record.round),
            )
            clusters.tamper(
                cluster.ledger, "rounds", {"round": record.round}, prev_hash=previous, hash=mine
            )
            previous = mine


@pytest.mark.parametrize("tensor", [0, 1, 2], ids=[t.name for t in SMALL.tensors])
def test_replay_names_the_round_and_the_tensor_that_differ(cluster, tensor):
    """Digests changed and the whole chain hashed anew: nothing but the weights tells."""
    assert SMALL.size < LEAF_ELEMENTS
    record = alone(cluster.ledger).rounds.all(first=5, last=5)[0]
    leaves = bytearray(record.leaves or b"")
    leaves[tensor * LEAF_DIGEST_BYTES] ^= 1
    root = root_of(bytes(leaves))
    clusters.tamper(
        cluster.ledger,
        "rounds",
        {"round": 5},
        leaves=bytes(leaves),
        master_digest=root,
        published_digest=root,
    )
    rehash(cluster)

    chain_alone = cluster.audit()
    report = cluster.audit(with_replay=True)

    assert {problem.what for problem in chain_alone.problems} == {"seal"}
    name = SMALL.tensors[tensor].name
    assert [(p.round, p.what, p.detail) for p in report.problems] == [
        (5, "replay", f"master weights, tensor {name!r}")
    ]
    assert report.replayed_rounds == 5


def test_replay_finds_a_weight_that_the_chain_was_made_to_agree_with(cluster):
    clusters.tamper(cluster.ledger, "contributions", {"round": 2, "worker_id": "a"}, weight=2)
    rehash(cluster)

    found = [p for p in cluster.audit(with_replay=True).problems if p.what == "replay"]

    assert [p.round for p in found] == [2]


def test_replay_finds_a_damaged_blob_in_its_round(cluster):
    clusters.flip_byte(_blob(4)(cluster), 3000)

    found = [p for p in cluster.audit(with_replay=True).problems if p.what == "replay"]

    assert [p.round for p in found] == [4]
    assert "a contribution of round 4" in found[0].detail


def _other_snapshot(cluster: Cluster, tensor: str) -> str:
    """A well-formed snapshot blob of version 4 that differs in one tensor."""
    snapshot = next(s for s in alone(cluster.ledger).snapshots.all() if s.version == 4)
    flat = weights.load(cluster.blobs, dict(snapshot.slots_sha256)["momentum"], SMALL)
    SMALL.views(flat)[tensor].add_(1.0)
    header = weights.weights_header(
        SMALL,
        run_id=clusters.RUN_ID,
        manifest_sha256=cluster.manifest.sha256(),
        version=4,
        digest="0" * 64,
    )
    return weights.store(cluster.blobs, header, flat, layout=SMALL)


def test_replay_compares_every_snapshot_it_passes(cluster):
    """A snapshot's momentum is in no digest of the chain; a restart would go on from it."""
    sha256 = _other_snapshot(cluster, "norm")
    clusters.tamper(
        cluster.ledger, "snapshots", {"version": 4}, slots_sha256=f'[["momentum","{sha256}"]]'
    )

    report = cluster.audit(with_replay=True)

    assert [(p.round, p.what, p.detail) for p in report.problems] == [
        (4, "snapshot", "momentum, tensor 'norm'")
    ]


def test_replay_finds_a_snapshot_without_its_momentum(cluster):
    clusters.tamper(cluster.ledger, "snapshots", {"version": 4}, slots_sha256="[]")

    report = cluster.audit(with_replay=True)

    assert [(p.round, p.detail) for p in report.problems] == [(4, "slot 'momentum' is missing")]


def test_replay_of_a_pruned_run_checks_the_snapshot_it_starts_from(tmp_path):
    cluster = Cluster(tmp_path, {"storage.snapshot_every": 2, "storage.retain": "snapshots"})
    cluster.rounds(7, *cluster.pair())
    newest = alone(cluster.ledger).snapshots.all()[-1]
    clusters.tamper(cluster.ledger, "snapshots", {"version": 4}, master_sha256=newest.master_sha256)

    report = cluster.audit(with_replay=True)

    assert first(report) == (4, "replay")
    assert "snapshot of version 4" in report.problems[0].detail
