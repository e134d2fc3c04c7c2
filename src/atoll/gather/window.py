"""One window from end to end on a group of ranks: fetched, merged, applied, recorded.

Every rank makes one `Window` and runs it; all return the same result, or all raise the same error
by the name of the rank that met it. A rank that is gone is MissingRanks at the collectives'
deadline, which must be later than the window's `seconds`.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from atoll import canonical
from atoll import files as filesystem
from atoll.blobs.bucket import Bucket
from atoll.clock import Clock
from atoll.collectives.base import Collectives
from atoll.errors import AtollError, ConfigError, GroupBroken
from atoll.gather import artifact as artifacts
from atoll.gather import consume, emit, events, plan
from atoll.gather.archive import Archive, Recorded
from atoll.gather.artifact import Artifact
from atoll.gather.budget import Budget
from atoll.gather.consume import Consumed, Held
from atoll.gather.errand import Pace
from atoll.gather.exchange import Routes
from atoll.gather.fetch import Fetched, Fetcher
from atoll.gather.keys import SecretKey
from atoll.gather.merge import merge, readable
from atoll.gather.partial import Partial, Skipped, shortened
from atoll.gather.peers import Peer, PeerList
from atoll.gather.quality import quality
from atoll.gather.replay import replay
from atoll.gather.replica import Replica
from atoll.gather.reserves import Gather
from atoll.gather.result import Merged
from atoll.gather.spool import Spool, SpoolSlices
from atoll.gather.statement import Statement
from atoll.gather.supports import CODEC
from atoll.gather.turns import Turns
from atoll.gather.validate import Expected, Validator
from atoll.gather.vote import agree, vote
from atoll.gather.words import Reason
from atoll.layout import Layout, Span
from atoll.optim.base import MAX_NORM, OuterOptimizer

GROUP = 1  # of the collectives' keys: a group of ranks gathers one run


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a run's windows are gathered by; the same on all ranks, which compare its hash."""

    run_id: str
    manifest_sha256: str
    layout: Layout
    peers: PeerList
    optimizer: OuterOptimizer
    seconds: float  # for fetching, with reserves
    memory_bytes: int
    weights: Mapping[str, int] = field(default_factory=dict)  # by uid; 1 for the others
    scores: Mapping[str, float] = field(default_factory=dict)  # for the numbers of a window only
    reserve_share: float = 0.3
    norm_bound: float = MAX_NORM
    pace: Pace = field(default_factory=Pace)
    settings: consume.Settings = field(default_factory=consume.Settings)

    def __post_init__(self) -> None:
        if self.optimizer.slots:
            raise ConfigError(
                f"outer optimizer {self.optimizer.name!r} keeps state, which no artifact carries; "
                f"a gather takes sgd"
            )

    def budget(self, ranks: int) -> Budget:
        """The shares of a rank's memory."""
        peers = len(self.peers.all)
        return Budget.of(
            self.memory_bytes, peers=peers, ranks=ranks, layout=self.layout, codec=CODEC
        )

    def owners(self, ranks: int) -> list[Span]:
        """The part of the model that each rank holds."""
        return plan.owners(self.layout, ranks, self.budget(ranks).tile_bytes)

    def expected(self, uid: str, window: int, base_digest: str) -> Expected:
        """What a window asks of a peer's object."""
        return Expected(
            run_id=self.run_id,
            manifest_sha256=self.manifest_sha256,
            uid=uid,
            window=window,
            base_digest=base_digest,
            layout=self.layout,
            codec=CODEC,
            norm_bound=self.norm_bound,
        )

    def hash(self) -> str:
        """Equal exactly where all that decides a window is."""
        lists = (self.peers.primaries, self.peers.reserves)
        told = (self.optimizer, self.seconds, self.memory_bytes, self.reserve_share)
        return canonical.sha256(
            {
                "layout": self.layout.digest,
                "manifest": [self.run_id, self.manifest_sha256],
                "peers": [[[p.uid, p.key.hex, p.bucket, p.prefix] for p in some] for some in lists],
                "settings": [
                    repr(one) for one in (*told, self.norm_bound, self.pace, self.settings)
                ],
                "weights": dict(self.weights),
            }
        )


