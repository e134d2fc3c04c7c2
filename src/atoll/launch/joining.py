"""An island of this process: a URL and a token in, a `Run` out, with its heartbeats beating."""

import random
import secrets
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from atoll import ids
from atoll.blobs.access import S3Access
from atoll.clock import Clock, SystemClock
from atoll.errors import ConfigError, StateHeld
from atoll.island.conversation.session import look
from atoll.island.driver import Driver
from atoll.island.link.base import Link
from atoll.island.link.led import LedLink
from atoll.island.link.network import NetworkLink
from atoll.island.presence import presence
from atoll.island.pulse import pulse
from atoll.island.ranks.group import SOLO, Group
from atoll.island.ranks.torch_group import TorchGroup
from atoll.island.run import Run
from atoll.island.sharded.grpc_host import GrpcHost
from atoll.island.sharded.host import Host
from atoll.island.sharded.run import ShardedRun
from atoll.island.sharded.torch_host import TorchHost
from atoll.island.state.store import IslandIdentity, IslandStore
from atoll.launch import memory, placement, run_buckets
from atoll.protocol.manifest import Manifest, ShardedSettings
from atoll.strategies import registry

MAX_SLOTS = 256
NO_KEY = "0" * 64
DEFAULT_HOME = Path("~/.local/state/atoll")


def join(
    url: str,
    *,
    token: str,
    fingerprint: str | None = None,
    insecure: bool = False,
    worker_id: str | None = None,
    state: str | Path | None = None,
    home: Path = DEFAULT_HOME,
    group_timeout: float | None = None,
    listen: str | None = None,
    advertise: str | None = None,
    bucket: str | None = None,
    s3: S3Access | None = None,
) -> Run | ShardedRun:
    """Takes part in the run at `url`; nothing that must match can be set here.

    Over `http://` the token travels in plain text: to another machine only with `insecure`.

    `state` is where this island keeps its checkpoint; without it a directory below `home` is
    chosen, the same one again after a restart. `run.close()`, or the end of `run.batches`, leaves.

    Under torchrun all ranks call this and are one island: rank 0 alone talks to the coordinator. A
    rank that is silent for `group_timeout` seconds is given up, with GroupBroken on the others.

    In a sharded run the others dial this process: it listens at `listen` (HOST:PORT, any free port
    by default) and tells them `advertise` (HOST[:PORT]), where that is another address. There
    torchrun is for `transport = "torch_dist"`: each of its processes is a rank, which talks to the
    coordinator itself and has a state directory below the island's.

    In a gather run the island publishes into `bucket`, a name of the run's, by default the only
    one; `s3` are the credentials for those that lie on an S3 server.
    """
    if worker_id is not None:
        ids.worker_id(worker_id)
    memory.keep_freed_tiles()
    clock = SystemClock()
    jitter = random.Random(secrets.randbits(64))

    def dial() -> NetworkLink:
        return NetworkLink(url, token=token, fingerprint=fingerprint, insecure=insecure)

    with ExitStack() as held:
        group = placement.form_group(deadline_seconds=group_timeout)
        held.callback(group.close)
        link: Link = group.together(lambda: _open_link(group, dial))
        held.callback(link.close)
        info = Driver(link, clock, group).run(look(jitter))
        is_rank = registry.any_of(info.manifest()).by_step
        check_place(info.manifest(), group, is_rank=is_rank, listen=listen, advertise=advertise)
        run_buckets.check(info.manifest(), bucket)
        base = home.expanduser() / info.run_id
        store, identity = _hold_state(group, state, base=base, worker_id=worker_id)
        held.callback(store.close)
        run: Run | ShardedRun
        if is_rank:
            launch = _launch(info.manifest(), group)
            if launch is not None:
                store, identity = _hold_rank(group, store, identity.worker_id)
                if group.is_leader:  # what it holds besides the island's
                    held.callback(store.close)
                link = group.together(dial)
                held.callback(link.close)
            assert isinstance(link, NetworkLink), "a rank speaks for itself"
            # Before it registers: the coordinator dials it, and the others may at once.
            host = _open_host(
                *(launch, info.manifest().sharded, clock),
                listen=listen,
                advertise=advertise,
                secure=link.is_secure,
            )
            held.callback(host.close)
            run = ShardedRun(
                link, store.directory, clock, identity=identity, jitter=jitter, host=host
            )
        else:
            opened = run_buckets.of_island(
                info.manifest().gather, store.directory, link.traffic, clock, s3, bucket=bucket
            )
            run = Run(
                *(link, store, clock),
                identity=identity,
                jitter=jitter,
                group=group,
                buckets=group.together(
                    lambda: held.enter_context(opened) if group.is_leader else None
                ),
            )
        if run.group.is_leader:
            for beside in (pulse(run), presence(run)):
                beside.start()
                held.callback(beside.stop)
        run.hold(held.pop_all())
    return run


