"""`atoll demo` as its user sees it where there is no terminal: a line a round, to the last."""

import json
import re
from typing import Any

import pytest
from typer.testing import CliRunner

from atoll.cli import demo, output
from atoll.cli.app import app
from tests import processes

ROUND = re.compile(r"round +(\d+): train loss (\S+), held-out loss (\S+)")
# Between two looks the islands end: what is shown must not depend on when the demo looks.
POLL_SECONDS = 4.0


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The summary and the lines on stderr of a tiny run, evaluated every second round."""
    run_file = processes.BF16.write(tmp_path_factory.mktemp("demo") / "run.toml")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(demo, "POLL_SECONDS", POLL_SECONDS)
        done = CliRunner().invoke(app, ["demo", str(run_file), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout), done.stderr


def test_demo_shows_every_evaluated_round_once_and_the_last_one_too(shown):
    _, lines = shown

    rounds = [int(number) for number, _, _ in ROUND.findall(lines)]

    assert rounds == list(range(2, processes.ROUNDS + 1, 2))


def test_last_line_has_the_whole_runs_held_out_loss(shown):
    """The last evaluation is whole only when every island has left."""
    summary, lines = shown

    *_, (_, _, held_out) = ROUND.findall(lines)

    assert held_out == output.number(summary["loss_last"])


def test_demo_ends_with_a_clean_audit(shown):
    summary, _ = shown

    assert (summary["rounds"], summary["audit_clean"]) == (processes.ROUNDS, True)
