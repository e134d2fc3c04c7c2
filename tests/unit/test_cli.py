"""The command line without a network: what it lists, and how it refuses."""

import json
import signal
import sys

import pytest
from typer.testing import CliRunner

from atoll import cli
from atoll.cli import output, stopping
from atoll.cli.app import app
from atoll.errors import ConfigError

COMMANDS = ("serve", "join", "simulate", "status", "info", "audit", "repair", "export", "demo")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit code of `atoll ARGUMENTS` in this process."""
    monkeypatch.setattr(sys, "argv", ["atoll", *map(str, arguments)])
    handlers = {number: signal.getsignal(number) for number in stopping.SIGNALS}
    with pytest.raises(SystemExit) as done:
        cli.main()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert isinstance(done.value.code, int), done.value.code
    return done.value.code


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_every_command(command):
    assert f"  {command} " in CliRunner().invoke(app, ["--help"]).output


@pytest.mark.parametrize("command", COMMANDS)
def test_command_explains_itself(command):
    result = CliRunner().invoke(app, [command, "--help"])

    assert result.exit_code == 0
    assert "Usage:" in result.output


@pytest.mark.parametrize(
    "command", ["simulate", "status", "info", "audit", "repair", "export", "join", "demo"]
)
def test_command_that_reports_has_json(command):
    assert "--json" in CliRunner().invoke(app, [command, "--help"]).output


@pytest.mark.parametrize(
    "setting",
    ["--sync-every", "--lr", "--batch", "--codec", "--seed", "--heartbeat", "--threads"],
)
def test_island_has_no_flag_for_a_setting_of_the_run(setting):
    """C14: the coordinator is the only authority."""
    assert setting not in CliRunner().invoke(app, ["join", "--help"]).output


def test_version_is_shown(monkeypatch, capsys):
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.startswith("atoll 0.")


def test_refusal_is_one_sentence_on_stderr_and_exit_code_2(monkeypatch, capsys, tmp_path):
    code = run(monkeypatch, "simulate", tmp_path / "absent.toml")

    shown = capsys.readouterr()
    assert code == 2
    assert shown.out == ""
    assert "absent.toml" in shown.err
    assert "Traceback" not in shown.err


def test_setting_that_is_not_built_is_refused_by_the_command(monkeypatch, capsys, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('name = "r"\nsync_every = 1\nmode = "async"\n')

    assert run(monkeypatch, "simulate", path) == 2
    assert "mode='async' is not built" in " ".join(capsys.readouterr().err.split())


def test_audit_of_a_directory_without_a_run_names_it(monkeypatch, capsys, tmp_path):
    assert run(monkeypatch, "audit", tmp_path) == 2
    assert "is not a coordinator's state directory" in " ".join(capsys.readouterr().err.split())


def test_unknown_command_is_refused(monkeypatch, capsys):
    assert run(monkeypatch, "tarin") == 2
    assert "tarin" in capsys.readouterr().err


def test_what_workers_say_is_shown_and_never_obeyed(capsys):
    """A hostname is any text: it may look like markup, or hold what moves a cursor."""
    said = "[/red]\x1b[2J"

    output.console.print(output.table(said, ("host",), [(said,)]))
    output.say(said)
    output.complain(ConfigError(said))

    shown = capsys.readouterr()
    assert shown.out.count(r"[/red]\x1b[2J") == 3
    assert r"[/red]\x1b[2J" in shown.err
    assert "\x1b[2J" not in shown.out + shown.err


def test_json_output_is_one_object(capsys):
    output.print_json({"b": 1, "a": [1.5, None]})

    assert json.loads(capsys.readouterr().out) == {"a": [1.5, None], "b": 1}


def test_complaint_names_the_reason(capsys):
    output.complain(ConfigError("sync_every=0 must be positive"))

    assert "sync_every=0 must be positive" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["absent/ready.json", "."])
def test_ready_file_that_cannot_be_made_is_refused_before_anything_is_opened(
    monkeypatch, capsys, tmp_path, target
):
    code = run(
        monkeypatch,
        *("serve", "examples/quickstart.toml", "--dir", tmp_path / "state"),
        *("--ready-file", tmp_path / target),
    )

    shown = " ".join(capsys.readouterr().err.split())
    assert code == 2
    assert "--ready-file" in shown
    assert "Traceback" not in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("target", "rule"), [("absent/m.safetensors", "make it first"), (".", "is a directory")]
)
def test_export_to_where_no_file_can_be_is_refused_before_the_run_is_read(
    monkeypatch, capsys, tmp_path, target, rule
):
    code = run(monkeypatch, "export", tmp_path / "no-run", "-o", tmp_path / target)

    shown = " ".join(capsys.readouterr().err.split())
    assert code == 2
    assert rule in shown
    assert list(tmp_path.iterdir()) == []
