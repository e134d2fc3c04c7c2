"""Weights as a function of (initial weights, ledger): restore a version, replay what follows.

The coordinator computes every round with this, live and after a restart, and audit proves with it:
there is one way from contributions to weights. Reads ledger and blobs; writes neither.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import TypeVar

from torch import Tensor

from atoll.blobs.base import Blobs
from atoll.codecs.base import Codec
from atoll.errors import BlobChanged, BlobMissing, StateDamaged
from atoll.layout import Fragment, Layout, Span
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import ContributionRecord, RoundRecord, RoundState, SnapshotRecord
from atoll.strategies.base import ALL, Fragments
from atoll.strategies.bundle import Bundle
from atoll.strategies.outer import OuterState, OuterStep, PayloadSink, fresh_state
from atoll.sums import digest as digests
from atoll.sums.digest import ParamsDigest, RunningDigest
from atoll.versions import sources, weights
from atoll.versions.manifests import Manifests
from atoll.versions.sources import BlobSource
from atoll.wire.header import FrameHeader

T = TypeVar("T")


@dataclass(frozen=True)
class Digests:
    """Digests of the master and the published weights: of one fragment, or of the whole model."""

    master: ParamsDigest
    published: ParamsDigest

    @classmethod
    def of(cls, record: RoundRecord) -> "Digests":
        """What the record of a published round says about its fragment."""
        leaves = record.leaves or b""
        published = ParamsDigest(record.published_digest or "", record.published_leaves or leaves)
        return cls(ParamsDigest(record.master_digest or "", leaves), published)

    def cut(self, fragments: Fragments) -> dict[int, "Digests"]:
        """The digests of each fragment, by its number, cut from those of the whole model."""
        layouts = [part.layout for part in fragments.parts]
        both = zip(
            digests.cut(self.master, layouts), digests.cut(self.published, layouts), strict=True
        )
        return {number: Digests(*part) for number, part in enumerate(both)}

    def difference(self, other: "Digests", layout: Layout) -> str | None:
        """Which weights and which tensor of `layout` differ in `other`; None when all agree."""
        for which in ("master", "published"):
            mine: ParamsDigest = getattr(self, which)
            theirs: ParamsDigest = getattr(other, which)
            if mine.root != theirs.root:
                tensor = digests.first_difference(layout, mine.leaves, theirs.leaves)
                return f"{which} weights, tensor {tensor!r}"
        return None


@dataclass
class Version:
    """A run's weights at one version. Buffers and digests change in place, round by round."""

    number: int
    state: OuterState
    parts: list[Digests]  # of each fragment, in order
    ticks: int  # contributions folded so far

    @property
    def digests(self) -> Digests:
        """The digests of the whole model, composed from those of its fragments."""
        master = digests.composed(part.master for part in self.parts)
        if self.state.published is self.state.master:
            return Digests(master, master)
        return Digests(master, digests.composed(part.published for part in self.parts))


@dataclass(frozen=True)
class Applied:
    """One round that was computed."""

    digests: Digests  # of its fragment
    step: OuterStep  # the one that did it


@dataclass(frozen=True)
class Replayed:
    """One round that was computed again."""

    record: RoundRecord
    fragment: Fragment
    contributions: list[ContributionRecord]
    digests: Digests  # of its fragment
    step: OuterStep

    def difference(self) -> str | None:
        """Where it differs from its record: which weights, which tensor; None when it does not."""
        return self.digests.difference(Digests.of(self.record), self.fragment.layout)


