"""`atoll` that ends itself by SIGKILL at one point of a round, for the kill tests.

    coordinator_with_failpoint.py POINT@ROUND FOLDER serve run.toml …

Loads everything a coordinator needs, waits for `FOLDER/go.json` (a list of further options), then
serves. Wraps the production code from outside; that code knows nothing of it. Before the kill,
FOLDER gets `marker.json`, by which a test tells this death from any other. Points:

    before_accept    a frame has arrived whole and is neither stored nor recorded
    before_commit    its blob is stored under its name, the ledger's transaction is not committed
    before_publish   the round is frozen and computed, not published
    download         part of the version after ROUND has been served
    idle             every island trains, nothing is under way here; in ROUND or a later one
    computing        no kill: the outer step stands still until the process ends
    none             no kill
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atoll import cli
from atoll.cli import serve  # noqa: F401  loaded before the wait, not after it
from atoll.coordinator.accept.admission import UploadRequest
from atoll.coordinator.accept.uploads import Uploads, UploadStream
from atoll.coordinator.planes.closing_thread import ClosingThread
from atoll.coordinator.rounds.run_weights import RunWeights
from atoll.coordinator.rounds.spool import SpooledFrame
from atoll.coordinator.service import Coordinator
from atoll.ledger.records import ContributionRecord, Published
from atoll.ledger.tables.contributions import ContributionTable
from atoll.ledger.tables.rounds import RoundTable
from atoll.wire import chunks

CHUNK_BYTES = 4096  # so that the tiny run's download has several
TICK_SECONDS = 0.002  # so that the closing thread is seen idle while islands train
NUM_ISLANDS = 2
POLL_SECONDS = 0.02

Die = Callable[..., None]


def before_accept(round_number: int, die: Die) -> None:
    commit = Uploads.commit

    def wrapped(self: Uploads, stream: UploadStream, announcement: Any = None) -> Any:
        upload = stream.upload
        if upload.request.header.round == round_number:
            die(sha256=upload.request.sha256, worker_id=upload.request.identity.worker_id)
        return commit(self, stream, announcement)

    Uploads.commit = wrapped  # type: ignore[method-assign] # the point of this program


def before_commit(round_number: int, die: Die) -> None:
    accept = ContributionTable.accept

    def wrapped(self: ContributionTable, contribution: ContributionRecord) -> ContributionRecord:
        accepted = accept(self, contribution)
        if contribution.round == round_number:
            die(sha256=contribution.sha256, worker_id=contribution.worker_id)
        return accepted

    ContributionTable.accept = wrapped  # type: ignore[method-assign] # the point of this program


def before_publish(round_number: int, die: Die) -> None:
    publish = RoundTable.publish

    def wrapped(self: RoundTable, number: int, published: Published, **more: Any) -> None:
        if number == round_number:
            die()
        publish(self, number, published, **more)

    RoundTable.publish = wrapped  # type: ignore[method-assign,assignment] # the point of this program


def download(round_number: int, die: Die) -> None:
    read = SpooledFrame.read
    chunks.CHUNK_BYTES = CHUNK_BYTES

    def wrapped(self: SpooledFrame, offset: int, nbytes: int) -> bytes:
        if self.header.round == round_number and offset >= 2 * CHUNK_BYTES:
            die(offset=offset, nbytes=self.nbytes)
        return read(self, offset, nbytes)

    SpooledFrame.read = wrapped  # type: ignore[method-assign] # the point of this program


def idle(round_number: int, die: Die) -> None:
    assignment, advance, start = Coordinator.assignment, Coordinator.advance, ClosingThread.start
    begin_upload = Coordinator.begin_upload
    training: set[tuple[int | None, str]] = set()
    sending: set[str] = set()  # since the last round closed

    def assigned(self: Coordinator, request: Any, *, begun: bool = False) -> Any:
        reply = assignment(self, request, begun=begun)
        if reply.action == "train":
            training.add((reply.round, request.identity.worker_id))
        return reply

    def advanced(self: Coordinator) -> bool:
        moved = advance(self)
        latest = next(iter(self.rounds.open_rounds), None)
        if moved:
            sending.clear()
        if moved or latest is None or sending or latest.contributions:
            return moved
        current = latest.number
        busy = [worker for number, worker in training if number == current]
        if current >= round_number and len(busy) == NUM_ISLANDS:
            die(open_round=current)
        return moved

    def begun(self: Coordinator, request: UploadRequest) -> Any:
        sending.add(request.identity.worker_id)
        return begin_upload(self, request)

    def started(self: ClosingThread) -> None:
        self.tick_seconds = TICK_SECONDS
        start(self)

    Coordinator.begin_upload = begun  # type: ignore[method-assign] # the point of this program
    Coordinator.assignment = assigned  # type: ignore[method-assign] # the point of this program
    Coordinator.advance = advanced  # type: ignore[method-assign, assignment] # the point of this program
    ClosingThread.start = started  # type: ignore[method-assign] # the point of this program


def computing(round_number: int, hold: Die) -> None:
    compute = RunWeights.compute

    def wrapped(self: RunWeights, number: int, contributions: Any) -> Any:
        if number == round_number:
            hold()
        return compute(self, number, contributions)

    RunWeights.compute = wrapped  # type: ignore[method-assign,assignment] # the point of this program


POINTS: dict[str, Callable[[int, Die], None]] = {
    "before_accept": before_accept,
    "before_commit": before_commit,
    "before_publish": before_publish,
    "download": download,
    "idle": idle,
    "computing": computing,
    "none": lambda _round_number, _die: None,
}


def main() -> None:
    point, _, number = sys.argv[1].partition("@")
    round_number, folder = int(number), Path(sys.argv[2])
    sys.argv = ["atoll", *sys.argv[3:]]

    def die(**facts: object) -> None:
        part = folder / "part"
        part.write_text(json.dumps({"point": point, "round": round_number, **facts}))
        os.replace(part, folder / "marker.json")
        os.kill(os.getpid(), signal.SIGKILL)

    def hold() -> None:
        (folder / f"held-{round_number}").touch()
        threading.Event().wait()

    POINTS[point](round_number, hold if point == "computing" else die)
    go = folder / "go.json"
    while not go.exists():
        time.sleep(POLL_SECONDS)
    sys.argv += json.loads(go.read_text())
    cli.main()


if __name__ == "__main__":
    main()
