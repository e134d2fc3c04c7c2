"""`atoll serve --reset`: what is dropped is shown first, kept aside, and a new run begins."""

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from atoll.cli import reset
from atoll.cli.options import ServeOptions
from atoll.cli.serve import serve
from atoll.coordinator.planes.server import Server
from atoll.errors import ConfigError, StateHeld, StoreError
from atoll.launch import reset as resetting
from atoll.launch import state
from atoll.ledger.sqlite import lock
from tests import clusters, damages, mounts
from tests.ledgers import alone

RUN_FILE = """
name = "again"
seed = 3
sync_every = 2
[model]
architecture = "gpt"
vocab = 16
block = 4
layers = 1
heads = 1
width = 8
[data]
kind = "synthetic"
seed = 1
rows = 100
held_out_rows = 2
block = 4
vocab = 16
[inner]
batch = 3
[membership]
min_workers = 2
[stop]
rounds = 1000
"""
TOKENS = {
    "ATOLL_WORKER_TOKEN": "worker-token-of-tests",
    "ATOLL_ADMIN_TOKEN": "admin-token-of-tests",
}


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in TOKENS.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE)
    return path


def served(run_file: Path, directory: Path, **options: Any) -> None:
    """Starts `atoll serve` in this process and ends it once it answers."""
    serve(
        ServeOptions(run_file=run_file, directory=directory, port=0, **options),
        signals=(),
        started=Server.stop,
    )


@pytest.fixture
def directory(run_file: Path, tmp_path: Path) -> Path:
    """A run that was created and stopped."""
    served(run_file, tmp_path / "state")
    return tmp_path / "state"


def run_id(directory: Path) -> str:
    with state.at_rest(directory) as (ledger, _):
        run = alone(ledger).run.get()
        assert run is not None
        return run.run_id


def credentials(directory: Path) -> dict[str, str]:
    with state.at_rest(directory) as (ledger, _):
        return alone(ledger).credentials.all()


def test_reset_shows_what_it_drops_and_starts_a_new_run(run_file, directory, capsys):
    old = run_id(directory)

    served(run_file, directory, reset=True, yes=True)

    shown = " ".join(capsys.readouterr().out.split())
    assert f"run {old}, 0 rounds, 0 contributions, 0 rows done, 0 tokens" in shown
    assert "starts from the run file's weights" in shown
    assert run_id(directory) != old


def test_old_state_is_kept_beside_the_directory(run_file, directory):
    old = run_id(directory)

    served(run_file, directory, reset=True, yes=True)
    second = run_id(directory)
    served(run_file, directory, reset=True, yes=True)

    assert run_id(directory.with_name("state.dropped-1")) == old
    assert run_id(directory.with_name("state.dropped-2")) == second


def test_purge_deletes_the_old_state(run_file, directory):
    served(run_file, directory, reset=True, purge=True, yes=True)

    assert not list(directory.parent.glob("state.dropped-*"))
    assert run_id(directory)


def test_tokens_stay_over_a_reset(run_file, directory, monkeypatch):
    before = credentials(directory)
    for name in TOKENS:
        monkeypatch.delenv(name)

    served(run_file, directory, reset=True, yes=True)

    assert credentials(directory) == before != {}


def test_reset_without_a_terminal_needs_yes(run_file, directory):
    old = run_id(directory)

    with pytest.raises(ConfigError, match="add --yes"):
        served(run_file, directory, reset=True)

    assert run_id(directory) == old


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.cli.reset.sys.stdin", TerminalInput())


class TerminalInput:
    """Somebody is there."""

    def isatty(self) -> bool:
        return True


def test_reset_confirmed_on_a_terminal_drops(run_file, directory, terminal, monkeypatch):
    monkeypatch.setattr("atoll.cli.reset.typer.confirm", lambda _: True)
    old = run_id(directory)

    served(run_file, directory, reset=True)

    assert run_id(directory) != old


def test_reset_denied_on_a_terminal_changes_nothing(run_file, directory, terminal, monkeypatch):
    monkeypatch.setattr("atoll.cli.reset.typer.confirm", lambda _: False)
    old = run_id(directory)

    with pytest.raises(ConfigError, match="not confirmed"):
        served(run_file, directory, reset=True)

    assert run_id(directory) == old


def test_reset_of_a_held_directory_is_refused(run_file, directory):
    held = closing(lock.hold(directory))
    with held, pytest.raises(StateHeld, match=f"process {os.getpid()}"):
        served(run_file, directory, reset=True, yes=True)

    assert not list(directory.parent.glob("state.dropped-*"))


def test_reset_of_nothing_says_so(run_file, tmp_path, capsys):
    served(run_file, tmp_path / "new", reset=True)

    assert "holds nothing to drop" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("option", ["keep_weights", "purge", "yes"])
