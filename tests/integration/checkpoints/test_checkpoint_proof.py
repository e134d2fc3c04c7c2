"""What is kept of checkpoints and what proves them, also after a crash inside a commit."""

from dataclasses import replace

import pytest

from atoll.errors import (
    StateDamaged,
    StorageFull,
)
from atoll.ledger import chain
from atoll.ledger.tables.groups import CheckpointTable, SaveTable
from atoll.ledger.tables.leases import LeaseTable
from atoll.ledger.tables.rounds import RoundTable
from atoll.proof import retention
from atoll.sums import digest as digests
from tests.clusters import tamper
from tests.hand_ranks import Sea, checkpoint, digest_at, state_at
from tests.ledgers import alone


def test_retention_keeps_the_newest_checkpoints_and_drops_what_was_never_committed(tmp_path):
    sea = Sea(tmp_path, {"storage": {"retain": "snapshots", "keep_snapshots": 2}})
    a, b, c = ranks = sea.formed(*sea.ranks("a", "b", "c"))
    a.upload(1)
    left = a.request(1).sha256
    c.leave()
    ranks = sea.formed(a, b)
    for number in (1, 2, 3):
        sea.trained(ranks, number)
        assert sea.settle() == 1

    stored = {ref.sha256 for ref in sea.blobs.stored()}
    kept = alone(sea.ledger).checkpoints.all()
    assert stored == {
        sea.coordinator.run.initial_sha256,
        *kept[1].blobs,
        *kept[2].blobs,
    }
    assert left not in stored
    report = sea.audit()
    assert (report.clean, report.pruned, report.checkpoints_read) == (True, 2, 2)


def test_audit_finds_a_changed_blob_a_changed_record_and_rows_that_are_not_done(sea, trio):
    sea.trained(trio, 1)
    sea.settle()
    found = checkpoint(sea)
    assert sea.audit().clean

    tamper(sea.ledger, "checkpoints", {"round": 1}, tokens=121)
    assert "chain: hash" in {p.what for p in sea.audit().problems}
    tamper(sea.ledger, "checkpoints", {"round": 1}, tokens=120)
    tamper(sea.ledger, "leases", {"round": 1}, state="leased")
    assert {"rows"} <= {p.what for p in sea.audit().problems}
    tamper(sea.ledger, "leases", {"round": 1}, state="done")

    sea.restart()
    path = sea.home / "blobs" / found.blobs[1][:2] / found.blobs[1]
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(bytes(data))
    assert "blobs" in {p.what for p in sea.audit(with_replay=False).problems}


def forge(sea, **changes):
    """Changes the first checkpoint's record with a link of the chain that fits it."""
    tamper(sea.ledger, "checkpoints", {"round": 1}, **changes)
    [record, *_] = alone(sea.ledger).rounds.all()
    tamper(
        sea.ledger,
        "rounds",
        {"round": 1},
        hash=chain.checkpoint_hash(record, checkpoint(sea)),
    )


def test_audit_finds_what_a_chain_that_fits_does_not_show(sea, trio):
    sea.trained(trio, 1)
    sea.settle()

    forge(sea, step=5)
    assert "step" in {p.what for p in sea.audit().problems}
    forge(sea, step=6, rows=29)
    assert "rows" in {p.what for p in sea.audit().problems}
    forge(sea, rows=30)
    leaves = alone(sea.ledger).rounds.all()[0].leaves
    assert leaves is not None
    tamper(sea.ledger, "rounds", {"round": 1}, leaves=bytes(len(leaves)))
    assert "leaves" in {p.what for p in sea.audit(with_replay=False).problems}
    tamper(sea.ledger, "rounds", {"round": 1}, leaves=leaves)
    tamper(sea.ledger, "leases", {"round": 2}, state="done")
    assert (2, "rows") in {(p.round, p.what) for p in sea.audit().problems}


def test_chain_covers_the_hashes_of_saves_that_parts_were_uploaded_as(sea, trio):
    sea.trained(trio, 1)
    sea.settle()
    found = checkpoint(sea)
    [record, *_] = alone(sea.ledger).rounds.all()

    changed = replace(found, parts=(*found.parts[:-1], found.parts[0]))

    assert chain.checkpoint_hash(record, found) == record.hash
    assert chain.checkpoint_hash(record, changed) != record.hash


