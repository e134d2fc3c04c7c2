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
from atoll.wire import frame

STEP = 2  # of 3 in a round
POLL_SECONDS = 0.02


class Failpoint:
    """What happens to this island, and where; a round is the one trained or handed in."""

    def __init__(self, points: set[str], folder: Path) -> None:
        self._points = points
        self._folder = folder

    def stepped(self, run: Run) -> None:
        told = run.telemetry()
        if told.step == STEP and self._is_at("steps", told.round):
            self._die(told.round)
        if told.step == STEP and self._is_at("hold", told.round):
            self._hold(told.round)

    def sent(self, round_number: int) -> None:
        if self._is_at("receipt", round_number):
            self._die(round_number)

    def _is_at(self, point: str, round_number: int) -> bool:
        return f"{point}@{round_number}" in self._points

    def _die(self, round_number: int) -> None:
        part = self._folder / "part"
        part.write_text(json.dumps({"round": round_number, "wall": time.time()}))
        os.replace(part, self._folder / "marker.json")
        os.kill(os.getpid(), signal.SIGKILL)

    def _hold(self, round_number: int) -> None:
        (self._folder / f"held-{round_number}").touch()
        while not (self._folder / f"release-{round_number}").exists():
            time.sleep(POLL_SECONDS)


def install(failpoint: Failpoint) -> None:
    upload, step = NetworkLink.upload, Run.step

    def sent(self: NetworkLink, *args: Any, **options: Any) -> str:
        receipt = upload(self, *args, **options)
        _, source = args
        failpoint.sent(frame.parse_preamble(source.preamble)[0].round)
        return receipt

    def stepped(self: Run, **options: Any) -> None:
        step(self, **options)
        if self.group.is_leader:
            failpoint.stepped(self)

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
