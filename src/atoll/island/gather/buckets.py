"""The run's buckets as one island uses them: it publishes into its own and gathers from all.

    <state>/gather/<round>/     what was fetched of a round, and the island's own frame of it
    <state>/gather/published    the newest version that the island has (`kept`)

What an earlier life has fetched is found again; a round's directory goes once its version is kept.
"""

import logging
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from atoll.blobs.bucket import PIECE_BYTES, Bucket, Tag
from atoll.clock import Clock
from atoll.errors import Conflict, FrameError, ObjectRefused, StoreError
from atoll.gather import budget, supports
from atoll.gather import publish as publishing
from atoll.gather.errand import Pace
from atoll.gather.fetch import Fetched, Fetcher
from atoll.gather.keys import PublicKey
from atoll.gather.peers import Peer, PeerList
from atoll.gather.places import Run, in_threads
from atoll.gather.spool import Record, Spool
from atoll.gather.statement import Statement
from atoll.gather.validate import Expected, Validator
from atoll.gather.words import Reason, Skip
from atoll.island.gather import kept
from atoll.island.gather.base import Collect, Publish
from atoll.island.gather.signing import Signing
from atoll.island.link.base import FrameSource
from atoll.protocol.gather import prefix_of
from atoll.strategies.gather import local
from atoll.traffic import Traffic

log = logging.getLogger(__name__)

# What a published round lists is there already, or is gone for good.
PACE = Pace(patience_seconds=0.0)


