"""Weights as a function of (initial weights, ledger): restore a version, replay what follows.

The coordinator computes every round with this, live and after a restart, and audit proves with it:
there is one way from contributions to weights. Reads ledger and blobs; writes neither.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import TypeVar

from atoll.blobs.base import Blobs
from atoll.errors import BlobChanged, BlobMissing, StateDamaged
from atoll.layout import Fragment, Layout, Span
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import ContributionRecord, RoundRecord, RoundState, SnapshotRecord
from atoll.strategies.base import ALL, Fragments
from atoll.strategies.outer import OuterState, PayloadSink, fresh_state
from atoll.sums import digest as digests
from atoll.sums.digest import ParamsDigest, RunningDigest
from atoll.versions import sources, weights
from atoll.versions.manifests import Manifests

T = TypeVar("T")


@dataclass(frozen=True)
class Digests:
    """Digests of the master and the published weights: of one fragment, or of the whole model."""

    master: ParamsDigest
    published: ParamsDigest


@dataclass
class Version:
    """A run's weights at one version. Buffers and digests change in place, round by round."""

    number: int
    state: OuterState
    parts: list[Digests]  # of each fragment, in order
    ticks: int  # contributions folded so far

    @property
    def digests(self) -> Digests:
        """Of the whole model, out of those of its fragments."""
        master = digests.composed(part.master for part in self.parts)
        if self.state.published is self.state.master:
            return Digests(master, master)
        return Digests(master, digests.composed(part.published for part in self.parts))


@dataclass(frozen=True)
class Replayed:
    """One round that was computed again."""

    record: RoundRecord
    fragment: Fragment
    contributions: list[ContributionRecord]
    digests: Digests  # of its fragment

    def difference(self) -> str | None:
        """Where it differs from its record: which weights, which tensor; None when it does not."""
        return _difference(self.fragment.layout, self.record, self.digests)


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
        """The fragment that a round carries."""
        return self.fragments[self.manifests.run_strategy.fragment(round_number)]

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

        Each under the manifest of its round. Of the round given, `version` is that version.
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
            self.moved(version, record.round, contributions, found)
            yield Replayed(record, self.carried(record.round), contributions, found)

    def apply(
        self,
        version: Version,
        round_number: int,
        contributions: Sequence[ContributionRecord],
        sink: PayloadSink | None = None,
    ) -> Digests:
        """Computes a round on the buffers of `version` in place from its frozen, ordered set.

        Gives the digests of the round's fragment; `moved` then makes `version` the new one. With
        several threads each makes a part of the weights and hashes it, and `sink` is called by all
        of them. When this raises, all have ended and the buffers are torn between two versions.
        """
        recorded = self.manifests.of_round(round_number)
        step = recorded.round_strategy.outer(round_number, version.ticks)
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
        upload = recorded.manifest.upload.build()
        with sources.opened(self.blobs, contributions, upload) as opened:
            made = _each(make, parts)
        found = [first.joined(others) for first, *others in zip(*made, strict=True)]
        return Digests(found[0], found[-1])

    def moved(
        self,
        version: Version,
        round_number: int,
        contributions: Sequence[ContributionRecord],
        found: Digests,
    ) -> None:
        """The buffers hold the round that `apply` computed: `version` is that version now."""
        carried = self.manifests.run_strategy.fragment(round_number)
        if carried == ALL:
            version.parts = self._measure(version.state)
        else:
            version.parts[carried] = found
        version.number, version.ticks = round_number, version.ticks + len(contributions)

    def snapshot_difference(self, version: Version, snapshot: SnapshotRecord) -> str | None:
        """Where a snapshot differs from the weights replayed to its version: buffer and tensor."""
        stored, state = self._stored(snapshot), version.state
        pairs = {
            "master": (stored.master, state.master),
            "published": (stored.published, state.published),
        }
        for name in sorted({*stored.slots, *state.slots}):
            if name not in stored.slots or name not in state.slots:
                return f"slot {name!r} is {'missing' if name in state.slots else 'unknown'}"
            pairs[name] = (stored.slots[name], state.slots[name])
        for name, (mine, theirs) in pairs.items():
            tensor = digests.first_difference(
                state.layout,
                digests.digest(state.layout, mine).leaves,
                digests.digest(state.layout, theirs).leaves,
            )
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
        return fresh_state(
            layout,
            flat,
            optimizer=manifest.outer.build(),
            download=manifest.download.build(),
        )

    def _stored(self, snapshot: SnapshotRecord) -> OuterState:
        """What `snapshot` holds; a blob that is missing or changed names the snapshot."""
        layout = self.layout
        with _naming(f"the snapshot of version {snapshot.version}"):
            master = weights.load(self.blobs, snapshot.master_sha256, layout)
            slots = {
                name: weights.load(self.blobs, sha256, layout)
                for name, sha256 in snapshot.slots_sha256
            }
            same = snapshot.published_sha256 == snapshot.master_sha256
            published = (
                master if same else weights.load(self.blobs, snapshot.published_sha256, layout)
            )
        return OuterState(layout, master, slots, published)

    def _check_restored(self, version: Version) -> None:
        for number, record in self._newest_rounds(version.number):
            differing = _difference(
                self.fragments[number].layout, self._part(record, number), version.parts[number]
            )
            if differing is not None:
                raise StateDamaged(
                    f"the snapshot of version {version.number} holds other weights than the ledger "
                    f"records ({differing}); restore the state directory from a copy"
                )

    def _part(self, record: RoundRecord, number: int) -> RoundRecord:
        """The record as if its round had carried that fragment alone."""
        if self.manifests.run_strategy.fragment(record.round) != ALL:
            return record
        layouts = [part.layout for part in self.fragments.parts]
        leaves = record.leaves or b""
        master = digests.cut(ParamsDigest("", leaves), layouts)[number]
        published = digests.cut(ParamsDigest("", record.published_leaves or leaves), layouts)[
            number
        ]
        return replace(
            record,
            master_digest=master.root,
            published_digest=published.root,
            leaves=master.leaves,
            published_leaves=published.leaves,
        )

    def _newest_rounds(self, version: int) -> Iterator[tuple[int, RoundRecord]]:
        """Each fragment's number, and the record that says what it is at `version`.

        That is its newest round's. One of the whole model speaks for the fragments that no later
        round has moved.
        """
        strategy = self.manifests.run_strategy
        missing = set(range(len(self.fragments.parts)))
        number = version
        while missing and number:
            carried = strategy.fragment(number)
            if carried == ALL or carried in missing:
                with self.ledger.reading() as t:
                    records = t.rounds.all(first=number, last=number)
                if not records:
                    raise StateDamaged(
                        f"version {version} was saved and the ledger has no round {number}; "
                        f"restore the state directory from a copy"
                    )
                spoken_for = sorted(missing) if carried == ALL else [carried]
                yield from ((fragment, records[0]) for fragment in spoken_for)
                missing -= set(spoken_for)
            number -= 1


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


def _difference(layout: Layout, record: RoundRecord, found: Digests) -> str | None:
    pairs = (
        ("master", record.master_digest, record.leaves, found.master),
        (
            "published",
            record.published_digest,
            record.published_leaves or record.leaves,
            found.published,
        ),
    )
    for which, expected, leaves, mine in pairs:
        if expected != mine.root:
            tensor = digests.first_difference(layout, mine.leaves, leaves or b"")
            return f"{which} weights, tensor {tensor!r}"
    return None
