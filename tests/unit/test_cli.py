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

COMMANDS = (
    "serve",
    "join",
    "simulate",
    "status",
    "info",
    "audit",
    "repair",
    "export",
    "demo",
    "gradcheck",
)
OPERATORS = ("work", "workers", "pause", "resume", "stop", "kick", "allow", "outer-lr")
RUN_FILE = "examples/quickstart.toml"
NOBODY = ("http://127.0.0.1:9", "--token", "t")


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


@pytest.mark.parametrize("command", [*(c for c in COMMANDS if c != "serve"), *OPERATORS])
def test_command_that_reports_has_json(command):
    assert "--json" in CliRunner().invoke(app, [command, "--help"]).output


@pytest.mark.parametrize(
    "setting",
    ["--sync-every", "--lr", "--batch", "--codec", "--seed", "--heartbeat", "--threads"],
)
def test_island_has_no_flag_for_a_setting_of_the_run(setting):
    """The coordinator is the only authority."""
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


def test_strategy_that_is_a_library_is_refused_by_the_command(monkeypatch, capsys, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('name = "r"\nsync_every = 1\nstrategy = "pools"\n')

    assert run(monkeypatch, "simulate", path) == 2
    assert "strategy='pools' is a library" in " ".join(capsys.readouterr().err.split())


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("serve", RUN_FILE, "--port", "99999"), "--port 99999 is not between 0 and 65535"),
        (("serve", RUN_FILE, "--transfer-port", "-1"), "--transfer-port -1 is not between"),
        (("serve", RUN_FILE, "--log-level", "loud"), "--log-level 'loud' is not known"),
        (("simulate", "--faults", "1", "--islands", "0"), "--islands 0 is below 2"),
        (("simulate", "--faults", "1", "--rounds", "0"), "--rounds 0 is below 1"),
        (("simulate", "--faults", "1", "--dir", "d"), "--dir 'd' has no effect"),
        (("demo", "absent.toml"), "cannot read run file 'absent.toml'"),
        (("demo", RUN_FILE, "--islands", "1"), "--islands 1 is below membership.min_workers=2"),
        (("join", *NOBODY, "--device", "abacus"), "--device 'abacus' is not a device"),
        (("join", *NOBODY, "--worker-id", "a b"), "worker_id='a b' must be"),
        (("status", *NOBODY), "see that `atoll serve` runs there"),
    ],
)
def test_option_that_cannot_be_is_one_sentence_before_anything_begins(
    monkeypatch, capsys, words, said
):
    code = run(monkeypatch, *words)

    shown = capsys.readouterr()
    assert code == 2
    assert said in " ".join(shown.err.split())
    assert shown.out == ""


def test_device_that_torch_knows_and_this_machine_lacks_is_refused(monkeypatch, capsys):
    absent = "cuda:99"  # on any machine

    assert run(monkeypatch, "join", *NOBODY, "--device", absent) == 2
    assert f"--device {absent!r} is not a device" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("text", ['{"ledger": nul', "[]", '{"ledger": null}'])
def test_damaged_note_of_where_the_stores_are_is_named(monkeypatch, capsys, tmp_path, text):
    (tmp_path / "stores.json").write_text(text)

    for command in ("audit", "repair"):
        assert run(monkeypatch, command, tmp_path) == 2
        shown = " ".join(capsys.readouterr().err.split())
        assert "stores.json' does not say where" in shown
        assert "[STATE_DAMAGED]" in shown


def test_name_in_a_table_is_whole_where_there_is_no_terminal(capsys):
    """It is what `atoll kick` takes."""
    name = "n" * 64

    output.console.print(output.table(None, ("island", *"abcdefgh"), [(name, *["x" * 12] * 8)]))

    assert name in capsys.readouterr().out


@pytest.mark.parametrize("command", ["simulate", "demo"])
def test_directory_that_cannot_be_made_is_one_sentence(monkeypatch, capsys, tmp_path, command):
    (tmp_path / "file").write_text("")

    assert run(monkeypatch, command, RUN_FILE, "--dir", tmp_path / "file" / "state") == 2
    assert "cannot make" in capsys.readouterr().err


def test_note_of_where_the_stores_are_that_cannot_be_read_is_one_sentence(
    monkeypatch, capsys, tmp_path
):
    (tmp_path / "stores.json").mkdir()

    assert run(monkeypatch, "audit", tmp_path) == 2
    assert "cannot read" in capsys.readouterr().err
