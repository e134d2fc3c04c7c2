"""Runs the steps of a gather on this machine: which ranks, buckets, archive and state they use."""

import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from atoll.blobs import buckets
from atoll.blobs.access import S3Access
from atoll.blobs.bucket import Bucket
from atoll.clock import Clock
from atoll.collectives.base import Collectives
from atoll.collectives.local import LocalGroup
from atoll.collectives.runners import Inline
from atoll.collectives.torch_dist import TorchRanks, gloo_group
from atoll.errors import ConfigError, GroupBroken
from atoll.gather import catch_up as catching_up
from atoll.gather import leaves, retention
from atoll.gather.archive import Archive
from atoll.gather.catch_up import CatchUp
from atoll.gather.emit import EMITTER
from atoll.gather.keys import SecretKey
from atoll.gather.numbers import Numbers
from atoll.gather.replica import Replica
from atoll.gather.turns import Turns
from atoll.gather.vote import on_all
from atoll.gather.window import Window
from atoll.launch import placement
from atoll.launch.gather_file import GatherFile
from atoll.launch.gather_state import GatherState, damaged
from atoll.layout import Span

log = logging.getLogger(__name__)

# Beyond a window's `seconds`: how long the archive's server may be away, and how long a rank waits
# for another, which may be the one that asks it again and again.
ARCHIVE_SECONDS, RANK_SECONDS = 30.0, 60.0
_GROUP = 2  # of this module's own collectives; a window's have another


def spawn(ranks: int, arguments: Sequence[str]) -> int:
    """Runs `atoll` with these arguments as so many ranks of this machine; the exit code.

    That of the rank that failed first: it has told why. GroupBroken where a signal ended it.
    """
    if ranks < 1:
        raise ConfigError(f"--ranks {ranks} can gather nothing; there must be at least one")
    told = ("--standalone", f"--nproc-per-node={ranks}", "-m", "atoll", *arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's choice too, which it warns of
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
                seconds=file.table.seconds + ARCHIVE_SECONDS,
            ),
        )


def window(
    file: GatherFile,
    ranks: Collectives,
    *,
    clock: Clock,
    s3: S3Access | None,
    told: Callable[[Numbers], None] = lambda _: None,
) -> dict[str, Any]:
    """Gathers the next window on all ranks and saves the weights; the same on each of them.

    Rank 0 gives `told` the window's numbers.
    """
    turns = Turns(_GROUP, 0)
    terms = file.terms()
    owners = terms.owners(ranks.size)
    on_all(ranks, turns, lambda: _check_buckets(file))
    key = on_all(ranks, turns, lambda: _signing_key(file, ranks.rank))
    with (
        _loaded(file, ranks, turns, owners) as (state, replica),
        opened(file, clock=clock, s3=s3) as (found, archive),
    ):
        number = replica.window
        gathering = Window(
            ranks=ranks,
            buckets=found,
            clock=clock,
            directory=file.state / f"rank-{ranks.rank}",
            terms=terms,
            replica=replica,
            archive=archive,
            key=key,
            told=told,
        )
        merged = gathering.run(number)
        _save(state, ranks, turns, owners, replica)
        every, keep = file.table.snapshot_every, file.table.keep_artifacts
        if every and replica.window % every == 0:
            path = state.weights(replica.window)
            _first(ranks, turns, lambda: archive.put_weights(replica.digest, path))
        if keep:
            _first(ranks, turns, lambda: _remove_old(archive, keep))
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


def catch_up(
    file: GatherFile,
    ranks: Collectives,
    *,
    stop: int | None,
    clock: Clock,
    s3: S3Access | None,
) -> dict[str, Any]:
    """Brings this machine's weights behind the newest artifact, or to window `stop`, on all ranks.

    They are saved after each window, so one that is killed goes on from there.
    """
    turns = Turns(_GROUP, 0)
    terms, own = file.terms(), catching_up.owners(file.layout, ranks.size)
    on_all(ranks, turns, lambda: _check_buckets(file))
    with (
        _loaded(file, ranks, turns, own) as (state, replica),
        opened(file, clock=clock, s3=s3) as (_, archive),
    ):
        by = CatchUp(
            ranks=ranks,
            archive=archive,
            optimizer=terms.optimizer,
            trust=terms.trust,
            memory_bytes=terms.memory_bytes,
            directory=file.state / "catch-up",
        )
        found = by.run(
            replica, stop=stop, applied=lambda moved: _save(state, ranks, turns, own, moved)
        )
    return {**asdict(found), "ranks": ranks.size}


@contextmanager
def _loaded(
    file: GatherFile, ranks: Collectives, turns: Turns, owners: Sequence[Span]
) -> Iterator[tuple[GatherState, Replica]]:
    """The state, made where there is none, and each rank's part of its weights, which are whole.

    One rank holds the state for all of them, until the block ends.
    """
    state = GatherState(file.state, file.layout, file.manifest_sha256)
    with ExitStack() as stack:

        def begin() -> None:
            state.begin(file.start)
            stack.callback(state.hold().close)

        _first(ranks, turns, begin)
        replica = on_all(ranks, turns, lambda: state.replica(owners[ranks.rank]))
        root = leaves.params_digest(
            ranks, turns, file.layout, owners=owners, own=replica.master
        ).root
        if root != replica.digest:
            raise damaged(state.weights(replica.window), replica.digest)
        yield state, replica


def _save(
    state: GatherState, ranks: Collectives, turns: Turns, owners: Sequence[Span], replica: Replica
) -> None:
    """Puts all ranks' weights into the state, durably."""
    own = owners[ranks.rank]
    _first(ranks, turns, lambda: state.reserve(replica.window))
    on_all(ranks, turns, lambda: state.write(replica.window, own, replica.master))
    _first(ranks, turns, lambda: state.finish(replica))


def _remove_old(archive: Archive, keep: int) -> None:
    if gone := retention.remove_old(archive, keep):
        log.info("old artifacts removed", extra={"windows": list(gone)})


def _check_buckets(file: GatherFile) -> None:
    """ConfigError for a directory that is not there; the first peer to publish makes it."""
    for name in file.table.buckets:
        buckets.check_there(name, file.location(name))


def _signing_key(file: GatherFile, rank: int) -> SecretKey | None:
    """The key of the rank that records windows."""
    secret = file.table.archive.secret
    return SecretKey.load(file.base / secret) if secret and rank == EMITTER else None


def _first(ranks: Collectives, turns: Turns, work: Callable[[], None]) -> None:
    """`work` on one rank; what it raises reaches all."""
    on_all(ranks, turns, work if ranks.rank == EMITTER else lambda: None)
