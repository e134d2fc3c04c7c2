"""One rank of `atoll gather window` in a process of its own, which may fall at a named point.

The program is the command's own; only its deadline is a test's, and at the point the process kills
or stops itself, wrapped from outside. What became of the window is `<out>/<rank>.json`.
"""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from atoll.blobs.access import S3Access
from atoll.clock import SystemClock
from atoll.errors import AtollError
from atoll.gather import exchange
from atoll.gather.archive import Archive
from atoll.gather.spool import Part
from atoll.gather.update import Update
from atoll.gather.window import Window
from atoll.launch import gather as launching
from atoll.launch import gather_file
from atoll.launch.gather_state import GatherState
from tests import servers

CLOCK = SystemClock()
# Where a rank falls: class, method, and once how many calls of it are done; 0: before the first.
POINTS: dict[str, tuple[Any, str, int]] = {
    "before": (Window, "run", 0),
    "fetch": (Part, "write", 3),
    "exchange": (exchange, "regroup", 0),
    "vote": (Update, "vote", 0),
    "recorded": (Archive, "create", 1),
    "saved": (GatherState, "write", 1),
}
APPLY = "apply"  # after the first tile
KILL, STOP = int(signal.SIGKILL), int(signal.SIGSTOP)


@dataclass(frozen=True, kw_only=True)
class Fall:
    """At which point a rank meets a signal."""

    rank: int
    point: str
    signal: int = KILL


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a rank is told."""

    rank: int
    size: int
    port: int
    file: str
    out: str
    endpoint: str
    timeout_seconds: float
    fall: dict[str, Any] | None = None

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def access(endpoint: str) -> S3Access:
    return S3Access(
        access_key_id=servers.ACCESS_KEY_ID,
        secret_access_key=servers.SECRET_ACCESS_KEY,
        endpoint=endpoint,
    )


def install(fall: Fall, out: Path) -> None:
    """Wraps the point's method."""

    def falls() -> None:
        (out / f"fell-{fall.rank}").write_text(fall.point)
        os.kill(os.getpid(), fall.signal)

    if fall.point == APPLY:
        _fall_in_apply(falls)
        return
    owner, name, after = POINTS[fall.point]
    wrapped: Callable[..., Any] = getattr(owner, name)
    done = 0

    def stands(*given: Any, **named: Any) -> Any:
        nonlocal done
        if not after:
            falls()
        found = wrapped(*given, **named)
        done += 1
        if done == after:
            falls()
        return found

    setattr(owner, name, stands)


def _fall_in_apply(falls: Callable[[], None]) -> None:
    applied = Update.apply

    def apply(self: Update, tiles: Any, *given: Any) -> None:
        applied(self, list(tiles)[:1], *given)
        falls()

    Update.apply = apply  # type: ignore[method-assign, assignment] # the point of this program


def process(text: str) -> None:
    """The whole life of a rank."""
    told = Told(**json.loads(text))
    out = Path(told.out)
    torch.set_num_threads(1)
    if told.size > 1:
        os.environ |= {
            "RANK": str(told.rank),
            "LOCAL_RANK": str(told.rank),
            "WORLD_SIZE": str(told.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(told.port),
        }
    if told.fall is not None:
        install(Fall(**told.fall), out)
    began = CLOCK.now()
    found: dict[str, Any]
    try:
        with launching.ranks_of(told.timeout_seconds, CLOCK) as ranks:
            file = gather_file.load(Path(told.file))
            found = launching.window(file, ranks, clock=CLOCK, s3=access(told.endpoint))
    except AtollError as exc:
        found = {"code": exc.code, "sentence": str(exc)}
    found["took_seconds"] = CLOCK.now() - began
    part = out / f"{told.rank}.part"
    part.write_text(json.dumps(found))
    part.rename(out / f"{told.rank}.json")
