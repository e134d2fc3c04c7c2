"""A rank of a crew: a process that joins its gloo group once and then does what it is told.

What is told and answered are bounded JSON bytes over a pipe; results are files in the job's folder.
What the process prints goes to its own log, so that nothing mixes with the parent's output.
"""

import importlib
import json
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from atoll import torch_threads
from atoll.collectives.torch_dist import TorchRanks, gloo_group
from atoll.errors import AtollError, ConfigError

MAX_MESSAGE_BYTES = 1 << 20
MAX_ERROR = 4000  # characters of what a rank says of an error
LOOPBACK = "lo"


@dataclass(frozen=True, slots=True)
class WorldRank:
    """What a job's function gets: this rank among all, with collectives of our own beside gloo's.

    `job` is a number that no other job of the crew has, for the keys of collectives.
    """

    rank: int
    size: int
    group: TorchRanks
    process_group: dist.ProcessGroup
    job: int


Entry = Callable[[WorldRank, dict[str, Any], Path], None]


def serve(rank: int, size: int, home: str, pipe: Connection, timeout_seconds: float) -> None:
    """Runs until the pipe says stop or ends; the target of the process."""
    _log_to(Path(home) / f"rank-{rank}.log")
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK  # else gloo looks this machine's name up
    torch_threads.use(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{home}/gloo",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_seconds),
    )
    ours = TorchRanks(gloo_group(timeout_seconds=timeout_seconds), timeout_seconds=timeout_seconds)
    default = cast(dist.ProcessGroup, dist.group.WORLD)
    _answer(pipe, {})
    job = 0
    while (told := _told(pipe)) is not None:
        job += 1
        _answer(pipe, _done(told, WorldRank(rank, size, ours, default, job)))
    ours.close()
    dist.destroy_process_group()


def _log_to(path: Path) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _told(pipe: Connection) -> dict[str, Any] | None:
    """The next job; None at the end, also where the parent is gone."""
    try:
        found = json.loads(pipe.recv_bytes(MAX_MESSAGE_BYTES))
    except EOFError:
        return None
    return cast("dict[str, Any] | None", found)


def _answer(pipe: Connection, message: dict[str, Any]) -> None:
    try:
        pipe.send_bytes(json.dumps(message).encode())
    except BrokenPipeError:
        raise SystemExit(1) from None  # nobody is left to be told


def _done(told: dict[str, Any], world: WorldRank) -> dict[str, Any]:
    """What the job came to; the process goes on, whatever the user's code raised."""
    try:
        module, _, function = told["entry"].partition(":")
        entry = cast(Entry, getattr(importlib.import_module(module), function))
        entry(world, told["spec"], Path(told["folder"]))
        if dist.group.WORLD is not world.process_group:
            raise ConfigError(
                "the default process group was destroyed or made anew by what ran; it is shared "
                "with what runs next, so leave it as it was given"
            )
    except Exception as exc:
        traceback.print_exc()
        return {"error": described(exc)}
    return {}


def described(error: BaseException) -> str:
    """One line of what happened, and where where it was not one of our own refusals."""
    if isinstance(error, AtollError):
        return str(error)[:MAX_ERROR]
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}"[:MAX_ERROR] + place
