"""The coordinator after a power cut: it starts, has all it acknowledged, and its audit is clean."""

import datetime
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from atoll.clock import ManualClock
from atoll.coordinator import boot
from atoll.coordinator.stores import Stores
from atoll.launch import state
from atoll.layout import Layout
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import RoundState
from atoll.models import registry as models
from atoll.proof import audit
from atoll.wire import certificate
from tests.faults.power import machines
from tests.faults.power.promises import Broken, Mark, same, values
from tests.ledgers import alone

NOW = datetime.datetime.fromtimestamp(machines.WALL, tz=datetime.UTC)


def check_coordinator(root: Path, promised: Sequence[Mark]) -> None:
    """Raises Broken, or what the start raises, unless it serves what it acknowledged."""
    home = root / machines.COORDINATOR
    clock = ManualClock(wall_start=machines.WALL + 1e6)
    with state.held(home, state.Addresses()) as stores:
        _start(stores, clock, promised)
    if any(values(promised, "finished")):  # from here on there may be a certificate
        kept = certificate.own(home, host="127.0.0.1", now=NOW)
        for fingerprint in values(promised, "pinned"):
            same("fingerprint", kept.fingerprint, fingerprint)


def _start(stores: Stores, clock: ManualClock, promised: Sequence[Mark]) -> None:
    if any(values(promised, "created")) and alone(stores.ledger).run.get() is None:
        raise Broken("the run that was created is gone")
    boot.create_or_check(stores, machines.run_file(), clock, new_run_id="simulated")
    coordinator = boot.open_coordinator(stores, clock)
    _check_ledger(stores.ledger, promised)
    newest = max(values(promised, "published"), default=0)
    if coordinator.weights.current.version < newest:
        raise Broken(f"version {newest} was published, an older one is served")
    report = audit.audit(stores.ledger, stores.blobs, layout=_layout(), with_replay=True)
    if not report.clean:
        raise Broken(f"the audit finds {report.problems}")


@cache
def _layout() -> Layout:
    """The same for every image; building it takes a tenth of a check."""
    return models.layout(machines.run_file().model)


def _check_ledger(ledger: Ledger, promised: Sequence[Mark]) -> None:
    workers = {worker.worker_id: worker.incarnation for worker in alone(ledger).members.workers()}
    rounds = alone(ledger).rounds.all()
    digests = {r.round: r.master_digest for r in rounds if r.state is RoundState.PUBLISHED}
    receipts = {
        c.receipt: c.sha256 for r in rounds for c in alone(ledger).contributions.of_round(r.round)
    }
    for mark in promised:
        if "joined" in mark and workers.get(mark["joined"], -1) < mark["incarnation"]:
            raise Broken(f"the incarnation of {mark['joined']} is forgotten")
        if "received" in mark:
            same(f"what {mark['receipt']} is for", receipts.get(mark["receipt"]), mark["sha256"])
        if "published" in mark:
            version = mark["published"]
            same(f"digest of version {version}", digests.get(version), mark["digest"])
