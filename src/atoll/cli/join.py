"""`atoll join`: an island from a URL and a token."""

import os
import random
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

import torch

from atoll import ids
from atoll.cli import output
from atoll.clock import SystemClock
from atoll.errors import ConfigError, StateHeld
from atoll.island import trainer
from atoll.island.network import NetworkLink
from atoll.island.pulse import Pulse
from atoll.island.reconnect import Reconnect
from atoll.island.run import Run
from atoll.island.store import IslandIdentity, IslandStore

MAX_SLOTS = 256


@dataclass(frozen=True, kw_only=True)
class JoinOptions:
    """The command's arguments."""

    url: str
    token: str | None = None
    fingerprint: str | None = None
    worker_id: str | None = None
    state: Path | None = None
    data: str | None = None
    device: str = "auto"
    as_json: bool = False


def join(options: JoinOptions) -> None:
    """Trains until the run is over."""
    link = NetworkLink(
        options.url, token=required_token(options.token), fingerprint=options.fingerprint
    )
    jitter = random.Random(secrets.randbits(64))
    run_id = Reconnect(SystemClock(), jitter).call(link.info).run_id
    store = open_store(options.state, run_id=run_id, worker_id=options.worker_id)
    try:
        run = Run(
            link,
            store,
            SystemClock(),
            identity=identity_of(store, options.worker_id),
            jitter=jitter,
        )
        torch.set_num_threads(run.manifest.inner.threads)
        if not options.as_json:
            output.say(
                f"island {run.worker_id!r} joins run {run.manifest.name!r} ({run_id}); "
                f"state in {str(store.directory)!r}"
            )
        pulse = Pulse(run)
        pulse.start()
        try:
            trainer.train(run, location=options.data, device=device_of(options.device))
        finally:
            pulse.stop()
        _tell(run, as_json=options.as_json)
    finally:
        store.close()
        link.close()


def required_token(token: str | None) -> str:
    """The token, or a sentence that says where to get one."""
    if not token:
        raise ConfigError(
            "no token was given; pass --token, or set ATOLL_TOKEN, to what `atoll serve` printed"
        )
    return token


def identity_of(store: IslandStore, worker_id: str | None) -> IslandIdentity:
    """Who this island is: what its state directory remembers, else a new name and key."""
    known = store.identity()
    if known is not None:
        if worker_id is not None and worker_id != known.worker_id:
            raise ConfigError(
                f"--worker-id {worker_id!r} differs from {known.worker_id!r}, which "
                f"{str(store.directory)!r} belongs to; use another --state"
            )
        return known
    name = worker_id or f"{socket.gethostname()[:40]}-{secrets.token_hex(4)}"
    made = IslandIdentity(ids.worker_id(name), secrets.token_hex(32))
    store.set_identity(made)
    return made


def open_store(directory: Path | None, *, run_id: str, worker_id: str | None) -> IslandStore:
    """The island's state directory; without one given, the first free slot of this run."""
    if directory is not None:
        return IslandStore(directory)
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    base = Path(home) / "atoll" / run_id
    if worker_id is not None:
        return IslandStore(base / ids.worker_id(worker_id))
    for slot in range(MAX_SLOTS):
        try:
            return IslandStore(base / f"slot-{slot}")
        except StateHeld:
            continue
    raise ConfigError(f"{MAX_SLOTS} islands of this run are alive on this machine; give --state")


def device_of(name: str) -> torch.device:
    """The device that `name` asks for; `auto` takes an accelerator if there is one."""
    if name != "auto":
        try:
            return torch.device(name)
        except RuntimeError as exc:
            raise ConfigError(f"--device {name!r} is not a device of this machine") from exc
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _tell(run: Run, *, as_json: bool) -> None:
    telemetry = run.telemetry()
    summary = {
        "worker_id": run.worker_id,
        "version": run.version,
        "digest": run.digest,
        "tokens": telemetry.tokens,
        "tokens_per_second": telemetry.tokens_per_second,
        "bytes_sent": telemetry.bytes_sent,
        "bytes_received": telemetry.bytes_received,
        "stale_rounds": run.stale_rounds,
    }
    if as_json:
        output.print_json(summary)
    else:
        output.say(
            f"run finished at version {run.version}, params digest {run.digest}; "
            f"sent {output.size(telemetry.bytes_sent)}, "
            f"received {output.size(telemetry.bytes_received)}"
        )
