"""The operator's commands as typed: what they print, what they change, who may use them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from atoll.cli.app import app
from atoll.coordinator.planes.access import Role
from atoll.errors import AtollError, Forbidden, UnknownWorker
from tests import served
from tests.served import TOKENS, Served


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served.serving(tmp_path_factory.mktemp("commands") / "state") as running:
        yield running


def typed(serving: Served, *words: str, role: Role = Role.ADMIN) -> str:
    """What a command prints; the error it ends with is raised."""
    command, *rest = words
    given = [command, "--token", TOKENS[role], serving.url, *rest]
    result = CliRunner().invoke(app, given)
    if isinstance(result.exception, AtollError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def answered(serving: Served, *words: str) -> Any:
    return json.loads(typed(serving, *words, "--json"))


def test_workers_shows_rank_state_and_who_is_missing(serving):
    serving.worker("alice")

    found = answered(serving, "workers")

    [alice] = [w for w in found["workers"] if w["worker_id"] == "alice"]
    assert (alice["state"], alice["incarnation"]) == ("live", 1)
    assert alice["rank"] is not None
    assert "alice" in typed(serving, "workers")


def test_pause_and_resume_are_in_force_and_say_who_does_not_know_yet(serving):
    serving.worker("bob")

    paused = answered(serving, "pause")
    assert paused["command"]["action"] == "pause"
    assert "bob" in paused["missing"]
    assert "pauses once the round under way is closed" in typed(serving, "pause")

    assert answered(serving, "resume")["command"]["action"] == "run"
    assert serving.coordinator.control().command.action == "run"


def test_kicked_worker_stays_out_until_it_is_allowed(serving):
    carol = serving.worker("carol")

    assert answered(serving, "kick", "carol")["kicked"] == ["carol"]
    with pytest.raises(Forbidden, match="carol"):
        carol.register()
    assert answered(serving, "allow", "carol")["kicked"] == []
    carol.register()


def test_kick_of_a_stranger_is_refused_by_name(serving):
    with pytest.raises(UnknownWorker, match="nobody"):
        typed(serving, "kick", "nobody")


def test_outer_lr_is_a_manifest_version_from_a_later_round(serving):
    reply = answered(serving, "outer-lr", "0.25")

    assert reply["lr"] == 0.25
    newest = serving.coordinator.manifests.newest
    assert (newest.manifest.outer.lr, newest.from_round) == (0.25, reply["from_round"])
    assert newest.sha256 == reply["manifest_sha256"]


@pytest.mark.parametrize("lr", ["0", "nan", "inf", "1e308"])
def test_outer_lr_that_breaks_its_rule_is_refused_and_records_nothing(serving, lr):
    before = serving.coordinator.state_hash()

    with pytest.raises(AtollError, match="lr"):
        typed(serving, "outer-lr", lr)

    assert serving.coordinator.state_hash() == before


@pytest.mark.parametrize(
    "words",
    [["pause"], ["resume"], ["stop"], ["kick", "alice"], ["allow", "alice"], ["outer-lr", "1"]],
    ids=lambda words: words[0],
)
def test_commands_need_the_admin_token(serving, words):
    before = serving.coordinator.state_hash()

    with pytest.raises(Forbidden):
        typed(serving, *words, role=Role.WORKER)

    assert serving.coordinator.state_hash() == before


def test_work_shows_the_queues_to_either_role(serving):
    for name in ("wendy", "walter"):
        serving.worker(name)

    found = answered(serving, "work")

    [dataset], [queue] = found["datasets"], found["queues"]
    assert (found["policy"], dataset["epoch"], dataset["current"]) == ("exactly_once", 0, True)
    assert queue["rows_leased"] == sum(w["leased"] for w in queue["workers"]) > 0
    assert dataset["name"] in typed(serving, "work", role=Role.WORKER)
