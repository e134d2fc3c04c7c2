"""A token crosses a network in plain text only when that was asked for, by name."""

import socket
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import atoll
from atoll.cli.app import app
from atoll.client.http import HttpClient
from atoll.errors import ConfigError, CoordinatorUnreachable
from atoll.island.link.network import NetworkLink
from atoll.protocol.messages import InfoRequest

TOKEN = "of-this-test-alone"
AWAY = (
    "http://coordinator:8760",
    "http://10.1.2.3:8760",
    "http://[2001:db8::1]:8760",
    "http://127.0.0.1.example.org:8760",
    "http://localhost.example.org:8760",
    "http://0.0.0.0:8760",
    "HTTP://coordinator:8760",
)
HERE = ("http://127.0.0.1:9", "http://127.8.9.10:9", "http://localhost:9", "http://[::1]:9")


@pytest.fixture(autouse=True)
def dialled(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every name that is looked up and every address that is dialled; none gets through."""
    found: list[object] = []

    def refuse(*told: object, **_: object) -> None:
        found.append(told)
        raise OSError("nobody dials in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return found


@pytest.mark.parametrize("url", AWAY)
def test_plain_url_of_another_machine_is_refused_before_anything_is_sent(
    url: str, dialled: list[object], tmp_path: Path
) -> None:
    for attempt in (
        lambda: HttpClient(url, token=TOKEN),
        lambda: NetworkLink(url, token=TOKEN),
        lambda: atoll.get_info(url, token=TOKEN),
        lambda: atoll.join(url, token=TOKEN, state=tmp_path / "island"),
    ):
        with pytest.raises(ConfigError, match=r"token in plain text .* --insecure") as refused:
            attempt()
        assert TOKEN not in str(refused.value)

    assert dialled == []
    assert not (tmp_path / "island").exists()


@pytest.mark.parametrize("url", [*HERE, AWAY[0].replace("http", "https")])
def test_loopback_and_https_need_no_word(url: str) -> None:
    """The control: what stays on the machine, or is encrypted, is dialled at once."""
    client = HttpClient(url, token=TOKEN)

    with pytest.raises(CoordinatorUnreachable):
        client.send(InfoRequest())


COMMANDS = [
    ["info", AWAY[0]],
    ["status", AWAY[0]],
    ["workers", AWAY[0]],
    ["work", AWAY[0]],
    ["pause", AWAY[0]],
    ["resume", AWAY[0]],
    ["stop", AWAY[0]],
    ["kick", AWAY[0], "isle"],
    ["allow", AWAY[0], "isle"],
    ["outer-lr", AWAY[0], "0.5"],
    ["join", AWAY[0], "--state", "STATE"],
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_command_refuses_plain_text_and_goes_on_with_insecure(
    words: list[str], dialled: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_TOKEN", TOKEN)
    given = [str(tmp_path / "island") if word == "STATE" else word for word in words]

    refused = CliRunner().invoke(app, given)

    assert isinstance(refused.exception, ConfigError), refused.output
    assert dialled == []
    if words[0] != "join":  # which asks again until there is an answer
        allowed = CliRunner().invoke(app, [*given, "--insecure"])
        assert isinstance(allowed.exception, CoordinatorUnreachable), allowed.output
        assert dialled != []


def test_every_command_with_a_url_is_in_the_table_above() -> None:
    """A new command that asks a coordinator is to be tried too."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    asking = {
        name for name, command in commands.items() if any(p.name == "url" for p in command.params)
    }

    of_directories = {"audit", "export"}  # which ask a live coordinator by the same `linked`
    assert asking - of_directories == {words[0] for words in COMMANDS}