@dataclass(frozen=True)
class Replay:
    """From the records of a run to its weights. Used by one thread at a time."""

    ledger: Ledger
    blobs: Blobs
    _: KW_ONLY
    manifests: Manifests
    layout: Layout
    threads: int = 1

    @cached_property
    def fragments(self) -> Fragments:
        """The parts of the model that rounds carry."""
        return Fragments.of(self.manifests.run_strategy, self.layout)

    def carried(self, round_number: int) -> Fragment:
        """The fragment that a round carries, as its plan says."""
        return self.fragments[self._number(round_number)]

    def _number(self, round_number: int) -> int:
        with self.ledger.reading() as t:
            return t.rounds.fragment(round_number)

    def restore(self, snapshot: SnapshotRecord | None) -> Version:
        """The weights of `snapshot` (None: the initial ones), if they have the recorded digests."""
        state = self._initial() if snapshot is None else self._stored(snapshot)
        number = 0 if snapshot is None else snapshot.version
        with self.ledger.reading() as t:
            ticks = t.contributions.folded(last=number)
        found = Version(number, state, self._measure(state), ticks)
        if snapshot is not None:
            self._check_restored(found)
        return found

    def onward(self, version: Version) -> Iterator[Replayed]:
        """Computes every published round after `version` on it in place, one by one.

        Each is computed under the manifest of its round. When a round is yielded, `version` has
        just become the version that it made.
        """
        with self.ledger.reading() as t:
            rounds = t.rounds.all(first=version.number + 1)
        for record in rounds:
            if record.state is not RoundState.PUBLISHED:
                return
            with self.ledger.reading() as t:
                contributions = t.contributions.of_round(record.round)
            with _naming(f"a contribution of round {record.round}"):
                found = self.apply(version, record.round, contributions)
            self.moved(version, record.round, len(contributions), found.digests)
            carried = self.carried(record.round)
            yield Replayed(record, carried, contributions, found.digests, found.step)

    def follow(self, version: Version, *, last: int | None = None) -> None:
        """Moves `version` on to round `last`, or as far as rounds are published.

        StateDamaged for the first round that gives other bits than the ledger records.
        """
        if version.number == last:
            return
        for replayed in self.onward(version):
            difference, number = replayed.difference(), replayed.record.round
            if difference is not None:
                raise StateDamaged(
                    f"replay of round {number} gives other bits than the ledger records "
                    f"({difference}); the last good round is {number - 1}; restore the state "
                    f"directory from a copy, or export an earlier round"
                )
            if number == last:
                return

    def apply(
        self,
        version: Version,
        round_number: int,
        contributions: Sequence[ContributionRecord],
        sink: PayloadSink | None = None,
        *,
        watched: bool = False,
    ) -> Applied:
        """Computes a round on the buffers of `version` in place from its frozen, ordered set.

        `moved` then makes `version` the new one; `watched` is for its outer step. With several
        threads each makes a part of the weights and hashes it, and `sink` is called by all of them.
        When this raises, all have ended and the buffers are torn between two versions.
        """
        asked = self.manifests.of_round(round_number).round_strategy
        step = asked.outer(round_number, version.ticks)
        fragment = self.carried(round_number)
        version.state.publish_with(step.download, fragment.span)
        state = version.state.of(fragment)

        def make(part: Span) -> list[RunningDigest]:
            running = [RunningDigest(state.layout, b, first=part.start) for b in state.buffers]

            def reached(stop: int) -> None:
                for digest in running:
                    digest.reached(stop)

            step.apply(state, opened, sink, part=part, reached=reached)
            return running

        parts = state.layout.parts(self.threads, step.tile_bytes)
        with self.opened(round_number, contributions) as opened:
            step = step.prepared(state.layout, opened, watched=watched)
            made = _each(make, parts)
        found = [first.joined(others) for first, *others in zip(*made, strict=True)]
        return Applied(Digests(found[0], found[-1]), step)

    def bundle(
        self, round_number: int, contributions: Sequence[ContributionRecord]
    ) -> Bundle | None:
        """What the version of a round travels in, where it travels as its contributions."""
        asked = self.manifests.of_round(round_number).round_strategy
        return asked.bundle(self.carried(round_number).layout, len(contributions))

    def bundled(
        self,
        bundle: Bundle,
        header: FrameHeader,
        contributions: Sequence[ContributionRecord],
        step: OuterStep | None = None,
    ) -> Iterator[bytes]:
        """The frame of a round in its `bundle`, from the first byte on; `step` has computed it.

        Without one, long after, what the frame says of the step is found out anew.
        """
        number, named = header.round, [c.sha256 for c in contributions]
        with self.opened(number, contributions) as opened:
            if step is None:
                with self.ledger.reading() as t:
                    ticks = t.contributions.folded(last=number - 1)
                made = self.manifests.of_round(number).round_strategy.outer(number, ticks)
                step = made.prepared(self.carried(number).layout, opened)
            yield from bundle.pieces(header, step, named, opened)

    def opened(
        self, round_number: int, contributions: Sequence[ContributionRecord]
    ) -> AbstractContextManager[list[BlobSource]]:
        """What a round folds, in order, to be read inside the `with`."""
        asked = self.manifests.of_round(round_number).round_strategy

        def codec_of(made_for: int) -> Codec:
            return self.manifests.of_round(made_for).manifest.upload.build()

        def factor_of(c: ContributionRecord) -> float:
            return asked.factor(staleness=round_number - c.round, tokens=c.tokens)

        return sources.opened(self.blobs, contributions, codec_of=codec_of, factor_of=factor_of)

    def moved(self, version: Version, round_number: int, folded: int, found: Digests) -> None:
        """The buffers hold the round that `apply` computed out of so many contributions.

        From now on `version` is that version.
        """
        carried = self._number(round_number)
        if carried == ALL:
            version.parts = self._measure(version.state)
        else:
            version.parts[carried] = found
        version.number, version.ticks = round_number, version.ticks + folded

    def snapshot_difference(self, version: Version, snapshot: SnapshotRecord) -> str | None:
        """Where a snapshot differs from the weights replayed to its version: buffer and tensor."""
        stored, replayed = (
            {"master": state.master, "published": state.published, **state.slots}
            for state in (self._stored(snapshot), version.state)
        )
        for name in sorted(stored.keys() ^ replayed.keys()):
            return f"slot {name!r} is {'missing' if name in replayed else 'unknown'}"
        for name, buffer in stored.items():
            mine, theirs = (digests.digest(self.layout, b) for b in (buffer, replayed[name]))
            tensor = digests.first_difference(self.layout, mine.leaves, theirs.leaves)
            if tensor is not None:
                return f"{name}, tensor {tensor!r}"
        return None

    def _measure(self, state: OuterState) -> list[Digests]:
        """The digests of each fragment; an aliased published buffer is hashed once."""
        found = []
        for fragment in self.fragments.parts:
            part = state.of(fragment)
            made = [digests.digest(part.layout, b, threads=self.threads) for b in part.buffers]
            found.append(Digests(made[0], made[-1]))
        return found

    def _initial(self) -> OuterState:
        """Version 0, from the blob of initial weights; its digest must be the manifest's."""
        with self.ledger.reading() as t:
            run = t.run.get()
        assert run is not None, "a ledger without a run has no weights"
        manifest, layout = self.manifests.of_round(1).manifest, self.layout
        flat = weights.load(self.blobs, run.initial_sha256, layout)
        found = digests.digest(layout, flat, threads=self.threads).root
        if found != manifest.model.initial_digest:
            raise StateDamaged(
                f"the initial weights have digest {found} where the manifest says "
                f"{manifest.model.initial_digest}; restore blob {run.initial_sha256} from a copy"
            )
        optimizer, download = manifest.outer.build(), manifest.download.build()
        return fresh_state(layout, flat, optimizer=optimizer, download=download)

    def _stored(self, snapshot: SnapshotRecord) -> OuterState:
        """What `snapshot` holds; a blob that is missing or changed names the snapshot."""

        def load(sha256: str) -> Tensor:
            return weights.load(self.blobs, sha256, self.layout)

        with _naming(f"the snapshot of version {snapshot.version}"):
            master = load(snapshot.master_sha256)
            slots = {name: load(sha256) for name, sha256 in snapshot.slots_sha256}
            same = snapshot.published_sha256 == snapshot.master_sha256
            published = master if same else load(snapshot.published_sha256)
        return OuterState(self.layout, master, slots, published)

    def _check_restored(self, version: Version) -> None:
        """StateDamaged unless the weights of a snapshot are those that the ledger records."""

        def record_of(number: int) -> RoundRecord:
            with self.ledger.reading() as t:
                for record in t.rounds.all(first=number, last=number):
                    return record
            raise StateDamaged(
                f"version {version.number} was saved and the ledger has no round {number}; "
                f"restore the state directory from a copy"
            )

        rounds = range(version.number, 0, -1)
        for number, recorded in self.recorded(rounds, record_of).items():
            layout = self.fragments[number].layout
            differing = version.parts[number].difference(recorded, layout)
            if differing is not None:
                raise StateDamaged(
                    f"the snapshot of version {version.number} holds other weights than the ledger "
                    f"records ({differing}); restore the state directory from a copy"
                )

    def recorded(
        self, rounds: Iterable[int], record_of: Callable[[int], RoundRecord | None]
    ) -> dict[int, Digests]:
        """What the records of `rounds`, newest first, say that each fragment is, by its number.

        That is in the record of the newest round that moved it: its own, or one of the whole model.
        A fragment that no round has moved is left out.
        """
        found: dict[int, Digests] = {}
        for number in rounds:
            record = record_of(number)
            if record is not None:
                said, carried = Digests.of(record), record.fragment
                # Whatever a newer round said stays.
                found = (said.cut(self.fragments) if carried == ALL else {carried: said}) | found
            if len(found) == len(self.fragments.parts):
                break
        return found


@contextmanager
def _naming(subject: str) -> Iterator[None]:
    """Says in whose service a blob was read when it is missing or changed."""
    try:
        yield
    except (BlobMissing, BlobChanged) as error:
        raise type(error)(f"{subject} cannot be read: {error}") from error


def _each(make: Callable[[Span], T], spans: list[Span]) -> list[T]:
    """What `make` gives for every span, in a thread each; raises once all have ended."""
    if len(spans) == 1:
        return [make(spans[0])]
    with ThreadPoolExecutor(len(spans) - 1, thread_name_prefix="outer-step") as pool:
        others = [pool.submit(make, part) for part in spans[1:]]
        mine = make(spans[0])
    return [mine, *(other.result() for other in others)]
