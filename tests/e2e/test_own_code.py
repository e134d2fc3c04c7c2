"""A model that is the workers' own code, through real processes: `atoll join --model`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from atoll.launch import local
from atoll.launch.local import LocalCoordinator, LocalIsland
from tests import processes
from tests.processes import LIMIT_SECONDS, SMALL_DATA, TOKENS

CODE = """
import torch
from torch import nn


class Small(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.head = nn.Linear(width, 16, bias=False)  # not in the run's order
        self.embed = nn.Embedding(16, width)

    def forward(self, tokens):
        return self.head(torch.tanh(self.embed(tokens)))


def right():
    return Small()


def wrong():
    return Small(12)
"""
RUN_FILE = f"""
name = "own"
sync_every = 2

[model]
architecture = "custom"
tensors = [["embed.weight", "float32", [16, 8]], ["head.weight", "float32", [16, 8]]]
{SMALL_DATA}
[stop]
rounds = 1
"""
REFUSED = 2

pytestmark = pytest.mark.xdist_group("own code")


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[LocalCoordinator]:
    """Serves from a working directory that does not have the code."""
    (tmp_path / "run.toml").write_text(RUN_FILE)
    made = local.start_coordinator(tmp_path / "run.toml", tmp_path / "coordinator", tokens=TOKENS)
    try:
        made.wait_ready(timeout_seconds=LIMIT_SECONDS)
        yield made
    finally:
        made.kill()


@pytest.fixture
def code(coordinator: LocalCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The islands' working directory, with the code; entered after the coordinator started."""
    made = tmp_path / "code"
    made.mkdir()
    (made / "own_model.py").write_text(CODE)
    monkeypatch.chdir(made)
    return made


@contextmanager
def islands(url: str, home: Path, **models: str) -> Iterator[list[LocalIsland]]:
    """Islands by name with what they say to `--model` (nothing if empty), until they have ended."""
    started: list[LocalIsland] = []
    try:
        for name, model in models.items():
            options = ("--model", model) if model else ()
            started.append(
                local.start_island(url, home / name, worker_id=name, tokens=TOKENS, options=options)
            )
        for island in started:
            island.wait(timeout_seconds=LIMIT_SECONDS)
        yield started
    finally:
        for island in started:
            island.kill()


@pytest.mark.usefixtures("code")
def test_own_code_is_refused_or_trains_by_its_fingerprint(
    tmp_path: Path, coordinator: LocalCoordinator
) -> None:
    url = coordinator.url
    with islands(url, tmp_path, none="", wrong="own_model:wrong") as (none, wrong):
        refused = (none.popen.returncode, wrong.popen.returncode)
    with islands(url, tmp_path, right="own_model:right") as (right,):
        ended = (right.popen.returncode, coordinator.wait(timeout_seconds=LIMIT_SECONDS))

    assert refused == (REFUSED, REFUSED)
    assert "--model module:factory" in none.log_tail()
    assert "['embed.weight', 'float32', [16, 12]]" in wrong.log_tail()
    assert "['embed.weight', 'float32', [16, 8]]" in wrong.log_tail()
    assert ended == (0, 0), right.log_tail()
    records = processes.read(tmp_path / "coordinator")
    assert [*records.workers] == ["right"]  # of the others the coordinator holds nothing
    assert right.result()["digest"] == records.rounds[-1].published_digest
    assert processes.audit(tmp_path / "coordinator")["exit_code"] == 0