def check_place(
    manifest: Manifest, group: Group, *, is_rank: bool, listen: str | None, advertise: str | None
) -> None:
    """ConfigError for options, or a torchrun group, that do not go with the run's strategy."""
    for name, given in (("listen", listen), ("advertise", advertise)):
        if given is not None and not is_rank:
            raise ConfigError(
                f"--{name} {given!r} in a run whose islands only dial out; only ranks of a "
                f"sharded run listen, so leave it out"
            )
    transport = manifest.sharded.transport
    if is_rank and transport == "grpc" and group.size > 1:
        raise ConfigError(
            f"torchrun with {group.size} processes in a run with sharded.transport='grpc': there "
            f"a rank is one process of its own; start `atoll join` once for each, without torchrun"
        )
    if is_rank and transport == "torch_dist" and group is SOLO:
        raise ConfigError(
            "a process by itself in a run with sharded.transport='torch_dist': there all processes "
            "of one torchrun launch are the group; start `torchrun --nproc-per-node N -m atoll "
            "join URL`, or the run with sharded.transport = 'grpc'"
        )


def _launch(manifest: Manifest, group: Group) -> TorchGroup | None:
    """The processes that torchrun started with this one, where each of them is a rank."""
    if manifest.sharded.transport == "torch_dist" and isinstance(group, TorchGroup):
        return group
    return None


def _open_host(
    launch: TorchGroup | None,
    settings: ShardedSettings,
    clock: Clock,
    *,
    listen: str | None,
    advertise: str | None,
    secure: bool,
) -> Host:
    """Where other ranks reach this one; collective in a torchrun launch."""

    def beside(number: int = 0) -> GrpcHost:
        return GrpcHost(
            listen=listen, advertise=advertise, secure=secure, clock=clock, number=number
        )

    if launch is None:
        return beside()
    host = launch.together(lambda: beside(placement.local_rank() or 0))
    launch_id = str(launch.lead(lambda: secrets.token_hex(16)))
    return TorchHost(host, launch, launch_id, deadline_seconds=settings.deadline_seconds)


def _open_link(group: Group, dial: Callable[[], NetworkLink]) -> Link:
    """The link of this rank: its own connections for the leader, which the others go through."""
    if not group.is_leader:
        return LedLink(group, None)
    mine = dial()
    return mine if group.size == 1 else LedLink(group, mine)


def _hold_state(
    group: Group, directory: str | Path | None, *, base: Path, worker_id: str | None
) -> tuple[IslandStore, IslandIdentity]:
    """This rank's store and the island's identity.

    The leader holds the island's state directory; each follower has a folder of its own in it.
    """
    mine: IslandStore | None = None

    def lead() -> tuple[str, str]:
        nonlocal mine
        mine = _open_store(directory, base=base, worker_id=worker_id)
        return str(mine.directory.absolute()), _identity_of(mine, worker_id).worker_id

    def follow() -> IslandStore:
        return mine or IslandStore(Path(path) / f"rank-{group.rank}", has_frames=False)

    path, name = group.lead(lead)
    store = group.together(follow)
    # The key proves the island to the coordinator, to whom only the leader speaks.
    is_leader = group.is_leader
    return store, _identity_of(store, worker_id) if is_leader else IslandIdentity(name, NO_KEY)


def _hold_rank(group: Group, held: IslandStore, island: str) -> tuple[IslandStore, IslandIdentity]:
    """The store and the identity of one process of an island whose processes are all ranks.

    `held` is what `_hold_state` gave: of the leader the island's directory, which it keeps held.
    """

    def own() -> tuple[IslandStore, IslandIdentity]:
        folder = held.directory / f"rank-{group.rank}"
        store = IslandStore(folder, has_frames=False) if group.is_leader else held
        return store, _identity_of(store, f"{island}-{group.rank}")

    return group.together(own)


def _identity_of(store: IslandStore, worker_id: str | None) -> IslandIdentity:
    """Who this island is: what its state directory remembers, else a new name and key."""
    known = store.identity()
    if known is not None:
        if worker_id is not None and worker_id != known.worker_id:
            owner = f"{known.worker_id!r}, which {str(store.directory)!r} belongs to"
            way_out = "use another state directory"
            raise ConfigError(f"worker_id={worker_id!r} differs from {owner}; {way_out}")
        return known
    name = worker_id or f"{socket.gethostname()[:40]}-{secrets.token_hex(4)}"
    made = IslandIdentity(ids.worker_id(name), secrets.token_hex(32))
    store.set_identity(made)
    return made


def _open_store(directory: str | Path | None, *, base: Path, worker_id: str | None) -> IslandStore:
    """The island's state directory; without one given, the first free slot of this run."""
    if directory is not None:
        return IslandStore(Path(directory))
    if worker_id is not None:
        return IslandStore(base / ids.worker_id(worker_id))
    for slot in range(MAX_SLOTS):
        with suppress(StateHeld):
            return IslandStore(base / f"slot-{slot}")
    alive = f"{MAX_SLOTS} islands of this run are alive on this machine"
    raise ConfigError(f"{alive}; give a state directory")
