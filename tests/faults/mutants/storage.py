"""Mutants of storage: what is pruned, and what is left over."""

from typing import Any

from atoll.blobs.base import BlobWriter
from atoll.ledger.tables.transaction import Transaction
from atoll.proof import retention
from atoll.simulate.faults.scenario import Scenario
from tests.faults.mutants.mutant import Mutant, Patch, adding_to, answering, during

MUTANTS: list[Mutant] = []
mutant = adding_to(MUTANTS)


def _breaks_uploads(scenario: Scenario) -> bool:
    is_lossy = scenario.loss > 0.1 and scenario.has("crash coordinator")
    return is_lossy and scenario.islands <= 3 and scenario.rounds >= 6


@mutant("blob-is-there")
def pruning_forgets_the_outer_state(patch: Patch) -> None:
    real = retention.referenced

    def referenced(t: Transaction, storage: Any) -> set[str]:
        slots = (slot for snapshot in t.snapshots.all() for slot in snapshot.slots_sha256)
        return real(t, storage) - {sha256 for _, sha256 in slots}

    patch.setattr(retention, "referenced", referenced)


@mutant("blob-is-there")
def pruning_takes_contributions_that_replay_needs(patch: Patch) -> None:
    during(patch, retention, "referenced", retention, "kept_from", answering(10**6))


@mutant("no-orphans", lambda s: s.settings["storage"]["retain"] == "snapshots")
def nothing_is_ever_pruned(patch: Patch) -> None:
    patch.setattr(retention, "prune", answering(0))


@mutant("bounded", _breaks_uploads)
def drafts_of_broken_uploads_stay(patch: Patch) -> None:
    patch.setattr(BlobWriter, "abort", answering(None))
    patch.setattr("atoll.blobs.directory.DirectoryBlobs.sweep", answering(None))
