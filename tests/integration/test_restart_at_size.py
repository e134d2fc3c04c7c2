"""A coordinator with a long history starts where it was: the rows after the last ones, not row 0.

How long that takes is measured by `benchmarks/restart.py`; `make storm` gives this test its 1,000
rounds.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll import config
from atoll.clock import SystemClock
from atoll.coordinator import boot
from atoll.coordinator.members.workers import key_hash
from atoll.island.link.network import NetworkLink
from atoll.launch import state
from atoll.launch.state import Addresses
from atoll.protocol.messages import (
    Assignment,
    AssignmentRequest,
    Identity,
    InfoRequest,
    RegisterRequest,
    StatusRequest,
)
from benchmarks import restart
from tests import ledgers, processes
from tests.lives import Lives

pytestmark = pytest.mark.storm

ROUNDS = 1000 if "ATOLL_STORM_KILLS" in os.environ else 100
KEY = "7" * 64


@pytest.fixture(scope="module")
def filled() -> Iterator[Lives]:
    """A directory with `ROUNDS` published rounds and the next one open."""
    # In memory where there is such a directory: filling waits for thousands of syncs.
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as made:
        home = Path(made)
        file = restart.run_file(home / "run.toml")
        with Lives(home, file) as run:
            restart.fill(run.directory(), file, rounds=ROUNDS, key_sha256=key_hash(KEY))
            run.serve()
            yield run


def ask(link: NetworkLink, worker_id: str) -> Assignment:
    """What a worker that comes back is given to do."""
    info = link.send(InfoRequest())
    reply = link.send(
        RegisterRequest(
            run_id=info.run_id,
            manifest_sha256=info.manifest_sha256,
            worker_id=worker_id,
            island_key=KEY,
            layout_digest=info.model_hash,
            data_identity=info.data.identity,
        )
    )
    identity = Identity(
        run_id=info.run_id,
        manifest_sha256=info.manifest_sha256,
        worker_id=worker_id,
        island_key=KEY,
        incarnation=reply.incarnation,
        generation=reply.generation,
    )
    request = AssignmentRequest(identity=identity, version=reply.version, digest=reply.digest)
    return link.send(request)


def test_rows_issued_after_a_restart_follow_those_of_all_rounds_before(filled: Lives) -> None:
    link = NetworkLink(filled.url, token=processes.TOKENS.worker)
    given = {worker_id: ask(link, worker_id) for worker_id in restart.WORKERS}
    status = link.send(StatusRequest())
    link.close()
    per_round = len(restart.WORKERS) * restart.ROWS
    issued = [
        row
        for worker_id in restart.WORKERS
        for span in given[worker_id].ranges
        for row in range(span.start, span.stop)
    ]

    assert {(a.action, a.round) for a in given.values()} == {("train", ROUNDS + 1)}
    assert issued == list(range(ROUNDS * per_round, (ROUNDS + 1) * per_round))
    assert (status.version, status.tokens) == (ROUNDS, ROUNDS * per_round * 16)


def questions_at_start(directory: Path, file: Path) -> list[str]:
    """Every statement that opening a coordinator sends to its ledger."""
    with (
        ledgers.listening() as asked,
        state.held(directory, Addresses()) as stores,
    ):
        clock = SystemClock()
        boot.create_or_check(stores, config.load(file), clock, new_run_id="new")
        boot.open_coordinator(stores, clock)
    return asked


def test_start_asks_a_long_ledger_no_more_than_a_short_one(tmp_path: Path) -> None:
    file = restart.run_file(tmp_path / "run.toml")
    restart.fill(tmp_path / "short", file, rounds=1)
    restart.fill(tmp_path / "long", file, rounds=20)

    asked = questions_at_start(tmp_path / "long", file)

    assert asked == questions_at_start(tmp_path / "short", file)
    assert any("FROM contributions" in statement for statement in asked)
