"""Finds the last good round of a run and cuts a copy of its ledger back to it; fills the report.

Changes only the ledger it is given. Blobs that have to go are named in the report.
"""

import contextlib
from dataclasses import astuple
from typing import Any

from atoll.blobs.base import Blobs
from atoll.coordinator.rounds import dispatch
from atoll.errors import AtollError, Exhausted
from atoll.launch.repair_report import RepairReport
from atoll.ledger import chain
from atoll.ledger.ledger import Ledger
from atoll.ledger.sqlite import salvage, truncation
from atoll.ledger.sqlite.salvage import Counts, Salvaged
from atoll.ledger.tables.transaction import Transaction
from atoll.proof import retention, soundness
from atoll.proof.findings import Findings
from atoll.versions import recorded
from atoll.versions.manifests import Manifests
from atoll.wire import frame


def cut(ledger: Ledger, blobs: Blobs, report: RepairReport, salvaged: Salvaged | None) -> None:
    """Takes the new ledger back to the last good round; fills the report."""
    report.weights = _whole_weights(blobs)
    with ledger.writing() as t:
        run, before = t.run.get(), salvage.counts(t) if salvaged is None else salvaged.counts
        told = max(report.published, salvage.published(t)) + 1  # with the round that was open
        is_left = _heal_chain(t, report)
        if is_left and not report.sound:
            _renew_work(t)
    if run is None or not is_left:
        if report.weights and report.sound:
            report.damages = ["the ledger holds no run, and blobs of one are here"]
        return
    report.run_id = run.run_id
    layout = recorded.layout_of(Manifests.of(ledger).newest.manifest)
    findings = soundness.examine(ledger, blobs, layout=layout, told=told if report.damages else 0)
    report.damages += [str(damage) for damage in findings.damages]
    report.published = max(report.published, findings.published)
    report.last_good = findings.last_good
    if findings.last_good is None or report.sound:
        with ledger.reading() as t:
            report.kept = salvage.counts(t)
        return
    report.replay_from = findings.replay_from
    with ledger.writing() as t:
        gone = {s.version for s in t.snapshots.all() if s.version > findings.last_good}
        _go_back(t, findings)
        latest = t.rounds.latest()
        report.kept = salvage.counts(t)
    report.dropped_snapshots = sorted(gone | findings.bad_snapshots)
    report.put_aside = sorted(
        _blobs_of_no_use(ledger, blobs, findings) & {ref.sha256 for ref in blobs.stored()}
    )
    report.keeps_open = latest is not None and latest.round > findings.last_good
    report.dropped = Counts(
        *(max(0, a - b) for a, b in zip(astuple(before), astuple(report.kept), strict=True))
    )


def _heal_chain(t: Transaction, report: RepairReport) -> bool:
    """Cuts the ledger where its chain breaks; whether a run is left."""
    run, manifests = t.run.get(), t.manifests.all()
    if run is None:
        return False
    broken = chain.check_chain(
        run, manifests, t.rounds.all(), t.contributions.of_round, t.checkpoints.all()
    )
    if broken is None:
        return True
    report.damages.append(f"the ledger's hash chain, {broken.field}: {broken.reason}")
    is_first = bool(manifests) and broken.field == "manifest body" and broken.round <= 1
    if broken.round == 0 or is_first or (broken.round == 1 and broken.field == "prev_hash"):
        return False
    truncation.truncate(t, last_round=broken.round - 1)
    return (
        chain.check_chain(
            run, manifests, t.rounds.all(), t.contributions.of_round, t.checkpoints.all()
        )
        is None
    )


def _renew_work(t: Transaction) -> None:
    """Datasets and queues that were left out, from the manifest and the leases."""
    manifests = Manifests(t.manifests.all())
    known = dispatch.add_datasets(t, manifests.first.manifest)
    t.queues.rebuild()
    t.queues.open(
        [
            dispatch.queue_of(part, seed, epoch, manifests.of_round(first).manifest)
            for dataset_id, seed, epoch, first in t.queues.without_entry()
            for part in known
            if part.dataset_id == dataset_id
        ]
    )


def _go_back(t: Transaction, findings: Findings) -> None:
    assert findings.last_good is not None
    if not findings.keeps_open:
        truncation.truncate(t, last_round=findings.last_good)
    for version in findings.bad_snapshots:
        t.snapshots.drop(version)
    truncation.disband(t)
    kept = retention.kept_from(t, retention.storage_of(t))
    # In place of what an earlier repair recorded, which may lie beyond the last good round.
    later = str(findings.replay_from) if findings.replay_from > kept else None
    t.control.set({retention.REPLAY_FROM: later})


def _blobs_of_no_use(ledger: Ledger, blobs: Blobs, findings: Findings) -> set[str]:
    """Damaged ones, and those of rounds that are no longer there."""
    with ledger.reading() as t:
        needed = retention.referenced(t, None) - findings.bad_blobs
        is_by_step = Manifests(t.manifests.all()).first.any_strategy.by_step
    if is_by_step:  # parts do not say which round they are of, so all that nothing names
        return {ref.sha256 for ref in blobs.stored()} - needed
    newer = soundness.newer_blobs(ledger, blobs)
    return (findings.bad_blobs | newer) - needed | _changed(blobs)


def _changed(blobs: Blobs) -> set[str]:
    """Stored blobs that are not what their names say."""
    found = set()
    for ref in blobs.stored():
        try:
            blobs.open(ref.sha256).close()
        except Exhausted:
            raise  # says nothing about what is stored
        except AtollError:
            found.add(ref.sha256)
    return found


def _whole_weights(blobs: Blobs) -> list[dict[str, Any]]:
    """What is left for `atoll export` where no ledger is: blobs that hold whole weights."""
    found = []
    for ref in blobs.stored():
        with contextlib.suppress(AtollError), blobs.open(ref.sha256) as reader:
            header, _ = frame.read_preamble(reader)
            if header.kind == "weights":
                digest = header.result_digest or ""
                kind = "weights" if digest.strip("0") else "outer optimizer state"
                found.append(
                    {"blob": ref.sha256, "version": header.round, "digest": digest, "kind": kind}
                )
    return sorted(found, key=lambda item: (item["version"], item["blob"]))
