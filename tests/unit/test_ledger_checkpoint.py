"""The ledger's write-ahead log: shortened by us, so that a failing disk is heard of."""

from pathlib import Path

import pytest

from atoll.errors import DiskFailed, StorageFull
from atoll.ledger import database, engines
from atoll.ledger.sqlite import database as sqlite_database
from tests.ledgers import alone

VALUE = "x" * 5000  # more than a page


def wal_bytes(path: Path) -> int:
    return path.with_name(f"{path.name}-wal").stat().st_size


def written(path: Path, *, times: int) -> int:
    """The longest that the log was while so many transactions were recorded."""
    engines.open_ledger(path).close()  # its tables are made, which is a long transaction of its own
    ledger = engines.open_ledger(path)
    try:
        sizes = []
        for number in range(times):
            alone(ledger).control.set({f"key-{number}": VALUE})
            sizes.append(wal_bytes(path))
        assert len(alone(ledger).control.all()) == times
        return max(sizes)
    finally:
        ledger.close()


def test_log_is_shortened_when_it_is_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_database, "CHECKPOINT_BYTES", 100_000)
    monkeypatch.setattr(sqlite_database, "CHECKPOINT_COMMITS", 4)

    assert written(tmp_path / "ledger.sqlite", times=60) < 200_000


def test_log_that_grows_is_shortened_whatever_the_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_database, "CHECKPOINT_BYTES", 100_000)

    assert written(tmp_path / "ledger.sqlite", times=60) < 300_000


def test_log_is_let_grow_until_then(tmp_path: Path) -> None:
    """The control: what keeps it short is the checkpoint."""
    assert written(tmp_path / "ledger.sqlite", times=60) > 600_000


def test_what_was_recorded_is_there_after_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_database, "CHECKPOINT_BYTES", 1)
    written(tmp_path / "ledger.sqlite", times=5)

    ledger = engines.open_ledger(tmp_path / "ledger.sqlite")

    assert alone(ledger).control.all() == {f"key-{number}": VALUE for number in range(5)}
    ledger.close()


@pytest.mark.parametrize(
    ("said", "error"),
    [("database or disk is full", StorageFull), ("disk I/O error", DiskFailed)],
)
def test_sqlite_says_what_the_disk_did(said: str, error: type[Exception]) -> None:
    found = database.translate(OverflowError(said), name="'ledger.sqlite'")

    assert type(found) is error
    assert "ledger.sqlite" in str(found)