def test_parts_that_are_reported_survive_a_restart_and_what_prunes_after_it(sea, trio):
    """Only this life of the coordinator knows what it took in itself; the ledger knows the rest."""
    sea.trained(trio, 1, upload=False)
    for rank in trio[:2]:
        rank.hand_in(1)
    sea.restart()

    retention.prune(sea.ledger, sea.blobs, sea.manifest.storage)
    trio[2].hand_in(1)

    assert sea.settle() == 1
    assert sea.audit().clean


def test_audit_reads_the_weights_that_the_digest_is_of(sea, trio):
    """Parts whose names are right and whose order is not: only reading them finds it."""
    sea.trained(trio, 1)
    sea.settle()
    record = alone(sea.ledger).rounds.all()[0]
    other = digests.digest(sea.layout, state_at(sea.layout, 7)[0])
    found = checkpoint(sea)
    forged = replace(record, master_digest=other.root)
    tamper(
        sea.ledger,
        "rounds",
        {"round": 1},
        master_digest=other.root,
        leaves=other.leaves,
        hash=chain.checkpoint_hash(forged, found),
    )

    problems = {p.what: p.detail for p in sea.audit().problems}

    assert "tensor 'embedding' of the stored weights differs" in problems["weights"]
    assert "weights" not in {p.what for p in sea.audit(with_replay=False).problems}


def test_start_is_refused_when_a_part_of_the_newest_checkpoint_is_gone(sea, trio):
    sea.trained(trio, 1)
    sea.settle()
    gone = checkpoint(sea).blobs[1]
    (sea.home / "blobs" / gone[:2] / gone).unlink()

    with pytest.raises(StateDamaged, match=f"blob {gone} of the checkpoint of round 1"):
        sea.restart()


def test_report_that_crosses_the_commit_is_answered_as_committed(sea, trio, monkeypatch):
    """The checkpoint is recorded between two looks of the same report."""
    sea.trained(trio, 1)

    def settled(*_: object) -> bool:
        sea.settle()
        return True

    monkeypatch.setattr(sea.coordinator.checkpoints.uploads, "claims", settled)

    assert trio[0].tell_part(1).committed


def test_part_that_is_looked_at_again_wakes_nobody(sea, trio):
    """Else ranks that wait for the record of a whole checkpoint would keep waking each other."""
    sea.trained(trio, 1, upload=False)
    woken = []
    sea.coordinator.on_change(lambda: woken.append(True))
    for rank in trio:
        rank.hand_in(1)
    last = len(woken)

    for rank in trio:
        rank.tell_part(1)

    assert (last, len(woken)) == (1, 1)
    assert sea.settle() == 1


def test_disk_without_room_keeps_the_checkpoint_for_later(sea, trio, monkeypatch):
    sea.trained(trio, 1)
    whole = sea.coordinator.checkpoints.commit_due

    def full() -> bool:
        raise StorageFull

    monkeypatch.setattr(sea.coordinator.checkpoints, "commit_due", full)
    assert sea.settle() == 0
    assert sea.coordinator.status().storage_full
    monkeypatch.setattr(sea.coordinator.checkpoints, "commit_due", whole)
    sea.clock.advance(seconds=2.0)

    assert sea.settle() == 1


@pytest.mark.parametrize(
    ("table", "method"),
    [
        (SaveTable, "drop_below"),
        (LeaseTable, "finish"),
        (RoundTable, "checkpoint"),
        (CheckpointTable, "add"),
    ],
)
def test_crash_inside_the_commit_leaves_nothing_of_it(sea, trio, monkeypatch, table, method):
    """Whatever the transaction had done, the next start has all the parts and commits again."""
    sea.trained(trio, 1)
    before = sea.state_hash()
    with monkeypatch.context() as patch:
        patch.setattr(table, method, crash)
        with pytest.raises(Crash):
            sea.coordinator.advance()

    assert sea.state_hash() == before
    sea.restart()
    assert sea.settle() == 1
    assert sea.coordinator.digest == digest_at(sea, 6)
    assert sea.audit().clean


class Crash(Exception):
    """Ends what a coordinator is doing."""


def crash(*_: object, **__: object) -> None:
    raise Crash
