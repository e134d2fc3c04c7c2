"""An island of this process: a URL and a token in, a `Run` out, with its heartbeats beating."""

import random
import secrets
import socket
from pathlib import Path

from atoll import ids
from atoll.clock import SystemClock
from atoll.errors import ConfigError, StateHeld
from atoll.island.network import NetworkLink
from atoll.island.pulse import Pulse
from atoll.island.reconnect import Reconnect
from atoll.island.run import Run
from atoll.island.store import IslandIdentity, IslandStore
from atoll.launch import memory

MAX_SLOTS = 256
DEFAULT_HOME = Path("~/.local/state/atoll")


def join(
    url: str,
    *,
    token: str,
    fingerprint: str | None = None,
    worker_id: str | None = None,
    state: str | Path | None = None,
    home: Path = DEFAULT_HOME,
) -> Run:
    """Takes part in the run at `url`; nothing that must match can be set here.

    `state` is where this island keeps its checkpoint; without it a directory below `home` is
    chosen, the same one again after a restart. `run.close()`, or the end of `run.batches`, leaves.
    """
    memory.keep_freed_tiles()
    clock = SystemClock()
    jitter = random.Random(secrets.randbits(64))
    link = NetworkLink(url, token=token, fingerprint=fingerprint)
    run_id = Reconnect(clock, jitter).call(link.info).run_id
    store = _open_store(
        None if state is None else Path(state),
        base=home.expanduser() / run_id,
        worker_id=worker_id,
    )
    identity = _identity_of(store, worker_id)
    run = Run(link, store, clock, identity=identity, jitter=jitter)
    pulse = Pulse(run)
    run.on_close(pulse.stop, store.close, link.close)
    pulse.start()
    return run


def _identity_of(store: IslandStore, worker_id: str | None) -> IslandIdentity:
    """Who this island is: what its state directory remembers, else a new name and key."""
    known = store.identity()
    if known is not None:
        if worker_id is not None and worker_id != known.worker_id:
            raise ConfigError(
                f"worker_id={worker_id!r} differs from {known.worker_id!r}, which "
                f"{str(store.directory)!r} belongs to; use another state directory"
            )
        return known
    name = worker_id or f"{socket.gethostname()[:40]}-{secrets.token_hex(4)}"
    made = IslandIdentity(ids.worker_id(name), secrets.token_hex(32))
    store.set_identity(made)
    return made


def _open_store(directory: Path | None, *, base: Path, worker_id: str | None) -> IslandStore:
    """The island's state directory; without one given, the first free slot of this run."""
    if directory is not None:
        return IslandStore(directory)
    if worker_id is not None:
        return IslandStore(base / ids.worker_id(worker_id))
    for slot in range(MAX_SLOTS):
        try:
            return IslandStore(base / f"slot-{slot}")
        except StateHeld:
            continue
    raise ConfigError(
        f"{MAX_SLOTS} islands of this run are alive on this machine; give a state directory"
    )
