"""A torchrun launch as the group of a sharded run: calm, and with a process killed in a step."""

import datetime
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from atoll.cli.app import app
from atoll.client.http import HttpClient
from atoll.coordinator.planes.access import Role
from atoll.launch import local, state
from atoll.launch.local import LocalCoordinator, Tokens
from atoll.ledger.records import GroupRecord
from atoll.proof import audit as auditing
from atoll.proof.report import AuditReport
from atoll.protocol.messages import StatusRequest
from atoll.versions import recorded
from atoll.wire import certificate
from tests import processes, torchruns
from tests.processes import LIMIT_SECONDS, eventually
from tests.served import TOKENS
from tests.torchruns import TorchrunGroup

pytestmark = pytest.mark.xdist_group("torchrun-sharded")

ROUNDS, ROUND_STEPS, BATCH = 3, 6, 7
HELD_STEP = 5  # inside the first round: there is no checkpoint to go back to
HOLDS = Path(__file__).parents[1] / "ranks" / "sharded_holds.py"
RUN_FILE = f"""
name = "launched"
strategy = "sharded"
seed = 3
heartbeat_interval = 0.5
heartbeat_timeout = 5.0
[model]
architecture = "gpt"
vocab = 16
block = 8
layers = 2
heads = 2
width = 16
[data]
kind = "synthetic"
seed = 1
rows = 500
held_out_rows = 5
block = 8
vocab = 16
[inner]
batch = {BATCH}
lr = 1e-3
threads = 1
[evaluate]
every = 1
[membership]
min_workers = 2
[stop]
rounds = {ROUNDS}
[sharded]
transport = "torch_dist"
save_every = 2
checkpoint_every = {ROUND_STEPS // 2}
deadline_seconds = 20
"""
CODED = """exchange = "direct"
gradients = "int8"
parameters = "bf16"
micro_batches = 2
"""


@dataclass
class Ended:
    """What a run came to."""

    home: Path
    exit_codes: list[int]
    log: str
    report: AuditReport
    groups: list[GroupRecord]
    simulated: dict[str, Any] = field(default_factory=dict)


def trained(
    home: Path,
    run_file: str,
    *,
    serve: Sequence[str] = (),
    program: Sequence[str] = ("-m", "atoll"),
    meanwhile: Callable[[LocalCoordinator, TorchrunGroup], None] = lambda *_: None,
) -> Ended:
    """The run of one launch of two, to its end, and the simulation of its run file."""
    file = home / "run.toml"
    file.write_text(run_file)
    tokens = Tokens(TOKENS[Role.WORKER], TOKENS[Role.ADMIN])
    with ExitStack() as held:
        coordinator = local.start_coordinator(file, home / "state", tokens=tokens, options=serve)
        held.callback(coordinator.kill)
        simulated = processes.simulate(file)
        coordinator.wait_ready(timeout_seconds=LIMIT_SECONDS)
        words = [*program, "join", coordinator.url, "--worker-id", "island"]
        words += ["--state", str(home / "island")]
        if coordinator.fingerprint is not None:
            words += ["--fingerprint", coordinator.fingerprint]
        group = held.enter_context(
            torchruns.torchrun(words, home / "group.log", options=["--max-restarts", "1"])
        )
        meanwhile(coordinator, group)
        exit_codes = [group.wait(), coordinator.wait(timeout_seconds=LIMIT_SECONDS)]
        log = group.log()
    with state.at_rest(home / "state") as (ledger, blobs):
        manifest = recorded.manifest_of(ledger)
        assert manifest is not None
        layout = recorded.layout_of(manifest)
        report = auditing.audit(ledger, blobs, layout=layout, with_replay=True)
        with ledger.reading() as t:
            groups = t.groups.all()
    return Ended(home, exit_codes, log, report, groups, simulated)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """With certificates between ranks, and int8 gradients."""
    home = tmp_path_factory.mktemp("calm")
    own = certificate.own(home, host="127.0.0.1", now=datetime.datetime.now(datetime.UTC))
    shown = ["--cert", str(own.certificate_path), "--key", str(own.key_path)]
    return trained(home, RUN_FILE + CODED, serve=shown)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The second process is killed inside a step, once a save of all is known to be there."""
    home = tmp_path_factory.mktemp("killed")

    def kill(coordinator: LocalCoordinator, group: TorchrunGroup) -> None:
        link = HttpClient(coordinator.url, token=TOKENS[Role.ADMIN])
        eventually("the held step", (home / "held").exists)
        eventually("a consistent save", lambda: link.send(StatusRequest()).consistent)
        os.kill(group.ranks()[1].pid, signal.SIGKILL)
        (home / "release").touch()
        link.close()

    program = (str(HOLDS), str(HELD_STEP), str(home))
    return trained(home, RUN_FILE, program=program, meanwhile=kill)


@pytest.mark.parametrize("name", ["calm", "killed"])
def test_launch_ends_in_the_digest_of_the_simulation(name: str, request: Any) -> None:
    run: Ended = request.getfixturevalue(name)

    assert run.exit_codes == [0, 0], run.log
    assert run.report.clean, run.report.problems
    assert run.report.digest == run.simulated["digest"]


@pytest.mark.parametrize("name", ["calm", "killed"])
def test_every_row_that_was_trained_is_recorded_once(name: str, request: Any) -> None:
    run: Ended = request.getfixturevalue(name)

    with state.at_rest(run.home / "state") as (ledger, _), ledger.reading() as t:
        rows = [sum(len(x.row_range) for x in t.leases.of_round(n)) for n in (1, 2, 3)]
        tokens = [c.tokens for c in t.checkpoints.all()]

    assert rows == [ROUND_STEPS * BATCH] * ROUNDS
    assert tokens == [ROUND_STEPS * BATCH * 8] * ROUNDS


def test_calm_launch_is_one_group_by_torch_rank_with_certificates(calm: Ended) -> None:
    [group] = calm.groups

    assert [member.worker_id for member in group.members] == ["island-0", "island-1"]
    assert len({member.certificate for member in group.members}) == 2
    assert all("BEGIN CERTIFICATE" in member.certificate for member in group.members)
    assert [(calm.home / "island" / f"rank-{r}" / "saves").is_dir() for r in (0, 1)] == [True] * 2


def test_checkpoint_of_a_launch_is_exported(calm: Ended) -> None:
    target = calm.home / "weights.safetensors"

    done = CliRunner().invoke(app, ["export", str(calm.home / "state"), "-o", str(target)])

    assert done.exit_code == 0, done.output
    assert target.exists()
    assert calm.simulated["digest"] in done.output


def test_killed_process_brings_all_back_under_their_names_to_what_they_saved(killed: Ended) -> None:
    first, second = killed.groups
    lives = [[(m.worker_id, m.incarnation) for m in group.members] for group in (first, second)]

    assert [name for name, _ in lives[0]] == [name for name, _ in lives[1]]
    assert all(after > before for (_, before), (_, after) in zip(*lives, strict=True))
    assert (first.step, second.step) in [(0, 2), (0, 4)]
