"""Storage: nothing that is needed is missing, nothing that is not needed stays, all is bounded."""

import hashlib
import json
import os
from pathlib import Path

from atoll.simulate.faults import standin
from atoll.simulate.faults.durable import View
from atoll.simulate.faults.invariants.base import Violation
from atoll.simulate.faults.reference import Reference
from atoll.strategies.base import Strategy


class Storage:
    """Looks at the blob directory itself."""

    def __init__(self, home: Path, reference: Reference, *, workers: int) -> None:
        self._home = home
        self._reference = reference
        self._workers = workers
        self._verified: set[str] = set()

    def referenced(self, view: View) -> set[str]:
        """Blobs that the records need for replay from the oldest kept snapshot."""
        names = {row["initial_sha256"] for row in view.table("runs").rows}
        first = 0
        if view.snapshots:
            latest = max(view.rounds)
            storage = json.loads(view.manifest_body(latest))["storage"]
            first = min(view.snapshots) if storage["retain"] == "snapshots" else 0
        for snapshot in view.snapshots.values():
            names |= {snapshot["master_sha256"], snapshot["published_sha256"]}
            names |= {sha256 for _, sha256 in json.loads(snapshot["slots_sha256"])}
        names |= {row["sha256"] for row in view.contributions.values() if row["applied"] > first}
        return names

    def complete(self, view: View) -> None:
        """What the records need is stored with its right bytes."""
        for sha256 in sorted(self.referenced(view)):
            path = self._reference.path(sha256)
            if not os.path.exists(path):
                raise Violation("blob-is-there", f"{sha256} is needed and not stored")
            if sha256 not in self._verified:
                found = hashlib.sha256(Path(path).read_bytes()).hexdigest()
                if found != sha256:
                    raise Violation("blob-is-there", f"{sha256} holds bytes of {found}")
                self._verified.add(sha256)

    def pruned(self, view: View) -> None:
        """A snapshot was recorded and nothing interrupted what follows: no garbage is left."""
        stored = {
            entry.name
            for folder in os.scandir(self._home / "blobs")
            if len(folder.name) == 2
            for entry in os.scandir(folder.path)
        }
        orphans = sorted(stored - self.referenced(view))
        if orphans:
            raise Violation("no-orphans", f"nothing needs {orphans}")

    def bounded(self, strategy: Strategy) -> None:
        """One upload of each worker and open round is under way, and few frames are spooled."""
        drafts = len(os.listdir(self._home / "blobs" / "tmp"))
        # What a kill left is swept at the start; a snapshot's own draft may be among them.
        most = self._workers * (1 + strategy.lead) + 1
        if drafts > most:
            raise Violation("bounded", f"{drafts} drafts of {self._workers} workers")
        frames = len(os.listdir(self._home / "spool"))
        fragments = len(strategy.cut(standin.LAYOUT))
        if frames > 2 + 2 * fragments:
            raise Violation("bounded", f"{frames} spooled frames")