@dataclass(frozen=True, kw_only=True)
class Window:
    """What one rank runs windows with; `replica` moves on with each of them.

    With an archive each window is recorded by rank 0, which alone needs the `key`.
    """

    ranks: Collectives
    buckets: Mapping[str, Bucket]
    clock: Clock
    directory: Path  # this rank's own, for spools and bodies
    terms: Terms
    replica: Replica
    archive: Archive | None = None
    key: SecretKey | None = None

    def run(self, window: int) -> Merged:
        """The window's result, equal on all ranks, once it is applied and recorded.

        Where an error is raised before the weights have moved, nothing has changed; afterwards
        the replica is torn, and a group that starts again applies the artifact or gathers anew.
        """
        turns, started = Turns(GROUP, window), self.clock.now()
        self._agree(turns, window)
        found = self._recorded(turns, window)
        if found is not None:
            return self._replayed(turns, found)
        spool = self._spool(turns, window)
        merged = self._gathered(turns, window, spool)
        with SpoolSlices(spool, self._places(merged)) as source:
            final, done = self._applied(turns, window, merged, source)
        self._tell(window, final, done, self.clock.now() - started)
        places = SpoolSlices(spool, self._places(final))
        return readable(final, layout=self.terms.layout, codec=CODEC, source=places)

    def _agree(self, turns: Turns, window: int) -> None:
        """Ready, with the same plan, on all ranks."""
        own, trouble = self._own_hash(window)
        vote(self.ranks, turns.next("control"), trouble)
        plan.agree(self.ranks, turns.next("control"), own)

    def _own_hash(self, window: int) -> tuple[str, Exception | None]:
        terms, replica = self.terms, self.replica
        try:
            replica.check(window)
            own = terms.owners(self.ranks.size)[self.ranks.rank]
            if replica.master.shape != (len(own),):
                raise ConfigError(
                    f"the replica has {replica.master.numel()} elements; rank {self.ranks.rank} "
                    f"of {self.ranks.size} owns {len(own)}"
                )
            if self.archive is not None and self.ranks.rank == emit.EMITTER:
                self._check_key(self.archive)
            about = [terms.hash(), window, replica.digest, replica.prev, self.archive is None]
            return canonical.sha256(about), None
        except Exception as exc:  # whatever it is, the others must hear of it
            return "", exc

    def _check_key(self, archive: Archive) -> None:
        if self.key is None or self.key.public != archive.key:
            raise ConfigError(
                f"rank {emit.EMITTER} records windows and does not have the signing key of "
                f"{archive.key.hex}; give it the file that `atoll gather keygen` made"
            )

    # An artifact that an earlier life has left

    def _recorded(self, turns: Turns, window: int) -> Recorded | None:
        """The window's record, where there is one, read by rank 0 and checked by every rank."""
        if self.archive is None:
            return None
        document, trouble = b"", None
        if self.ranks.rank == emit.EMITTER:
            try:
                document = self.archive.document(window) or b""
            except Exception as exc:  # whatever it is, the others must hear of it
                trouble = exc
        vote(self.ranks, turns.next("control"), trouble)
        limit = artifacts.MAX_BYTES + 1
        said = self.ranks.all_gather_bytes(turns.next("control"), document, limit=limit)
        return self.archive.read(said[emit.EMITTER], window) if said[emit.EMITTER] else None

    def _replayed(self, turns: Turns, found: Recorded) -> Merged:
        assert self.archive is not None, "a record is of an archive"
        body, trouble = self._body_path, None
        try:
            self.replica.check_follows(found)
            filesystem.make_directories(self.directory)
            if self.ranks.rank == emit.EMITTER:
                self.archive.fetch(found.artifact, body)
        except Exception as exc:  # whatever it is, the others must hear of it
            trouble = exc
        vote(self.ranks, turns.next("control"), trouble)
        replay(
            self.ranks,
            turns,
            self.replica,
            found,
            body=body,
            layout=self.terms.layout,
            budget=self.terms.budget(self.ranks.size),
            optimizer=self.terms.optimizer,
        )
        body.unlink(missing_ok=True)
        return found.artifact.merged()

    # A window that is gathered

    def _spool(self, turns: Turns, window: int) -> Spool:
        trouble: Exception | None = None
        try:
            spool = Spool(self._spools / f"{window:08d}")
        except Exception as exc:  # whatever it is, the others must hear of it
            trouble = exc
        vote(self.ranks, turns.next("control"), trouble)
        return spool

    def _gathered(self, turns: Turns, window: int, spool: Spool) -> Merged:
        terms, budget = self.terms, self.terms.budget(self.ranks.size)
        base = self.replica.digest

        def validator_of(peer: Peer, statement: Statement) -> Validator:
            return Validator(terms.expected(peer.uid, window, base), statement)

        by = Fetcher(
            window=window,
            buckets=self.buckets,
            validator_of=validator_of,
            spool=spool,
            clock=self.clock,
            slots=budget.slots,
            piece_bytes=budget.piece_bytes,
            rank=self.ranks.rank,
            pace=terms.pace,
        )

        def fetch(peers: Sequence[Peer], deadline: float) -> Fetched:
            try:
                return by.fetch(peers, deadline=deadline)
            except AtollError:
                raise
            except Exception as exc:  # a fault of ours; the others must hear of it
                raise GroupBroken(f"fetching ended with {type(exc).__name__}: {exc}") from exc

        nbytes = terms.expected("size", window, base).frame_bytes()[-1]
        gather = Gather(
            ranks=self.ranks,
            turns=turns,
            clock=self.clock,
            fetch=fetch,
            layout=terms.layout,
            sizes=dict.fromkeys((peer.uid for peer in terms.peers.all), nbytes),
            base_version=window,
            reserve_share=terms.reserve_share,
        )
        return gather.run(terms.peers, seconds=terms.seconds)

    def _applied(
        self, turns: Turns, window: int, merged: Merged, source: SpoolSlices
    ) -> tuple[Merged, Consumed]:
        """Applies the window and records it; the result without those left out as copies."""
        has_peers = agree(self.ranks, turns.next("control"), bool(merged.accepted))
        assert has_peers == bool(merged.accepted), "all ranks have merged the same partials"
        size, terms, replica = self.ranks.size, self.terms, self.replica
        routes = Routes.of(merged, terms.layout, ranks=size, budget=terms.budget(size))
        with consume.consumed(
            self.ranks,
            turns,
            routes,
            result=merged,
            source=source,
            held=Held(
                master=replica.master,
                slots={},
                optimizer=terms.optimizer,
                step=window + 1,
                moving=replica.tear,
            ),
            weights={uid: terms.weights.get(uid, 1) for uid in merged.uids},
            directory=self._spools,
            settings=terms.settings,
        ) as done:
            replica.is_torn = True
            final = _without(merged, done.copies, terms.peers)
            prev = self._emitted(turns, window, routes, final, done)
        replica.advance(done.digest.root, prev)
        return final, done

    def _emitted(
        self, turns: Turns, window: int, routes: Routes, final: Merged, done: Consumed
    ) -> str:
        """Records the window; the sha256 of its record, on all ranks."""
        if self.archive is None:
            self.ranks.barrier(turns.next("control")).wait()
            return self.replica.prev
        trouble = emit.collect(self.ranks, turns, routes, done, self._body_path)
        vote(self.ranks, turns.next("control"), trouble)
        prev, trouble = "", None
        if self.ranks.rank == emit.EMITTER:
            assert self.key is not None, "checked before the window"
            try:
                made = self._artifact(window, final, done)
                prev = self.archive.create(made, self._body_path, self.key).sha256
                self._body_path.unlink()
            except Exception as exc:  # whatever it is, the others must hear of it
                trouble = exc
        vote(self.ranks, turns.next("control"), trouble)
        said = self.ranks.all_gather_bytes(turns.next("control"), prev.encode(), limit=64)
        return said[emit.EMITTER].decode()

    def _artifact(self, window: int, final: Merged, done: Consumed) -> Artifact:
        assert done.uids == final.uids, (done.uids, final.uids)
        return Artifact(
            run_id=self.terms.run_id,
            manifest_sha256=self.terms.manifest_sha256,
            window=window,
            prev=self.replica.prev,
            base_digest=self.replica.digest,
            digest=done.digest.root,
            primaries=final.primaries,
            accepted=final.accepted,
            skipped=final.skipped,
            weights=tuple(self.terms.weights.get(uid, 1) for uid in final.uids),
            factors=tuple(tuple(row) for row in done.factors.astype(float).tolist()),
            findings=emit.told_of(done.findings),
            body_bytes=self._body_path.stat().st_size,
            body_sha256=emit.sha256_of(self._body_path),
        )

    def _tell(self, window: int, final: Merged, done: Consumed, seconds: float) -> None:
        for old in sorted(self._spools.glob("[0-9]*")):
            if old.name.isdigit() and int(old.name) < window:
                shutil.rmtree(old, ignore_errors=True)
        if self.ranks.rank == emit.EMITTER:
            told = quality(
                final,
                primaries=final.primaries,
                reserves=[peer.uid for peer in self.terms.peers.reserves],
                scores=self.terms.scores,
            )
            events.applied(
                window,
                done=done,
                quality=told,
                seconds=seconds,
                download_bytes=final.download_bytes,
            )

    def _places(self, merged: Merged) -> dict[str, tuple[str, int]]:
        """Where this rank's own payloads are in its spool."""
        return {
            one.uid: (one.sha256, one.payload_start)
            for one in merged.accepted
            if one.rank == self.ranks.rank
        }

    @property
    def _spools(self) -> Path:
        return self.directory / "spool"

    @property
    def _body_path(self) -> Path:
        return self.directory / "body"


def _without(merged: Merged, copies: Mapping[str, str], peers: PeerList) -> Merged:
    """The result where `copies` are skipped, each with its sentence."""
    if not copies:
        return merged
    parts = [
        Partial(
            part.rank,
            tuple(one for one in part.accepted if one.uid not in copies),
            part.skipped
            + tuple(
                Skipped(uid, Reason.COPY, shortened(copies[uid]))
                for uid in part.uids
                if uid in copies
            ),
            part.answered,
        )
        for part in merged.parts
    ]
    return merge(
        parts,
        primaries=merged.primaries,
        reserves=[peer.uid for peer in peers.reserves],
        base_version=merged.global_steps[0],
        seconds=merged.time,
    )
