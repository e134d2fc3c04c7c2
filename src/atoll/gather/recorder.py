"""A group's way to its archive: one rank records a window, all apply one that is recorded.

What one rank meets reaches all of them at the next vote.
"""

from dataclasses import dataclass
from pathlib import Path

from atoll import files as filesystem
from atoll.collectives.base import Collectives
from atoll.errors import ConfigError
from atoll.gather import artifact as artifacts
from atoll.gather import emit
from atoll.gather.archive import Archive, Recorded
from atoll.gather.artifact import Artifact
from atoll.gather.consume import Consumed
from atoll.gather.exchange import Routes
from atoll.gather.keys import SecretKey
from atoll.gather.replay import Replay
from atoll.gather.replica import Replica
from atoll.gather.result import Merged
from atoll.gather.terms import Terms
from atoll.gather.turns import Turns
from atoll.gather.unchanged import Unchanged
from atoll.gather.vote import on_all, vote


@dataclass(frozen=True, kw_only=True)
class Recorder:
    """What one rank records windows with; rank 0 alone has the `key`, and the bodies."""

    ranks: Collectives
    archive: Archive
    key: SecretKey | None
    directory: Path  # this rank's own
    terms: Terms

    def check_key(self) -> None:
        """ConfigError on the rank that signs, unless it can."""
        if self._is_emitter and (self.key is None or self.key.public != self.archive.key):
            raise ConfigError(
                f"rank {emit.EMITTER} records windows and does not have the signing key of "
                f"{self.archive.key.hex}; give it the file that `atoll gather keygen` made"
            )

    def find(self, turns: Turns, window: int) -> Recorded | None:
        """The window's record, where there is one, read by rank 0 and checked by every rank."""

        def read() -> bytes:
            return (self._is_emitter and self.archive.document(window)) or b""

        document = on_all(self.ranks, turns, read)
        limit = artifacts.MAX_BYTES + 1
        said = self.ranks.all_gather_bytes(turns.next("control"), document, limit=limit)
        return self.archive.read(said[emit.EMITTER], window) if said[emit.EMITTER] else None

    def replay(self, turns: Turns, replica: Replica, found: Recorded) -> Merged:
        """Applies a recorded window on all ranks."""
        terms, size = self.terms, self.ranks.size

        def fetch() -> None:
            replica.check_follows(found)
            terms.trust.check_record(found.artifact, terms.layout)
            filesystem.make_directories(self.directory)
            if self._is_emitter:
                self.archive.fetch(found.artifact, self._body)

        on_all(self.ranks, turns, fetch)
        by = Replay(
            layout=terms.layout,
            owners=terms.owners(size),
            optimizer=terms.optimizer,
            trust=terms.trust,
            readers=(emit.EMITTER,),
        )
        by.run(self.ranks, turns, replica, found, body=self._body, budget=terms.budget(size))
        self._body.unlink(missing_ok=True)
        return found.artifact.merged()

    def record(
        self,
        turns: Turns,
        replica: Replica,
        routes: Routes,
        final: Merged,
        done: Consumed,
        source: Unchanged,
    ) -> str:
        """Records what was just applied; the sha256 of its record, on all ranks."""
        assert done.uids == final.uids, (done.uids, final.uids)
        trouble = emit.collect(
            self.ranks,
            turns,
            routes,
            done,
            accepted=final.accepted,
            source=source,
            path=self._body,
        )
        vote(self.ranks, turns.next("control"), trouble)

        def create() -> str:
            if not self._is_emitter:
                return ""
            assert self.key is not None, "checked before the window"
            made = self._artifact(replica, final, done)
            found = self.archive.create(made, self._body, self.key)
            self._body.unlink()
            return found.sha256

        prev = on_all(self.ranks, turns, create)
        said = self.ranks.all_gather_bytes(turns.next("control"), prev.encode(), limit=64)
        return said[emit.EMITTER].decode()

    def _artifact(self, replica: Replica, final: Merged, done: Consumed) -> Artifact:
        return Artifact(
            run_id=self.terms.run_id,
            manifest_sha256=self.terms.manifest_sha256,
            window=replica.window,
            prev=replica.prev,
            base_digest=replica.digest,
            digest=done.digest.root,
            primaries=final.primaries,
            accepted=final.accepted,
            skipped=final.skipped,
            weights=tuple(self.terms.weights.get(uid, 1) for uid in final.uids),
            factors=tuple(tuple(row) for row in done.factors.astype(float).tolist()),
            findings=emit.told_of(done.findings),
            body_bytes=self._body.stat().st_size,
            body_sha256=emit.sha256_of(self._body),
        )

    @property
    def _is_emitter(self) -> bool:
        return self.ranks.rank == emit.EMITTER

    @property
    def _body(self) -> Path:
        return self.directory / "body"
