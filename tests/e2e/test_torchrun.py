"""Islands of two ranks, started by torchrun: one displacement, one error, one end for all ranks."""

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from torch import Tensor

from atoll.blobs.directory import DirectoryBlobs
from atoll.coordinator.planes.access import Role
from atoll.island import trainer
from atoll.launch import joining
from atoll.versions import weights
from tests import served, torchruns
from tests.processes import FAULTS, eventually
from tests.served import TOKENS, Served
from tests.torchruns import TorchrunGroup

pytestmark = pytest.mark.usefixtures("one_thread")

RANKS = Path(__file__).parents[1] / "ranks"
ROUNDS = 4
TOLERANCE = 1e-5  # of the displacement's largest element
REFUSED_SECONDS = 10.0
END_SECONDS = 20.0  # torchrun would kill after 30

# 33 and 9 rows: shards of two ranks are not equal either.
SIZE = {"architecture": "gpt", "vocab": 33, "block": 9, "layers": 2, "heads": 2, "width": 8}
DATA = {"kind": "synthetic", "seed": 1, "rows": 500, "held_out_rows": 5, "block": 8, "vocab": 32}
# One position: of its row the second of two ranks has nothing.
SHORT = {"model": {**SIZE, "block": 1}, "data": {**DATA, "block": 1}}
# Plain SGD: Adam divides rounding errors of tiny gradients by themselves.
UNEVEN = {"optimizer": "sgd", "lr": 0.5, "momentum": 0.9, "batch": 3, "clip": 0.5}
ONE_ROW = {**UNEVEN, "batch": 1}
# Which island trains with what; `naive` is the control.
TRAINED: dict[str, dict[str, Any]] = {
    "ddp": UNEVEN,
    "fsdp2": UNEVEN,
    "naive": UNEVEN,
    "fsdp2 short": UNEVEN,
    "ddp one row": ONE_ROW,
    "fsdp2 one row": ONE_ROW,
    "ddp streaming": UNEVEN,
    "fsdp2 streaming": UNEVEN,
    "one streaming": UNEVEN,
    "one": UNEVEN,
    "one one row": ONE_ROW,
    "one short": UNEVEN,
    "ddp adamw": {"batch": 3},
    "fsdp2 adamw": {"batch": 3},
}
# Fragments that are merged, half and half, in the middle of the round after next.
STREAMING = {
    "mode": "streaming",
    "sync_every": 4,
    "num_fragments": 2,
    "delay_steps": 3,
    "local_weight": 0.5,
}
OF_CASE: dict[str, dict[str, Any]] = {"short": SHORT, "streaming": STREAMING}


def settings(inner: dict[str, Any]) -> dict[str, Any]:
    return {
        "sync_every": 3,
        "model": SIZE,
        "data": DATA,
        "inner": inner,
        "upload": {"codec": "fp32" if inner.get("optimizer") == "sgd" else "bf16"},
        "evaluate": {"every": 1},
        "stop": {"rounds": ROUNDS},
    }


def flat(run: Served) -> Tensor:
    """The run's weights now."""
    blobs = DirectoryBlobs(run.directory / "blobs")
    snapshot = run.coordinator.weights.snapshot()
    return weights.load(blobs, snapshot.master_sha256, run.coordinator.layout)


@dataclass(frozen=True)
class Trained:
    """What an island's run came to."""

    displacement: Tensor
    digests: list[str | None]  # of every version
    train_losses: list[float | None]
    held_out_losses: list[float | None]


def outcome(run: Served, before: Tensor) -> Trained:
    status = run.coordinator.status()
    return Trained(
        flat(run) - before,
        [r.digest for r in status.history],
        [r.train_loss for r in status.history if r.round],
        [r.evaluation_loss for r in status.history if r.round],
    )


