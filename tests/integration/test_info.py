"""What a coordinator says about its run: complete, never null, and the same for every reader."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import atoll
from atoll import cli
from atoll.coordinator.planes.access import Role
from atoll.errors import CoordinatorUnreachable, Unauthenticated
from atoll.protocol.manifest import Manifest
from atoll.protocol.messages import InfoRequest
from tests import served as kit
from tests.settings import leaves

TOKEN = kit.TOKENS[Role.WORKER]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kit.Served]:
    with kit.serving(tmp_path_factory.mktemp("info")) as made:  # as few settings as a file may have
        yield made


@pytest.fixture
def body(served: kit.Served) -> dict[str, Any]:
    return served.link().send(InfoRequest()).model_dump(mode="json")


def values(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Every value in a JSON document, within lists and definitions too."""
    match value:
        case dict():
            for name, item in value.items():
                yield from values(item, f"{path}.{name}")
        case list():
            for index, item in enumerate(value):
                yield from values(item, f"{path}[{index}]")
        case _:
            yield path, value


def test_info_has_no_null(body):
    assert [path for path, value in values(body) if value is None] == []


def test_info_states_every_setting(body, served):
    settings = served.coordinator.manifest.model_dump(mode="json")

    assert {name: body[name] for name in settings} == settings
    assert len(list(leaves(settings))) > 50


@pytest.mark.parametrize(
    "name",
    [
        "settings_authority",
        "sync_every",
        "num_fragments",
        "upload",
        "download",
        "dylu",
        "heartbeat_interval",
        "heartbeat_timeout",
        "outer",
        "inner",
        "model",
        "data",
        "protocol_version",
        "manifest_version",
        "model_hash",
        "run_id",
        "manifest_sha256",
    ],
)
def test_info_states_what_a_worker_needs(body, name):
    assert body[name] is not None


def test_info_says_who_decides_and_which_run_model_and_manifest_it_is(body, served):
    coordinator = served.coordinator

    assert body["settings_authority"] == "server"
    assert body["run_id"] == coordinator.run_id
    assert body["model_hash"] == coordinator.layout.digest == body["model"]["layout_digest"]
    assert body["manifest_sha256"] == coordinator.manifest.sha256()


def test_info_hashes_to_what_it_says(body):
    settings = Manifest.model_validate({name: body[name] for name in Manifest.model_fields})

    assert settings.sha256() == body["manifest_sha256"]


def test_library_gets_the_same_info(body, served):
    found = atoll.get_info(served.url, token=TOKEN)

    assert found.model_dump(mode="json") == body


def test_library_asks_once_and_says_who_does_not_answer():
    with pytest.raises(CoordinatorUnreachable):
        atoll.get_info("http://127.0.0.1:9", token=TOKEN)


def test_library_needs_a_token(served):
    with pytest.raises(Unauthenticated):
        atoll.get_info(served.url, token="no-token-of-this-run")


def shown(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["atoll", "info", *arguments])
    with pytest.raises(SystemExit) as done:
        cli.main()
    assert isinstance(done.value.code, int)
    return done.value.code


def test_command_prints_the_same_info_as_json(monkeypatch, capsys, body, served):
    before = served.coordinator.state_hash()

    code = shown(monkeypatch, served.url, "--token", TOKEN, "--json")

    assert code == 0
    assert json.loads(capsys.readouterr().out) == body
    assert served.coordinator.state_hash() == before


def test_command_shows_every_setting_to_a_person(monkeypatch, capsys, body, served):
    code = shown(monkeypatch, served.url, "--token", TOKEN)
    lines = capsys.readouterr().out.splitlines()

    assert code == 0
    wanted = [name for name, _ in leaves(body)]
    missing = [n for n in wanted if not any(n in line for line in lines)]
    assert missing == []