def test_option_of_a_reset_without_it_is_refused(run_file, directory, option):
    with pytest.raises(ConfigError, match="is for --reset"):
        served(run_file, directory, **{option: True})


def test_stores_elsewhere_are_not_dropped(run_file, directory, tmp_path):
    run_file.write_text(RUN_FILE + f'[storage]\nblobs = "{tmp_path / "b"}"\n')

    with pytest.raises(ConfigError, match="elsewhere"):
        served(run_file, directory, reset=True, yes=True)


def test_stores_elsewhere_are_not_dropped_when_the_run_file_forgets_them(run_file, tmp_path):
    """What the directory was made with counts."""
    run_file.write_text(RUN_FILE + f'[storage]\nblobs = "{tmp_path / "b"}"\n')
    served(run_file, tmp_path / "far")
    run_file.write_text(RUN_FILE)

    with pytest.raises(ConfigError, match="elsewhere"):
        served(run_file, tmp_path / "far", reset=True, yes=True)

    assert not list(tmp_path.glob("far.dropped-*"))


@pytest.mark.parametrize("left", ["nothing", "a certificate"])
def test_weights_that_are_not_there_cannot_be_kept(run_file, directory, left):
    """Of a reset that was cut off and is asked for again: not the run file's weights instead."""
    old = run_id(directory)
    dropped = resetting.put_aside(directory)
    if left == "a certificate":
        (directory / "certificate.pem").write_text("kept")

    with pytest.raises(ConfigError, match="no weights to keep"):
        served(run_file, directory, reset=True, keep_weights=True, yes=True)

    assert run_id(dropped) == old
    assert not list(directory.parent.glob("state.dropped-2"))


def test_stores_count_from_the_run_file_wherever_it_is_started(run_file, tmp_path, monkeypatch):
    run_file.write_text(RUN_FILE + '[storage]\nblobs = "b"\nledger = "far.sqlite"\n')
    (tmp_path / "elsewhere").mkdir()
    ids = set()
    for place in (tmp_path, tmp_path / "elsewhere"):
        monkeypatch.chdir(place)
        served(run_file, tmp_path / "far")
        ids.add(run_id(tmp_path / "far"))

    assert len(ids) == 1
    assert (tmp_path / "far.sqlite").exists()
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("purge", [False, True])
def test_directory_behind_a_link_is_dropped_where_it_is(run_file, directory, tmp_path, purge):
    """The new run is on the same disk, and nothing is left of a state that was to be deleted."""
    old = run_id(directory)
    (tmp_path / "link").symlink_to(directory)

    served(run_file, tmp_path / "link", reset=True, purge=purge, yes=True)

    assert (tmp_path / "link").is_symlink()
    assert run_id(directory) != old
    assert [path.name for path in tmp_path.glob("*.dropped-*")] == (
        [] if purge else ["state.dropped-1"]
    )


def test_mounted_directory_is_not_dropped_and_named(run_file, tmp_path, skip):
    with mounts.small_disk(tmp_path / "disk", skip, nbytes=4 << 20) as disk:
        served(run_file, disk.path)
        old = run_id(disk.path)

        with pytest.raises(StoreError, match=r"cannot put aside '.*disk'"):
            served(run_file, disk.path, reset=True, yes=True)

        assert run_id(disk.path) == old


def test_damaged_state_can_be_dropped(run_file, directory, capsys):
    damages.zero_page(directory / "ledger.sqlite", 0)

    served(run_file, directory, reset=True, yes=True)

    assert "cannot be read" in " ".join(capsys.readouterr().out.split())
    assert run_id(directory)


def test_kept_weights_are_what_the_new_run_starts_from(tmp_path):
    """Of a run that was trained: its newest master, not what the run file draws."""
    cluster = damages.play(tmp_path / "state", rounds=2)
    digest, tensors = cluster.digest, cluster.manifest.model.definition["tensors"]
    cluster.close()
    given = clusters.run_file({"model": {"architecture": "custom", "tensors": tensors}})
    options = ServeOptions(run_file=tmp_path / "run.toml", keep_weights=True, yes=True)

    fresh = reset.reset(tmp_path / "state", given, options)

    assert fresh.run_file.start_from is not None
    assert fresh.run_file.start_from.parent == tmp_path / "state.dropped-1"
    kept = load_file(str(fresh.run_file.start_from))
    assert sum(tensor.numel() for tensor in kept.values()) == cluster.layout.size
    assert digest in fresh.run_file.start_from.read_bytes()[:4096].decode(errors="replace")


def test_reset_of_a_directory_that_is_not_a_runs_leaves_it_alone(run_file, tmp_path):
    other = tmp_path / "home"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")

    with pytest.raises(ConfigError, match="not a coordinator's state directory"):
        served(run_file, other, reset=True, purge=True, yes=True)

    assert [path.name for path in other.iterdir()] == ["thesis.txt"]
