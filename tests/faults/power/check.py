"""Starts the production code on what a power cut left and holds it to what was promised before."""

import datetime
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atoll.blobs.base import Blobs
from atoll.blobs.directory import DirectoryBlobs
from atoll.clock import ManualClock
from atoll.coordinator import boot, certificate
from atoll.errors import AtollError
from atoll.history import audit, recorded
from atoll.island.store import RESIDUAL_FILE, STATE_FILE, IslandStore, Saved
from atoll.launch import state
from atoll.ledger import engines
from atoll.ledger.base import Ledger
from atoll.ledger.records import RoundState
from tests.faults.power import machines

Mark = dict[str, Any]
NOW = datetime.datetime.fromtimestamp(machines.WALL, tz=datetime.UTC)


class Broken(Exception):
    """Something that was promised does not hold."""


class Checker:
    """Knows everything that the recorded run ever said."""

    def __init__(self, marks: Sequence[Mark]) -> None:
        self.final_digest = next(m["finished"] for m in marks if "finished" in m)
        self._exported = next(m["exported"] for m in marks if "exported" in m)
        self._placed = next(m["placed"] for m in marks if "placed" in m)
        self._saved = {(m["island"], m["saved"]): m["files"] for m in marks if "saved" in m}

    def check(self, root: Path, promised: Sequence[Mark]) -> None:
        """Raises Broken unless every promise holds on the disks below `root`."""
        with _naming("the coordinator"):
            self._coordinator(root / machines.COORDINATOR, promised)
        for name in machines.ISLANDS:
            with _naming(name):
                self._island(root / name, [m for m in promised if m.get("island") == name])
        with _naming("the certificate"):
            self._certificate(root / machines.COORDINATOR, promised)
        with _naming("what the operator keeps"):
            self._kept(root / machines.OPERATOR, promised)
        with _naming("the blobs alone"):
            self._blobs(root / machines.STORE, promised)
        with _naming("the ledger elsewhere"):
            self._addresses(root / machines.ELSEWHERE, promised)

    def complete(self, root: Path) -> None:
        """Raises Broken unless the run goes on to the weights of the undisturbed one."""
        with _naming("the continued run"):
            found = machines.run(root).digest
            _same("final params digest", found, self.final_digest)

    def _coordinator(self, home: Path, promised: Sequence[Mark]) -> None:
        clock = ManualClock(wall_start=machines.WALL + 1e6)
        with state.held(home, state.Addresses(), pid=2, wall=clock.wall()) as stores:
            if any("created" in m for m in promised) and stores.ledger.run() is None:
                raise Broken("the run that was created is gone")
            manifest = boot.create_or_check(
                stores, machines.run_file(), clock, new_run_id="simulated"
            )
            coordinator = boot.open_coordinator(stores, clock, manifest)
            self._ledger(stores.ledger, promised)
            self._audit(stores.ledger, stores.blobs)
            published = [m["digest"] for m in promised if "published" in m]
            version = coordinator.versions.current.version
            if version < len(published):
                raise Broken(f"version {len(published)} was published, it serves {version}")

    def _ledger(self, ledger: Ledger, promised: Sequence[Mark]) -> None:
        workers = {worker.worker_id: worker.incarnation for worker in ledger.workers()}
        rounds = ledger.rounds()
        digests = {r.round: r.master_digest for r in rounds if r.state is RoundState.PUBLISHED}
        receipts = {c.receipt: c.sha256 for r in rounds for c in ledger.contributions(r.round)}
        for mark in promised:
            if "joined" in mark and workers.get(mark["joined"], -1) < mark["incarnation"]:
                raise Broken(f"worker {mark['joined']} has forgotten its incarnation")
            if "received" in mark:
                _same(f"receipt of {mark['received']}", receipts.get(mark["receipt"]), mark["sha256"])
            if "published" in mark:
                version = mark["published"]
                _same(f"digest of version {version}", digests.get(version), mark["digest"])

    def _audit(self, ledger: Ledger, blobs: Blobs) -> None:
        manifest = recorded.manifest_of(ledger)
        assert manifest is not None
        layout = recorded.layout_of(manifest)
        report = audit.audit(ledger, blobs, layout=layout, with_replay=True)
        if not report.clean:
            raise Broken(f"the audit finds {report.problems}")

    def _island(self, home: Path, promised: Sequence[Mark]) -> None:
        store = IslandStore(home)
        try:
            for mark in promised:
                if "identity" in mark:
                    kept = store.identity()
                    found = None if kept is None else [kept.worker_id, kept.island_key]
                    _same("identity", found, mark["identity"])
            checkpoint, pending = store.checkpoint(), store.pending()
            held = max((s.round for s in (checkpoint, pending) if s is not None), default=0)
            due = max((m.get("saved", 0) for m in promised), default=0)
            if held < due:
                raise Broken(f"the state of round {due} was saved, round {held} is here")
            self._whole(home.name, checkpoint, but="frame")
            self._whole(home.name, pending)
        finally:
            store.close()

    def _whole(self, island: str, saved: Saved | None, *, but: str = "") -> None:
        """What another life would adopt is what was saved, to the byte."""
        if saved is None:
            return
        assert saved.path is not None
        expected = self._saved[island, saved.round]
        assert {STATE_FILE, RESIDUAL_FILE, "complete.json"} <= expected.keys(), expected
        for name, sha256 in expected.items():
            if name != but:
                _same(f"{saved.path.name}/{name}", _sha256(saved.path / name), sha256)

    def _certificate(self, home: Path, promised: Sequence[Mark]) -> None:
        for mark in promised:
            if "finished" in mark:  # from here on there may be one
                found = certificate.own(home, host="127.0.0.1", now=NOW).fingerprint
                expected = [m["pinned"] for m in promised if "pinned" in m]
                _same("fingerprint", found, expected[0] if expected else found)

    def _kept(self, directory: Path, promised: Sequence[Mark]) -> None:
        weights = directory / "weights.safetensors"
        if weights.exists() or any("exported" in m for m in promised):
            _same("exported weights", _sha256(weights), self._exported)
        for mark in promised:
            if "copied" in mark:
                ledger = engines.open_ledger(directory / "copy.sqlite")
                try:
                    _same("copy of the ledger", ledger.state_hash(), mark["copied"])
                finally:
                    ledger.close()

    def _blobs(self, root: Path, promised: Sequence[Mark]) -> None:
        names = [m["stored"] for m in promised if "stored" in m]
        if not names:
            return
        blobs = DirectoryBlobs(root)
        try:
            for name in names:
                blobs.open(name).close()
        finally:
            blobs.close()

    def _addresses(self, home: Path, promised: Sequence[Mark]) -> None:
        placed = [m["placed"] for m in promised if "placed" in m]
        if placed or (home / "stores.json").exists():
            _same("address of the ledger", state.addresses_of(home).ledger, self._placed)


@contextmanager
def _naming(part: str) -> Iterator[None]:
    """A refusal to start, or to read what was promised, is a broken promise too."""
    try:
        yield
    except Broken as error:
        raise Broken(f"{part}: {error}") from error
    except (AtollError, OSError, ValueError) as error:
        raise Broken(f"{part}: {type(error).__name__}: {error}") from error


def _same(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise Broken(f"{what} is {found!r}, it was {expected!r}")


def _sha256(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None