@dataclass(frozen=True)
class Runs:
    """All of them, and what each rank of the group wrote."""

    trained: dict[str, Trained]
    ranks: dict[int, dict[str, Any]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The runs of one torchrun group, and those of one process on the joined batch."""
    home = tmp_path_factory.mktemp("trained")
    with ExitStack() as stack:
        open_runs = {
            name: stack.enter_context(
                served.serving(
                    home / name.replace(" ", "-"),
                    **{**settings(inner), **OF_CASE.get(name.rpartition(" ")[2], {})},
                )
            )
            for name, inner in TRAINED.items()
        }
        before = {name: flat(run) for name, run in open_runs.items()}
        words = [str(RANKS / "trains.py"), str(home)]
        for name, run in open_runs.items():
            if not name.startswith("one"):
                words += [name.partition(" ")[0], run.url]
        group = stack.enter_context(torchruns.torchrun(words, home / "group.log"))
        for name in ("one", "one one row", "one short", "one streaming"):
            alone(open_runs[name], home / f"state of {name}")
        assert group.wait() == 0
        trained = {name: outcome(run, before[name]) for name, run in open_runs.items()}
        return Runs(trained, torchruns.results(home))


def alone(run: Served, state: Path) -> None:
    """The same island as one process, in this one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    joined = joining.join(run.url, token=TOKENS[Role.WORKER], worker_id="island", state=state)
    try:
        trainer.train(joined)
    finally:
        joined.release()
        torch.set_num_threads(before)


def difference(found: Trained, expected: Trained) -> float:
    """Largest difference of two displacements, over the largest element."""
    apart = (found.displacement - expected.displacement).abs().max()
    return float(apart / expected.displacement.abs().max())


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("case", ["", " one row", " streaming"])
def test_two_ranks_contribute_the_displacement_of_one_on_the_joined_batch(runs, kind, case):
    assert difference(runs.trained[f"{kind}{case}"], runs.trained[f"one{case}"]) <= TOLERANCE


def test_tensor_with_fewer_rows_than_ranks_is_trained_as_by_one_process(runs):
    found, expected = runs.trained["fsdp2 short"], runs.trained["one short"]

    assert difference(found, expected) <= TOLERANCE
    assert found.held_out_losses == pytest.approx(expected.held_out_losses, rel=1e-5)


def test_plain_mean_of_unequal_slices_is_another_displacement(runs):
    """The control: what DDP does by itself fails the same check."""
    assert difference(runs.trained["naive"], runs.trained["one"]) > 100 * TOLERANCE


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("case", ["", " one row", " streaming"])
def test_losses_are_over_the_tokens_of_all_ranks(runs, kind, case):
    found, expected = runs.trained[f"{kind}{case}"], runs.trained[f"one{case}"]

    assert found.train_losses == pytest.approx(expected.train_losses, rel=1e-5)
    # Of versions that a later one replaced before they were here, streaming islands tell none.
    shown = slice(-1 if case == " streaming" else 0, None)
    held_out = found.held_out_losses[shown], expected.held_out_losses[shown]
    assert held_out[0] == pytest.approx(held_out[1], rel=1e-5)


def test_every_rank_ends_with_the_published_version(runs):
    first = runs.ranks[0]["runs"]

    assert runs.ranks[1]["runs"] == first
    assert {run["version"] for run in first} == {ROUNDS}
    assert first[0]["digest"] == runs.trained["ddp"].digests[-1]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_buffers_are_the_leaders_on_every_rank(runs, kind):
    found = [runs.ranks[rank]["buffers"][kind] for rank in (0, 1)]

    assert found == [[5.0, 5.0, 7.0]] * 2


# Refusals


@contextmanager
def another_protocol(url: str) -> Iterator[str]:
    """A coordinator that says it speaks another protocol version."""
    token = {"Authorization": f"Bearer {TOKENS[Role.WORKER]}"}
    info = httpx.get(f"{url}/info", headers=token).json() | {"protocol_version": 99}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = httpx.Response(200, json=info).content
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    home = tmp_path_factory.mktemp("refused")
    with (
        served.serving(home / "run", **settings(UNEVEN)) as run,
        another_protocol(run.url) as other,
        torchruns.torchrun(
            [str(RANKS / "refused.py"), str(home), run.url, other], home / "group.log"
        ) as group,
    ):
        assert group.wait() == 0
        return torchruns.results(home)


@pytest.mark.parametrize(
    ("case", "kind", "names"),
    [
        ("token", "Unauthenticated", "token"),
        ("protocol", "VersionMismatch", "protocol_version=99"),
        ("model", "LayoutMismatch", "tokens.weight"),
        ("ddp model of the follower", "LayoutMismatch", "'tokens.weight'"),
        ("fsdp2 model of the follower", "LayoutMismatch", "'tokens.weight'"),
        ("data", "DatasetMismatch", "data.rows"),
        ("data of the follower", "ManifestMismatch", "data.rows of rank 1"),
        ("unwrapped", "ConfigError", "DistributedDataParallel"),
        ("halved gradients", "NotSummed", "0.5 of the sum"),
    ],
)
def test_every_rank_raises_the_same_named_refusal(refusals, case, kind, names):
    found = [refusals[rank][case] for rank in (0, 1)]

    assert [one["type"] for one in found] == [kind, kind]
    assert found[0]["code"] == found[1]["code"]
    assert all(names in one["message"] for one in found)
    assert max(one["seconds"] for one in found) < REFUSED_SECONDS


@pytest.mark.parametrize(
    ("case", "kinds", "words"),
    [
        ("interrupt", ("KeyboardInterrupt", "KeyboardInterrupt"), ""),
        ("conflict", ("Conflict", "Conflict"), "other bytes"),
        ("unreachable", ("CoordinatorUnreachable", "CoordinatorUnreachable"), "nobody answers"),
        ("foreign", ("ValueError", "AtollError"), "no such thing"),
        ("too long", ("ProtocolError", "ProtocolError"), "an outcome of"),
        ("patient", ("AtollError", "AtollError"), "the leader was done"),
    ],
)
def test_what_the_leader_meets_is_met_by_every_rank(refusals, case, kinds, words):
    found = [refusals[rank][case] for rank in (0, 1)]

    assert tuple(one["type"] for one in found) == kinds
    assert all(words in one["message"] for one in found)


def test_rank_that_is_late_is_named(refusals):
    found = refusals[0]["late"]

    assert found["type"] == "GroupBroken"
    assert "Ranks 1 failed to pass monitoredBarrier" in found["message"]


# Deaths and signals


@dataclass
class Held:
    """An `atoll join` under torchrun whose leader stands still in the rounds that are asked for."""

    group: TorchrunGroup
    folder: Path

    def wait(self, round_number: int) -> None:
        eventually(f"round {round_number}", (self.folder / f"held-{round_number}").exists)

    def release(self, *rounds: int) -> None:
        for number in rounds:
            (self.folder / f"release-{number}").touch()


@contextmanager
def joined(
    run: Served, home: Path, *, kind: str, hold: str = "", restarts: int = 0
) -> Iterator[Held]:
    """`torchrun -m atoll join`; with `hold`, by way of the launcher that stands still there."""
    folder = home / "failpoints"
    folder.mkdir(exist_ok=True)
    (folder / "go.json").write_text("[]")
    held = [str(FAULTS / "island_with_failpoint.py"), hold, str(folder)]
    words = [*(held if hold else ("-m", "atoll")), "join", run.url, "--worker-id", "island"]
    words += ["--state", str(home / "state"), "--parallel", kind]
    options = ["--max-restarts", str(restarts)]
    with torchruns.torchrun(words, home / f"group-{hold}.log", options=options) as group:
        yield Held(group, folder)


def test_killed_follower_brings_the_group_down_and_its_restart_loses_nothing(runs, tmp_path):
    """Then SIGTERM ends all ranks together, and the coordinator hears of it."""
    with (
        served.serving(tmp_path / "run", **settings(TRAINED["ddp adamw"])) as run,
        joined(run, tmp_path, kind="ddp", hold="hold@2,hold@3", restarts=1) as held,
    ):
        held.wait(2)
        held.group.ranks()[1].kill()
        held.release(2)
        held.wait(3)
        status, ranks = run.coordinator.status(), held.group.ranks()
        held.group.popen.send_signal(signal.SIGTERM)
        held.release(3)
        _, alive = psutil.wait_procs(ranks.values(), END_SECONDS)

        assert not alive
        assert "[GROUP_BROKEN]" in held.group.log()
        assert "left; the same command brings it back" in held.group.log()
        assert [r.digest for r in status.history] == runs.trained["ddp adamw"].digests[:3]
        assert not run.coordinator.status().workers[0].live


def test_killed_group_continues_exactly(runs, tmp_path):
    with served.serving(tmp_path / "run", **settings(TRAINED["fsdp2 adamw"])) as run:
        with joined(run, tmp_path, kind="fsdp2", hold="hold@3") as held:
            held.wait(3)
            held.group.kill_all()
        with joined(run, tmp_path, kind="fsdp2") as held:
            assert held.group.wait() == 0
            assert "dropped" not in held.group.log()

        assert run.coordinator.status().digest == runs.trained["fsdp2 adamw"].digests[-1]
