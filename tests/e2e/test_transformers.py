"""A transformers config through real processes: the coordinator's data is all that a worker has."""

from pathlib import Path

import pytest

from atoll.launch import local
from tests import processes
from tests.processes import LIMIT_SECONDS, SMALL_DATA, TOKENS

ROUNDS = 2
START_SECONDS = 3 * LIMIT_SECONDS  # loading transformers takes long on a busy machine
RUN_FILE = f"""
name = "llama"
sync_every = 2

[model]
architecture = "transformers"

[model.config]
model_type = "llama"
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
vocab_size = 16
max_position_embeddings = 8
{SMALL_DATA}
[upload]
codec = "int8"

[download]
codec = "bf16"

[stop]
rounds = {ROUNDS}
"""

pytestmark = pytest.mark.xdist_group("own code")


def test_config_is_served_trained_and_audited_with_replay(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN_FILE)
    coordinator = local.start_coordinator(
        tmp_path / "run.toml", tmp_path / "coordinator", tokens=TOKENS
    )
    started = []
    try:
        coordinator.wait_ready(timeout_seconds=START_SECONDS)
        island = local.start_island(
            coordinator.url, tmp_path / "island", worker_id="island", tokens=TOKENS
        )
        started.append(island)
        ended = island.wait(timeout_seconds=START_SECONDS)
        served = coordinator.wait(timeout_seconds=LIMIT_SECONDS)
    finally:
        for process in (*started, coordinator):
            process.kill()

    assert (ended, served) == (0, 0), island.log_tail()
    records = processes.read(tmp_path / "coordinator")
    assert [c.worker_id for c in records.contributions] == ["island"] * ROUNDS
    assert all(c.norm > 0 for c in records.contributions)
    assert island.result()["digest"] == records.rounds[-1].published_digest
    report = processes.audit(tmp_path / "coordinator")
    assert (report["exit_code"], report["problems"]) == (0, [])
    assert report["replayed_rounds"] == ROUNDS
