"""Islands, and what else has to last, after a power cut."""

import json
from collections.abc import Sequence
from pathlib import Path

from atoll.blobs import owner
from atoll.blobs.directory import DirectoryBlobs
from atoll.island.state.base import FRAME_FILE, RESIDUAL_FILE, STATE_FILE, Saved
from atoll.island.state.store import IslandStore
from atoll.launch import state
from atoll.ledger import engines
from tests.faults.power import machines
from tests.faults.power.promises import Broken, Mark, same, sha256_of, values


class IslandCheck:
    """An island knows who it is, is not behind what it sent, and adopts nothing half written."""

    def __init__(self, name: str, marks: Sequence[Mark]) -> None:
        self._name = name
        self._saved: dict[int, dict[str, str]] = {
            mark["saved"]: mark["files"]
            for mark in marks
            if mark["machine"] == name and "saved" in mark
        }

    def __call__(self, root: Path, promised: Sequence[Mark]) -> None:
        store = IslandStore(root / self._name)
        try:
            self._check(store, promised)
        finally:
            store.close()

    def _check(self, store: IslandStore, promised: Sequence[Mark]) -> None:
        identity = store.identity()
        known = None if identity is None else [identity.worker_id, identity.island_key]
        for expected in values(promised, "identity"):
            same("identity", known, expected)
        checkpoint = store.checkpoint()
        pending = [store.pending(number) for number in store.rounds()[1]]
        reached = max((s.round for s in (checkpoint, *pending) if s is not None), default=0)
        due = max(values(promised, "saved"), default=0)
        if reached < due:
            raise Broken(f"the state of round {due} was saved, that of {reached} is here")
        if checkpoint is not None:
            self._check_files(checkpoint, (STATE_FILE, RESIDUAL_FILE, "complete.json"))
        for saved in pending:
            self._check_files(saved, (STATE_FILE, RESIDUAL_FILE, "complete.json", FRAME_FILE))

    def _check_files(self, saved: Saved, names: Sequence[str]) -> None:
        """What another life would adopt is what was saved, to the byte."""
        assert saved.path is not None
        for name in names:
            found = sha256_of(saved.path / name)
            same(f"{saved.path.name}/{name}", found, self._saved[saved.round][name])


def check_kept(root: Path, promised: Sequence[Mark]) -> None:
    """An operator's exported weights and copy of the ledger."""
    for expected in values(promised, "exported"):
        found = sha256_of(root / machines.OPERATOR / "weights.safetensors")
        same("exported weights", found, expected)
    for expected in values(promised, "streamed"):
        found = sha256_of(root / machines.OPERATOR / "streamed.safetensors")
        same("weights exported piece by piece", found, expected)
    for expected in values(promised, "copied"):
        ledger = engines.open_ledger(root / machines.OPERATOR / "copy.sqlite")
        try:
            same("copy of the ledger", ledger.state_hash(), expected)
        finally:
            ledger.close()


def check_blobs(root: Path, promised: Sequence[Mark]) -> None:
    """Blobs without a ledger beside them."""
    blobs = DirectoryBlobs(root / machines.STORE)
    try:
        for sha256 in values(promised, "stored"):
            blobs.open(sha256).close()
    finally:
        blobs.close()


def check_addresses(root: Path, promised: Sequence[Mark]) -> None:
    """A state directory that knows its stores by address; the blobs there say whose they are."""
    home = root / machines.ELSEWHERE
    if (home / "stores.json").exists():
        state.addresses_of(home)
    mine = owner.marker(str(home.parent / "blobs"), s3=None)
    if (found := mine.read()) is not None:
        json.loads(found)
    for mark in promised:
        same("address of the ledger", state.addresses_of(home).ledger, mark["placed"])
        same("owner of the blobs", (mine.read() or b"").decode(), mark["owner"])
