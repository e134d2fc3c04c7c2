"""Every ledger as a whole: its state's hash, its copy, its one holder."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll import errors
from atoll.ledger import copies, engines
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import EvaluationRecord, SnapshotRecord
from atoll.ledger.tables import schema
from tests import mounts
from tests.ledgers import STATE_OF_PLAY, alone, play


def test_ledger_has_the_same_state_when_opened_again(url: str):
    first = engines.open_ledger(url)
    play(first)
    before = first.state_hash()
    first.close()

    again = engines.open_ledger(url)

    assert again.state_hash() == before
    again.close()


def test_state_hash_of_one_history_is_the_same_on_every_engine(ledger: Ledger):
    play(ledger)

    assert ledger.state_hash() == STATE_OF_PLAY


def test_play_leaves_rows_in_every_table(url: str):
    ledger = engines.open_ledger(url)
    play(ledger)
    ledger.close()

    database = engines.open_database(url)
    with database.reading() as connection:
        counts = {
            name: len(connection.rows(schema.STATEMENTS[name].all))
            for name in schema.metadata.tables
        }
    database.close()

    assert min(counts.values()) > 0, counts


ONE_MORE = [
    lambda ledger: alone(ledger).credentials.set({"worker": "x"}),
    lambda ledger: alone(ledger).members.register("new", "key", wall=0.0),
    lambda ledger: alone(ledger).members.deregister("a", 1, wall=0.0),
    lambda ledger: alone(ledger).snapshots.drop_below(1),
    lambda ledger: alone(ledger).snapshots.add(SnapshotRecord(9, "m", "p", ())),
    lambda ledger: alone(ledger).evaluations.add(EvaluationRecord(9, "a", 0.0, 1)),
]


@pytest.mark.parametrize("change", ONE_MORE)
def test_state_hash_differs_after_any_change(ledger: Ledger, change: Callable[[Ledger], None]):
    play(ledger)

    change(ledger)

    assert ledger.state_hash() != STATE_OF_PLAY


def test_copy_on_a_full_disk_is_whole_or_none(ledger: Ledger, tmp_path: Path, skip):
    """Whatever the room: at some sizes a copy fits its log and not its file."""
    play(ledger)
    state, refused = ledger.state_hash(), 0
    with mounts.small_disk(tmp_path / "disk", skip, nbytes=4 << 20) as disk:
        for room in range(0, 2 << 20, 32 << 10):
            disk.fill()
            with (disk.path / "filler").open("r+b") as filler:
                filler.truncate(filler.seek(0, os.SEEK_END) - room)
            try:
                ledger.copy_to(str(disk.path / "copy.db"))
                break
            except errors.StoreError:
                refused += 1
                assert [path.name for path in disk.path.iterdir()] == ["filler"]
            finally:
                disk.free()
        shutil.copyfile(disk.path / "copy.db", tmp_path / "taken.db")  # the copy is that one file
    taken = engines.open_ledger(tmp_path / "taken.db")

    assert refused > 1
    assert taken.state_hash() == state
    taken.close()


def test_copy_opens_as_a_ledger_with_the_same_state(ledger: Ledger, tmp_path: Path):
    play(ledger)
    path = tmp_path / "copy.db"

    ledger.copy_to(str(path))

    copied = engines.open_ledger(path)
    assert copied.state_hash() == ledger.state_hash()
    assert copied.damage() == []
    copied.close()


def test_copy_to_an_existing_file_is_refused_and_leaves_it_alone(ledger: Ledger, tmp_path: Path):
    path = tmp_path / "taken.db"
    path.write_bytes(b"precious")

    with pytest.raises(errors.StoreError, match=r"taken\.db"):
        ledger.copy_to(str(path))

    assert path.read_bytes() == b"precious"


def test_copy_into_an_absent_directory_is_refused_by_name(ledger: Ledger, tmp_path: Path):
    with pytest.raises(errors.StoreError, match="absent"):
        ledger.copy_to(str(tmp_path / "absent" / "copy.db"))


def break_disk(*_: object) -> None:
    raise OSError(5, "Input/output error")


def test_copy_that_breaks_off_leaves_no_file(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # The last thing that each engine's copy does: no real disk fails on request.
    monkeypatch.setattr("atoll.files.os.fsync", break_disk)
    monkeypatch.setattr(copies, "_copy_table", break_disk)

    with pytest.raises(errors.StoreError, match=r"copy\.db.*Input/output error"):
        ledger.copy_to(str(tmp_path / "copy.db"))

    assert list(tmp_path.iterdir()) == []


def test_closed_ledger_refuses_every_call(url: str):
    ledger = engines.open_ledger(url)
    ledger.close()
    ledger.close()

    with pytest.raises(errors.StoreError, match="is closed"):
        alone(ledger).run.get()


def test_second_opener_is_refused_while_the_ledger_is_held(url: str):
    holder = engines.open_ledger(url)

    with pytest.raises(errors.StateHeld, match="is held by"):
        engines.open_ledger(url)

    holder.close()
