"""Weights as a function of (initial weights, ledger): restore a version, replay what follows.

The coordinator starts with this and audit proves with it. Reads ledger and blobs; writes neither.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from atoll.blobs.base import Blobs
from atoll.errors import BlobChanged, BlobMissing, StateDamaged
from atoll.layout import Layout, Span
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import ContributionRecord, RoundRecord, RoundState, SnapshotRecord
from atoll.protocol.manifest import Manifest
from atoll.strategies import build
from atoll.strategies.diloco import OuterState, PayloadSink, fresh_state
from atoll.sums import digest as digests
from atoll.sums.digest import ParamsDigest, RunningDigest
from atoll.versions import sources, weights
from atoll.versions.manifests import Manifests

T = TypeVar("T")


@dataclass(frozen=True)
class Digests:
    """Digests of the master and the published weights at one version."""

    master: ParamsDigest
    published: ParamsDigest


@dataclass(frozen=True)
class Replayed:
    """One round that was computed again."""

    record: RoundRecord
    contributions: list[ContributionRecord]
    digests: Digests


def measure(state: OuterState, *, threads: int = 1) -> Digests:
    """The digests of `state`; an aliased published buffer is hashed once."""
    found = [digests.digest(state.layout, b, threads=threads) for b in state.buffers]
    return Digests(found[0], found[-1])


def initial_state(ledger: Ledger, blobs: Blobs, manifest: Manifest, layout: Layout) -> OuterState:
    """Version 0, from the blob of initial weights; its digest must be the manifest's."""
    with ledger.reading() as t:
        run = t.run.get()
    assert run is not None, "a ledger without a run has no weights"
    flat = weights.load(blobs, run.initial_sha256, layout)
    found = digests.digest(layout, flat).root
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


def snapshot_state(
    blobs: Blobs, snapshot: SnapshotRecord, manifest: Manifest, layout: Layout
) -> OuterState:
    """The state that `snapshot` holds; a blob that is missing or changed names the snapshot."""
    with _naming(f"the snapshot of version {snapshot.version}"):
        master = weights.load(blobs, snapshot.master_sha256, layout)
        slots = {name: weights.load(blobs, sha, layout) for name, sha in snapshot.slots_sha256}
        lossless = manifest.download.build().lossless
        published = master if lossless else weights.load(blobs, snapshot.published_sha256, layout)
    return OuterState(layout, master, slots, published)


def restore(
    ledger: Ledger,
    blobs: Blobs,
    snapshot: SnapshotRecord | None,
    *,
    manifests: Manifests,
    layout: Layout,
    threads: int = 1,
) -> tuple[OuterState, Digests]:
    """The state of `snapshot` (None: the initial weights) once it has the recorded digests."""
    if snapshot is None:
        state = initial_state(ledger, blobs, manifests.of_round(1).manifest, layout)
        return state, measure(state, threads=threads)
    manifest = manifests.of_round(snapshot.version).manifest
    state = snapshot_state(blobs, snapshot, manifest, layout)
    found = measure(state, threads=threads)
    with ledger.reading() as t:
        records = t.rounds.all(first=snapshot.version, last=snapshot.version)
    differing = difference(layout, Replayed(records[0], [], found)) if records else "no such round"
    if differing is not None:
        raise StateDamaged(
            f"the snapshot of version {snapshot.version} holds other weights than the ledger "
            f"records ({differing}); restore the state directory from a copy"
        )
    return state, found


def snapshot_difference(
    state: OuterState, blobs: Blobs, snapshot: SnapshotRecord, manifest: Manifest
) -> str | None:
    """Where a snapshot differs from the `state` replayed to its version: buffer and tensor."""
    stored = snapshot_state(blobs, snapshot, manifest, state.layout)
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


@contextmanager
def _naming(subject: str) -> Iterator[None]:
    """Says in whose service a blob was read when it is missing or changed."""
    try:
        yield
    except (BlobMissing, BlobChanged) as error:
        raise type(error)(f"{subject} cannot be read: {error}") from error


def apply_round(
    state: OuterState,
    blobs: Blobs,
    *,
    manifest: Manifest,
    round_number: int,
    contributions: list[ContributionRecord],
    sink: PayloadSink | None = None,
    threads: int = 1,
) -> Digests:
    """Computes `round_number` on `state` in place from its frozen, ordered contributions.

    With several `threads` each makes a part of the weights and hashes it, and `sink` is called by
    all of them. When this raises, all have ended.
    """
    step = build.outer_step(manifest, round_number)
    state.publish_with(step.download)

    def make(part: Span) -> list[RunningDigest]:
        running = [RunningDigest(state.layout, b, first=part.start) for b in state.buffers]

        def reached(stop: int) -> None:
            for digest in running:
                digest.reached(stop)

        step.apply(state, opened, sink, part=part, reached=reached)
        return running

    parts = state.layout.parts(threads, step.tile_bytes)
    with sources.opened(blobs, contributions, manifest.upload.build()) as opened:
        made = _each(make, parts)
    found = [first.joined(others) for first, *others in zip(*made, strict=True)]
    return Digests(found[0], found[-1])


def _each(make: Callable[[Span], T], parts: list[Span]) -> list[T]:
    """What `make` gives for every part, in a thread each; raises once all have ended."""
    if len(parts) == 1:
        return [make(parts[0])]
    with ThreadPoolExecutor(len(parts) - 1, thread_name_prefix="outer-step") as pool:
        others = [pool.submit(make, part) for part in parts[1:]]
        mine = make(parts[0])
    return [mine, *(other.result() for other in others)]


def replay(
    state: OuterState,
    ledger: Ledger,
    blobs: Blobs,
    *,
    manifests: Manifests,
    after_version: int,
    threads: int = 1,
) -> Iterator[Replayed]:
    """Computes every published round after `after_version` on `state` in place, one by one.

    Each under the manifest of its round.
    """
    with ledger.reading() as t:
        rounds = t.rounds.all(first=after_version + 1)
    for record in rounds:
        if record.state is not RoundState.PUBLISHED:
            return
        with ledger.reading() as t:
            contributions = t.contributions.of_round(record.round)
        with _naming(f"a contribution of round {record.round}"):
            found = apply_round(
                state,
                blobs,
                manifest=manifests.of_round(record.round).manifest,
                round_number=record.round,
                contributions=contributions,
                threads=threads,
            )
        yield Replayed(record, contributions, found)


def difference(layout: Layout, replayed: Replayed) -> str | None:
    """Where a replayed round differs from its record: which weights, which tensor; or None."""
    record, found = replayed.record, replayed.digests
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
