"""`atoll` that stops short at one point of a round as an island, for the fault tests.

    island_with_failpoint.py POINT@ROUND[,POINT@ROUND…] FOLDER join URL …

Loads everything an island needs, waits for `FOLDER/go.json` (a list of further options), then
joins. Wraps the production code from outside; that code knows nothing of it. Points:

    receipt   SIGKILL when the receipt has arrived and nothing has been made of it
    steps     SIGKILL between two steps, before the round's contribution exists
    hold      stand still between two steps, heartbeats going on, until FOLDER/release-ROUND exists
    none      nothing happens

Before a kill, FOLDER gets `marker.json`; while it is held, `held-ROUND`.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from atoll import cli
from atoll.cli import join  # noqa: F401  loaded before the wait, not after it
from atoll.island.link.network import NetworkLink
from atoll.island.run import Run
from atoll.protocol.messages import AssignmentRequest

STEP = 2  # of 3 in a round
POLL_SECONDS = 0.02


class Failpoint:
    """Where this island is, and what happens to it there."""

    def __init__(self, points: set[str], folder: Path) -> None:
        self._points = points
        self._folder = folder
        self._round = 0
        self._steps = 0

    def assigned(self, reply: Any) -> None:
        if reply.action == "train":
            self._round, self._steps = reply.round, 0

    def stepped(self) -> None:
        self._steps += 1
        if self._steps == STEP and self._is_at("steps"):
            self._die()
        if self._steps == STEP and self._is_at("hold"):
            self._hold()

    def sent(self) -> None:
        if self._is_at("receipt"):
            self._die()

    def _is_at(self, point: str) -> bool:
        return f"{point}@{self._round}" in self._points

    def _die(self) -> None:
        part = self._folder / "part"
        part.write_text(json.dumps({"round": self._round, "wall": time.time()}))
        os.replace(part, self._folder / "marker.json")
        os.kill(os.getpid(), signal.SIGKILL)

    def _hold(self) -> None:
        (self._folder / f"held-{self._round}").touch()
        while not (self._folder / f"release-{self._round}").exists():
            time.sleep(POLL_SECONDS)


def install(failpoint: Failpoint) -> None:
    send, upload, step = NetworkLink.send, NetworkLink.upload, Run.step

    def answered(self: NetworkLink, message: Any, **how: Any) -> Any:
        reply: Any = send(self, message, **how)
        if isinstance(message, AssignmentRequest):
            failpoint.assigned(reply)
        return reply

    def sent(self: NetworkLink, *args: Any, **options: Any) -> str:
        receipt = upload(self, *args, **options)
        failpoint.sent()
        return receipt

    def stepped(self: Run, **options: Any) -> None:
        step(self, **options)
        failpoint.stepped()

    NetworkLink.send = answered  # type: ignore[method-assign] # the point of this program
    NetworkLink.upload = sent  # type: ignore[method-assign] # the point of this program
    Run.step = stepped  # type: ignore[method-assign] # the point of this program


def main() -> None:
    points, folder = sys.argv[1:3]
    sys.argv = ["atoll", *sys.argv[3:]]
    install(Failpoint(set(points.split(",")), Path(folder)))
    go = Path(folder) / "go.json"
    while not go.exists():
        time.sleep(POLL_SECONDS)
    sys.argv += json.loads(go.read_text())
    cli.main()


if __name__ == "__main__":
    main()