@dataclass(eq=False)
class IslandBuckets:
    """Fulfils `base.Buckets`. Publishing and gathering may go on in a thread each."""

    buckets: Mapping[str, Bucket]
    signing: Signing
    directory: Path
    clock: Clock
    link_traffic: Traffic  # what the island carries in all
    run: Run = in_threads
    traffic: Traffic = field(default_factory=Traffic)  # with buckets alone
    gathered: int = 0  # versions that the island made itself

    def told(self) -> dict[str, int]:
        return {
            "bucket_bytes_sent": self.traffic.sent,
            "bucket_bytes_received": self.traffic.received,
            "gathered_versions": self.gathered,
        }

    # Publishing

    def publish(self, wanted: Publish) -> None:
        """Puts the frame and its statement where others find them.

        The frame stays in the spool too, so that the island need not fetch its own.
        """
        stated = wanted.statement
        self._drop_before(stated.window)
        spool = self._spool(stated.window)
        path = self._own_frame(spool, stated.uid, wanted.frame)
        try:
            placed = self._placed(wanted, path)
        except Conflict:
            # What it stated before was refused, or else this round would not be its again.
            self._own.remove(publishing.statement_key(self._prefix(stated), stated.window))
            placed = self._placed(wanted, path)
        spool.keep(stated.uid, Record(self.signing.document(stated), placed))
        self.traffic.sends(stated.nbytes)
        self.link_traffic.sends(stated.nbytes)
        self._remove_old(wanted)

    @property
    def _own(self) -> Bucket:
        return self.buckets[self.signing.bucket]

    def _prefix(self, stated: Statement) -> str:
        return prefix_of(stated.run_id, stated.uid)

    def _placed(self, wanted: Publish, path: Path) -> Tag:
        frame, _ = publishing.place(
            self._own,
            self._prefix(wanted.statement),
            path,
            wanted.statement,
            self.signing.key,
            deadline=self.clock.now() + wanted.settings.pull_seconds,
        )
        return frame

    def _remove_old(self, wanted: Publish) -> None:
        """What no round needs goes; what cannot go now holds up no hand-in, and goes later."""
        stated, settings = wanted.statement, wanted.settings
        deadline = self.clock.now() + settings.pull_seconds
        try:
            publishing.remove_old(
                self._own, self._prefix(stated), stated.window, settings.keep, deadline=deadline
            )
        except ObjectRefused:
            raise  # by rule, not for now: it would grow for ever
        except StoreError as error:
            about = {"code": error.code, "reason": str(error)}
            log.warning("old objects stay in the bucket", extra=about)

    def _own_frame(self, spool: Spool, uid: str, frame: FrameSource) -> Path:
        """The frame as one file, in the round's spool."""
        if not spool.has(frame.sha256):
            spool.forget(uid)
            with spool.draft(uid, frame.nbytes) as part:
                while part.offset < frame.nbytes:
                    piece = frame.read(part.offset, PIECE_BYTES)
                    if not piece:
                        raise StoreError(
                            f"the frame ends at byte {part.offset} of {frame.nbytes}; it was cut "
                            f"on disk"
                        )
                    part.write(memoryview(piece))
                spool.finish(part, frame.sha256)
        return spool.path(frame.sha256)

    # Gathering

    def collect(self, wanted: Collect) -> None:
        """Fetches what the round lists, checks it, and feeds the version's frame to the sink."""
        number = wanted.window.round
        spool = self._spool(number)
        try:
            found = self._fetched(wanted, spool)
            self._feed(wanted, spool, found)
        except Exception:  # whatever it is, the version comes in another way
            shutil.rmtree(self._place(number), ignore_errors=True)
            raise
        self.gathered += 1

    def _fetched(self, wanted: Collect, spool: Spool) -> Fetched:
        window, run_id = wanted.window, wanted.run_id
        listed = {peer.worker_id: peer for peer in window.peers}
        peers = PeerList(
            tuple(
                Peer(uid, PublicKey.parse(peer.key), peer.bucket, prefix_of(run_id, uid))
                for uid, peer in sorted(listed.items())
            )
        )

        def validator_of(peer: Peer, statement: Statement) -> Validator:
            if statement.sha256 != listed[peer.uid].sha256:
                raise Skip(
                    Reason.CONFLICT,
                    f"the statement of {peer.uid!r} names {statement.sha256}, round "
                    f"{window.round} has folded {listed[peer.uid].sha256}",
                )
            expected = Expected(
                run_id=run_id,
                manifest_sha256=wanted.manifest_sha256,
                uid=peer.uid,
                window=window.round,
                base_digest=window.base_digest,
                layout=wanted.layout,
                codec=supports.CODEC,
            )
            return Validator(expected, statement)

        by = Fetcher(
            window=window.round,
            buckets=self.buckets,
            validator_of=validator_of,
            spool=spool,
            clock=self.clock,
            slots=budget.SLOTS,
            piece_bytes=PIECE_BYTES,
            pace=PACE,
            run=self.run,
        )
        deadline = self.clock.now() + wanted.settings.pull_seconds
        found = by.fetch(peers.all, deadline=deadline)
        self.traffic.receives(found.received_bytes)
        self.link_traffic.receives(found.received_bytes)
        if found.skipped:
            raise Skip(found.skipped[0].reason, found.skipped[0].sentence)
        return found

    def _feed(self, wanted: Collect, spool: Spool, found: Fetched) -> None:
        """The frame that the coordinator makes of the same contributions, byte for byte."""
        window = wanted.window
        weights = {peer.worker_id: peer.weight for peer in window.peers}
        with ExitStack() as stack:
            contributions = []
            for one in found.accepted:
                reader = stack.enter_context(spool.open(one.sha256))
                contributions.append(
                    local.Fetched(one.sha256, weights[one.uid], one.payload_start, reader.read)
                )
            pieces = local.frame_of(
                *(wanted.asked, wanted.layout, contributions),
                run_id=wanted.run_id,
                manifest_sha256=wanted.manifest_sha256,
                round_number=window.round,
                base_digest=window.base_digest,
                result_digest=window.result_digest,
            )
            assert pieces is not None, "it is asked for only where a version travels like this"
            try:
                for piece in pieces:
                    wanted.sink(piece)
            except StoreError as exc:
                raise FrameError(
                    f"the island's own frame of version {window.round} broke off: {exc}; it "
                    f"fetches the weights whole"
                ) from exc

    # Between lives

    def keep(self, version: int, digest: str, weights: memoryview) -> None:
        kept.keep(self.directory, version, digest, weights)
        self._drop_before(version + 1)

    def recall(self, weights: memoryview) -> tuple[int, str] | None:
        return kept.recall(self.directory, weights)

    # Its own directory

    def _place(self, number: int) -> Path:
        return self.directory / f"{number:08d}"

    def _spool(self, number: int) -> Spool:
        return Spool(self._place(number))

    def _drop_before(self, number: int) -> None:
        """What was fetched of earlier rounds is of no more use."""
        for path in self.directory.glob("*"):
            if path.name.isdigit() and path.name < self._place(number).name:
                shutil.rmtree(path, ignore_errors=True)
