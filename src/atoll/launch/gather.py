"""Runs the steps of a gather on this machine: which ranks, buckets, archive and state they use."""

import logging
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from atoll import files
from atoll.blobs import buckets
from atoll.blobs.access import S3Access
from atoll.blobs.bucket import Bucket
from atoll.clock import Clock
from atoll.codecs.topk.codec import TopK
from atoll.collectives.base import Collectives
from atoll.collectives.local import LocalGroup
from atoll.collectives.runners import Inline
from atoll.collectives.torch_dist import TorchRanks, gloo_group
from atoll.errors import ConfigError, GroupBroken
from atoll.gather import leaves
from atoll.gather import publish as publishing
from atoll.gather.archive import Archive
from atoll.gather.catch_up import CatchUp
from atoll.gather.emit import EMITTER, sha256_of
from atoll.gather.keys import SecretKey
from atoll.gather.statement import Statement
from atoll.gather.turns import Turns
from atoll.gather.vote import vote
from atoll.gather.window import Window
from atoll.launch import placement
from atoll.launch.gather_file import GatherFile
from atoll.launch.gather_state import GatherState, damaged
from atoll.layout import byte_view
from atoll.versions import weights_file
from atoll.wire.frame import FrameWriter
from atoll.wire.header import Told

T = TypeVar("T")
_GROUP = 2  # of this module's own collectives; a window's have another


def spawn(ranks: int, arguments: Sequence[str]) -> int:
    """Runs `atoll` with these arguments as so many ranks of this machine; the exit code.

    That of the rank that failed first: it has told why. GroupBroken where a signal ended it.
    """
    if ranks < 1:
        raise ConfigError(f"--ranks {ranks} can gather nothing; there must be at least one")
    told = ("--standalone", f"--nproc-per-node={ranks}", "-m", "atoll", *arguments)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # told below
    try:
        launcher: Any = torchrun  # it has no types
        launcher.run(launcher.parse_args(told))
    except ChildFailedError as exc:
        rank, failure = exc.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        name = signal.Signals(-failure.exitcode).name
        raise GroupBroken(
            f"rank {rank} was ended by {name}; start the gather again and it goes on"
        ) from exc
    except SignalException as exc:
        return 128 + exc.sigval
    return 0


@contextmanager
def ranks_of(seconds: float, clock: Clock) -> Iterator[Collectives]:
    """torchrun's ranks over gloo, or this process by itself."""
    if placement.local_rank() is None:
        group = LocalGroup(1, clock=clock)
        yield group.rank(0, Inline(), way="direct", timeout_seconds=seconds)
        return
    group_of_all = placement.form_group(deadline_seconds=seconds)
    try:
        made = TorchRanks(gloo_group(timeout_seconds=seconds), timeout_seconds=seconds)
        try:
            yield made
        finally:
            made.close()
    finally:
        if dist.is_initialized():
            group_of_all.close()


@contextmanager
def opened(
    file: GatherFile, *, clock: Clock, s3: S3Access | None
) -> Iterator[tuple[Mapping[str, Bucket], Archive]]:
    """The run's buckets by name, and its archive."""
    with ExitStack() as stack:
        found = {
            name: stack.enter_context(buckets.opened(file.location(name), clock=clock, s3=s3))
            for name in file.table.buckets
        }
        told = file.table.archive
        file.location(told.bucket)  # refuses a bucket that the run does not have
        yield (
            found,
            Archive(
                bucket=found[told.bucket],
                prefix=told.prefix,
                key=file.archive_key,
                layout=file.layout,
                clock=clock,
                run_id=file.table.run_id,
                manifest_sha256=file.manifest_sha256,
                seconds=max(60.0, file.table.seconds),
            ),
        )


def window(
    file: GatherFile, ranks: Collectives, *, clock: Clock, s3: S3Access | None
) -> dict[str, Any]:
    """Gathers the next window on all ranks and saves the weights; the same on each of them."""
    state = GatherState(file.state, file.layout, file.manifest_sha256)
    turns = Turns(_GROUP, 0)
    with ExitStack() as stack:
        _first(ranks, turns, lambda: _begin(file, state, stack))
        return _window(file, ranks, turns, state, clock=clock, s3=s3)


def _begin(file: GatherFile, state: GatherState, stack: ExitStack) -> None:
    """One rank holds the state for all of them."""
    stack.callback(state.hold().close)
    state.begin(file.start)


