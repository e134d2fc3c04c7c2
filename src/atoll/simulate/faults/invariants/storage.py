"""Storage: nothing that is needed is missing, nothing that is not needed stays, all is bounded."""

import hashlib
import json
import os
from pathlib import Path

from atoll.simulate.faults import standin
from atoll.simulate.faults.durable import View
from atoll.simulate.faults.invariants.base import Seen, check

MIN_FRAME_BYTES = 400


class Storage:
    """Looks at the blob directory itself."""

    def __init__(self, home: Path, seen: Seen) -> None:
        self._home = home
        self._seen = seen
        self._verified: set[str] = set()

    def referenced(self, view: View) -> set[str]:
        """Blobs that the records need for replay from the oldest kept snapshot."""
        names = {row.initial_sha256 for row in view.table("runs").rows}
        first = 0
        if view.snapshots and view.terms(max(view.rounds)).manifest.storage.retain == "snapshots":
            first = min(view.snapshots)
        for snapshot in view.snapshots.values():
            names |= {snapshot.master_sha256, snapshot.published_sha256}
            names |= {sha256 for _, sha256 in json.loads(snapshot.slots_sha256)}
        return names | {row.sha256 for row in view.contributions.values() if row.applied > first}

    def complete(self, view: View) -> None:
        """What the records need is stored with its right bytes."""
        for sha256 in sorted(self.referenced(view)):
            path = self._seen.reference.path(sha256)
            check("blob-is-there", os.path.exists(path), needed_and_not_stored=sha256)
            if sha256 not in self._verified:
                found = hashlib.sha256(Path(path).read_bytes()).hexdigest()
                check("blob-is-there", found == sha256, blob=sha256, holds_bytes_of=found)
                self._verified.add(sha256)

    def pruned(self, view: View) -> None:
        """A snapshot was recorded and nothing interrupted what follows: no garbage is left."""
        stored = {path.name for path in self._home.glob("blobs/??/*")}
        orphans = stored - self.referenced(view)
        check("no-orphans", not orphans, needed_by_nothing=orphans)

    def bounded(self, view: View) -> None:
        """One upload of each worker and open round is under way, and few frames are spooled."""
        scenario, strategy = self._seen.world.scenario, view.terms(1).asked
        workers = scenario.islands + len(scenario.joiners)
        drafts = len(os.listdir(self._home / "blobs" / "tmp"))
        # What a kill left is swept at the start; a snapshot's own draft may be among them.
        check("bounded", drafts <= workers * (1 + strategy.lead) + 1, drafts=drafts, of=workers)
        frames = len(os.listdir(self._home / "spool"))
        fragments = len(strategy.cut(standin.LAYOUT))
        # Updates that together are smaller than the model; a frame's header alone is larger.
        kept = (4 * standin.LAYOUT.size) // MIN_FRAME_BYTES if strategy.follows else 0
        limit = 2 + 2 * fragments + kept
        check("bounded", frames <= limit, spooled=frames, fragments=fragments)
