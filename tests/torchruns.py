"""Real torchrun groups on loopback, for the tests of islands with several ranks."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from atoll.coordinator.planes.access import Role
from tests.processes import LIMIT_SECONDS, eventually
from tests.served import TOKENS

RANKS = 2


@dataclass
class TorchrunGroup:
    """A running torchrun and its ranks."""

    popen: "subprocess.Popen[bytes]"
    log_path: Path

    def ranks(self) -> dict[int, psutil.Process]:
        """The ranks' processes, by rank."""
        found: dict[int, psutil.Process] = {}
        for child in psutil.Process(self.popen.pid).children():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                rank = child.environ().get("RANK")
                if rank is not None:
                    found[int(rank)] = child
        return found

    def wait(self) -> int:
        """torchrun's exit code."""
        return self.popen.wait(LIMIT_SECONDS)

    def kill_all(self) -> None:
        """SIGKILL to torchrun and to every rank, by pid; waits until they are gone."""
        with suppress(psutil.NoSuchProcess):
            everyone = psutil.Process(self.popen.pid).children(recursive=True)
            self.popen.send_signal(signal.SIGKILL)
            for process in everyone:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(everyone, LIMIT_SECONDS)
        self.popen.wait()

    def log(self) -> str:
        """What all ranks printed."""
        return self.log_path.read_text(errors="replace")


@contextmanager
def torchrun(
    program: Sequence[str],
    log_path: Path,
    *,
    options: Sequence[str] = (),
    token: str = TOKENS[Role.WORKER],
    ranks: int = RANKS,
) -> Iterator[TorchrunGroup]:
    """A group; what is left of it when the block ends is killed."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", *options, *program]
    variables = {"OMP_NUM_THREADS": "1", "ATOLL_TOKEN": token}
    with log_path.open("ab") as log:
        popen = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **variables},
        )
    group = TorchrunGroup(popen, log_path)
    try:
        yield group
    except BaseException as exc:
        exc.add_note(f"--- log of the group:\n{group.log()[-6000:]}")
        raise
    finally:
        group.kill_all()


def results(folder: Path, *, ranks: int = RANKS) -> dict[int, dict[str, Any]]:
    """What each rank of a program of tests/ranks wrote."""
    return {
        rank: json.loads((folder / f"rank-{rank}.json").read_text())
        for rank in range(ranks)
        if eventually(f"the result of rank {rank}", (folder / f"rank-{rank}.json").exists)
    }