def _window(
    file: GatherFile,
    ranks: Collectives,
    turns: Turns,
    state: GatherState,
    *,
    clock: Clock,
    s3: S3Access | None,
) -> dict[str, Any]:
    terms = file.terms()
    owners = terms.owners(ranks.size)
    own = owners[ranks.rank]
    key, replica = _all(ranks, turns, lambda: (_signing_key(file, ranks.rank), state.replica(own)))
    root = leaves.params_digest(ranks, turns, file.layout, owners=owners, own=replica.master).root
    if root != replica.digest:
        raise damaged(state.weights(replica.window), replica.digest)
    number = replica.window
    with opened(file, clock=clock, s3=s3) as (found, archive):
        gathering = Window(
            ranks=ranks,
            buckets=found,
            clock=clock,
            directory=file.state / f"rank-{ranks.rank}",
            terms=terms,
            replica=replica,
            archive=archive,
            key=key,
        )
        merged = gathering.run(number)
        _first(ranks, turns, lambda: state.reserve(replica.window))
        _all(ranks, turns, lambda: state.write(replica.window, own, replica.master))
        _first(ranks, turns, lambda: state.finish(replica))
        every = file.table.snapshot_every
        if every and replica.window % every == 0:
            path = state.weights(replica.window)
            _first(ranks, turns, lambda: archive.put_weights(replica.digest, path))
    return {
        "window": number,
        "uids": list(merged.uids),
        "skipped": {one.uid: [str(one.reason), one.sentence] for one in merged.skipped},
        "success_rate": merged.success_rate,
        "download_bytes": merged.download_bytes,
        "seconds": merged.time,
        "digest": replica.digest,
        "artifact": replica.prev,
        "ranks": ranks.size,
    }


def publish(
    file: GatherFile,
    uid: str,
    displacement: Path,
    *,
    secret: Path,
    sample_digest: str,
    clock: Clock,
    s3: S3Access | None,
) -> dict[str, Any]:
    """Publishes a peer's displacement for the window that its own state waits for."""
    peer = next((one for one in file.peers().all if one.uid == uid), None)
    if peer is None:
        raise ConfigError(f"uid {uid!r} is no peer of the run; list it in the gather file")
    key = SecretKey.load(secret)
    if key.public != peer.key:
        raise ConfigError(
            f"{str(secret)!r} is the key {key.public.hex}, the run lists {peer.key.hex} for "
            f"{uid!r}; sign with that one"
        )
    state = GatherState(file.state, file.layout, file.manifest_sha256)
    state.begin(file.start)
    base = state.whole()
    header = Told(
        kind="contribution",
        run_id=file.table.run_id,
        manifest_sha256=file.manifest_sha256,
        round=base.window,
        worker_id=uid,
        incarnation=1,
        base_digest=base.digest,
        weight=1,
    ).header(file.layout, TopK())
    flat = weights_file.read(displacement, file.layout)
    with _scratch(file.state / f"{uid}.frame") as frame:
        with files.naming("write", frame), frame.open("wb") as out:
            writer = FrameWriter(header, lambda piece: out.write(piece) and None)
            writer.payload(byte_view(TopK().encode(flat, noise=None, first_group=0)))
            writer.finish()
        stated = Statement(
            run_id=file.table.run_id,
            manifest_sha256=file.manifest_sha256,
            uid=uid,
            window=base.window,
            base_digest=base.digest,
            sample_digest=sample_digest,
            nbytes=frame.stat().st_size,
            sha256=sha256_of(frame),
        )
        deadline = clock.now() + file.table.seconds
        with buckets.opened(file.location(peer.bucket), clock=clock, s3=s3) as bucket:
            done = publishing.publish(
                bucket, peer.prefix, frame, stated, key, keep=file.table.keep, deadline=deadline
            )
    return {**stated.plain(), "removed": list(done.removed)}


def catch_up(
    file: GatherFile, *, stop: int | None, clock: Clock, s3: S3Access | None
) -> dict[str, Any]:
    """Brings this machine's weights behind the newest artifact, or to window `stop`."""
    state = GatherState(file.state, file.layout, file.manifest_sha256)
    with closing(state.hold()):
        state.begin(file.start)
        replica = state.whole()
        with opened(file, clock=clock, s3=s3) as (_, archive):
            terms = file.terms()
            by = CatchUp(
                ranks=LocalGroup(1, clock=clock).rank(0, Inline(), way="direct"),
                archive=archive,
                optimizer=terms.optimizer,
                memory_bytes=terms.memory_bytes,
                directory=file.state / "catch-up",
            )
            found = by.run(replica, stop=stop)
        if found.stop != found.first:
            whole = terms.owners(1)[0]
            state.reserve(replica.window)
            state.write(replica.window, whole, replica.master)
            state.finish(replica)
    return asdict(found)


@contextmanager
def _scratch(path: Path) -> Iterator[Path]:
    """A file of this peer's own, gone afterwards: other peers may publish from the same state."""
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _signing_key(file: GatherFile, rank: int) -> SecretKey | None:
    """The key of the rank that records windows."""
    secret = file.table.archive.secret
    return SecretKey.load(file.base / secret) if secret and rank == EMITTER else None


def _first(ranks: Collectives, turns: Turns, work: Callable[[], None]) -> None:
    """`work` on one rank; what it raises reaches all."""
    _all(ranks, turns, work if ranks.rank == EMITTER else lambda: None)


def _all(ranks: Collectives, turns: Turns, work: Callable[[], T]) -> T:
    """`work` on every rank; what it raises on one reaches all."""
    trouble: Exception | None = None
    try:
        done = work()
    except Exception as exc:  # whatever it is, the others must hear of it
        trouble = exc
    vote(ranks, turns.next("control"), trouble)
    return done
