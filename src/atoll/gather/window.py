"""One window from end to end on a group of ranks: fetched, merged, applied, recorded.

Every rank makes one `Window` and runs it; all return the same result, or all raise the same error
by the name of the rank that met it. A rank that is gone is MissingRanks at the collectives'
deadline, which must be later than the window's `seconds`.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll import canonical
from atoll.blobs.bucket import Bucket
from atoll.clock import Clock
from atoll.collectives.base import Collectives
from atoll.errors import AtollError, ConfigError, GroupBroken
from atoll.gather import consume, emit, events, plan
from atoll.gather.archive import Archive, Recorded
from atoll.gather.consume import Consumed, Held
from atoll.gather.exchange import Routes
from atoll.gather.fetch import Fetched, Fetcher
from atoll.gather.keys import SecretKey
from atoll.gather.merge import merge, readable
from atoll.gather.numbers import Numbers
from atoll.gather.partial import Partial, Skipped, shortened
from atoll.gather.peers import Peer, PeerList
from atoll.gather.quality import quality
from atoll.gather.recorder import Recorder
from atoll.gather.replica import Replica
from atoll.gather.reserves import Gather
from atoll.gather.result import Merged
from atoll.gather.served import OwnSlices, SharedSlices
from atoll.gather.spool import Spool, SpoolSlices
from atoll.gather.statement import Statement
from atoll.gather.supports import CODEC
from atoll.gather.terms import Terms
from atoll.gather.turns import Turns
from atoll.gather.unchanged import Unchanged
from atoll.gather.validate import Validator
from atoll.gather.vote import agree, on_all, vote
from atoll.gather.words import Reason

GROUP = 1  # of the collectives' keys: a group of ranks gathers one run


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
    told: Callable[[Numbers], None] = lambda _: None  # of each window, on rank 0

    def run(self, window: int) -> Merged:
        """The window's result, equal on all ranks, once it is applied and recorded.

        Where an error is raised before the weights have moved, nothing has changed; afterwards
        the replica is torn, and a group that starts again applies the artifact or gathers anew.
        """
        turns, started = Turns(GROUP, window), self.clock.now()
        self._agree(turns, window)
        found = None if self._recorder is None else self._recorder.find(turns, window)
        if self._recorder is not None and found is not None:
            merged = self._recorder.replay(turns, self.replica, found)
            self._tell_replayed(found, self.clock.now() - started)
            return merged
        spool = self._spool(turns, window)
        merged = self._gathered(turns, window, spool)
        with SpoolSlices(spool, self._places(merged)) as slices:
            owners = self.terms.owners(self.ranks.size)
            source = Unchanged(slices, merged.accepted, owners)
            final, done = self._applied(turns, window, merged, source)
        self._tell(window, final, done, self.clock.now() - started)
        own = OwnSlices(SpoolSlices(spool, self._places(final)), final.holders, self.ranks.rank)
        return readable(
            final,
            layout=self.terms.layout,
            codec=CODEC,
            source=own,
            shared=SharedSlices(own, self.ranks, turns),
        )

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
            if self._recorder is not None:
                self._recorder.check_key()
            about = [terms.hash(), window, replica.digest, replica.prev, self.archive is None]
            return canonical.sha256(about), None
        except Exception as exc:  # whatever it is, the others must hear of it
            return "", exc

    # A window that is gathered

    def _spool(self, turns: Turns, window: int) -> Spool:
        return on_all(self.ranks, turns, lambda: Spool(self._spools / f"{window:08d}"))

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
        self, turns: Turns, window: int, merged: Merged, source: Unchanged
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
            if self._recorder is None:
                self.ranks.barrier(turns.next("control")).wait()
                prev = replica.prev
            else:
                prev = self._recorder.record(turns, replica, routes, final, done, source)
        replica.advance(done.digest.root, prev)
        return final, done

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
            nbytes = final.download_bytes
            events.applied(window, done=done, quality=told, seconds=seconds, download_bytes=nbytes)
            self.told(
                Numbers.of_applied(
                    window, done=done, quality=told, seconds=seconds, download_bytes=nbytes
                )
            )

    def _tell_replayed(self, found: Recorded, seconds: float) -> None:
        if self.ranks.rank == emit.EMITTER:
            events.replayed(found, seconds=seconds)
            self.told(Numbers.of_replayed(found, seconds=seconds))

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
    def _recorder(self) -> Recorder | None:
        if self.archive is None:
            return None
        return Recorder(
            ranks=self.ranks,
            archive=self.archive,
            key=self.key,
            directory=self.directory,
            terms=self.terms,
        )


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
