"""`atoll serve --new-manifest`: what the command records and says."""

from dataclasses import replace
from pathlib import Path

import pytest

from atoll.cli.options import ServeOptions
from atoll.client.info import get_info
from atoll.coordinator.planes.access import Role
from atoll.errors import ConfigError
from atoll.ledger import engines
from atoll.protocol.messages import Info
from tests.commanded import commanded, options_in, port_of
from tests.ledgers import alone
from tests.served import TOKENS


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServeOptions:
    monkeypatch.setenv("ATOLL_WORKER_TOKEN", TOKENS[Role.WORKER])
    monkeypatch.setenv("ATOLL_ADMIN_TOKEN", TOKENS[Role.ADMIN])
    made = replace(options_in(tmp_path), host="127.0.0.1")
    with commanded(made):
        pass
    return made


def info_of(options: ServeOptions) -> Info:
    return get_info(f"http://127.0.0.1:{port_of(options)}", token=TOKENS[Role.WORKER])


def rewrite(options: ServeOptions, old: str, new: str) -> None:
    text = options.run_file.read_text()
    assert old in text
    options.run_file.write_text(text.replace(old, new))


def versions(options: ServeOptions) -> list[tuple[int, int]]:
    assert options.directory is not None
    ledger = engines.open_ledger(options.directory / "ledger.sqlite")
    found = [(m.version, m.from_round) for m in alone(ledger).manifests.all()]
    ledger.close()
    return found


def test_changed_file_is_refused_without_the_flag(options):
    rewrite(options, "sync_every = 1", "sync_every = 4")

    with (
        pytest.raises(ConfigError, match=r"sync_every: 1 -> 4; .*--new-manifest"),
        commanded(options),
    ):
        pass

    assert versions(options) == [(1, 1)]


def test_changed_file_is_recorded_and_served_with_the_flag(options, capsys):
    rewrite(options, "sync_every = 1", "sync_every = 4")

    with commanded(replace(options, new_manifest=True)):
        info = info_of(options)

    assert (info.sync_every, info.manifest_version) == (4, 2)
    assert "manifest version 2 is in force from round 1 on" in capsys.readouterr().out
    assert versions(options) == [(1, 1), (2, 1)]


def test_unchanged_file_says_so_and_goes_on(options, capsys):
    with commanded(replace(options, new_manifest=True)):
        info = info_of(options)

    assert info.manifest_version == 1
    assert "the run file has not changed; manifest version 1 stays" in capsys.readouterr().out
    assert versions(options) == [(1, 1)]


def test_rounds_of_more_epochs_than_a_frame_can_name_are_refused(options, tmp_path):
    """At the start of a run and in a later version: its islands could never hand one in."""
    rewrite(options, "sync_every = 1", "sync_every = 100000")
    new = replace(options, directory=tmp_path / "new")

    for refused in (replace(options, new_manifest=True), new):
        with (
            pytest.raises(ConfigError, match="800 epochs of a dataset of 1000 rows"),
            commanded(refused),
        ):
            pass

    assert versions(options) == [(1, 1)]
