"""A run whose creation was cut off between its initial weights and its record is created anew."""

from pathlib import Path

import pytest

from atoll.errors import ConfigError
from atoll.launch import state
from atoll.ledger.tables.run import RunTable
from tests.integration.test_reset import RUN_FILE, run_file, run_id, served  # noqa: F401
from tests.ledgers import alone
from tests.stored import is_stored


def cut(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.fixture
def left(run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: F811
    """What such a creation leaves: its weights, in blobs outside the directory."""
    run_file.write_text(RUN_FILE + f'[storage]\nblobs = "{tmp_path / "b"}"\n')
    with monkeypatch.context() as patched:
        patched.setattr(RunTable, "create", cut)
        with pytest.raises(KeyboardInterrupt):
            served(run_file, tmp_path / "state")
    assert len(list((tmp_path / "b").glob("??/*"))) == 1
    return tmp_path / "state"


def test_next_start_creates_the_run(run_file: Path, left: Path) -> None:  # noqa: F811
    served(run_file, left)

    assert run_id(left)
    with state.at_rest(left) as (ledger, blobs):
        run = alone(ledger).run.get()
        assert run is not None
        assert is_stored(blobs, run.initial_sha256)


def test_another_directory_is_refused_there(run_file: Path, left: Path) -> None:  # noqa: F811
    """The control."""
    with pytest.raises(ConfigError, match="already holds blobs"):
        served(run_file, left.with_name("another"))
