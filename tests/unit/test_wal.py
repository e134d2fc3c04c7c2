"""A log's end that a power cut left is no damage; any other change of it is."""

import contextlib
import random
import shutil
import sqlite3
import struct
from pathlib import Path

import pytest

from atoll.errors import StateDamaged
from atoll.ledger import engines, wal

PAGE_BYTES = 4096
FRAME_BYTES = wal.FRAME_HEADER_BYTES + PAGE_BYTES


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger as a killed process leaves it: thirty transactions are in the log alone."""
    home = tmp_path_factory.mktemp("written")
    ledger = engines.open_ledger(home / "live.sqlite")
    for number in range(30):
        ledger.register(f"worker-{number % 7}", "key", wall=float(number))
    for suffix in ("", "-wal"):
        shutil.copyfile(home / f"live.sqlite{suffix}", home / f"killed.sqlite{suffix}")
    ledger.close()
    return home / "killed.sqlite"


@pytest.fixture
def killed(written: Path, tmp_path: Path) -> Path:
    for suffix in ("", "-wal"):
        shutil.copyfile(f"{written}{suffix}", tmp_path / f"ledger.sqlite{suffix}")
    return tmp_path / "ledger.sqlite"


def frames(log: Path) -> list[int]:
    """Where each frame begins."""
    return list(range(wal.HEADER_BYTES, log.stat().st_size - FRAME_BYTES + 1, FRAME_BYTES))


def transactions(log: Path) -> list[int]:
    """Where the frame that ends each transaction begins."""
    data = log.read_bytes()
    return [at for at in frames(log) if struct.unpack(">I", data[at + 4 : at + 8])[0]]


def overwrite(path: Path, place: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        file.write(data)


def fold_in(killed: Path) -> None:
    """The database has all of the log, and the log is still there as a power cut may leave it."""
    log = wal.path_of(killed)
    kept = log.read_bytes()
    with contextlib.closing(sqlite3.connect(killed)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    log.write_bytes(kept)


def test_whole_log_is_sound(killed):
    assert len(transactions(wal.path_of(killed))) >= 30
    assert wal.check(killed) is None


def test_absent_log_is_sound(tmp_path):
    assert wal.check(tmp_path / "ledger.sqlite") is None


def test_log_cut_anywhere_is_what_a_power_cut_leaves(killed):
    log = wal.path_of(killed)
    data = log.read_bytes()
    for size in range(0, len(data), len(data) // 12):
        log.write_bytes(data[:size])

        assert wal.check(killed) is None, size


@pytest.mark.parametrize("part", ["head", "page", "both"])
def test_last_transaction_that_is_torn_is_what_a_power_cut_leaves(killed, part):
    log = wal.path_of(killed)
    last = transactions(log)[-1]
    start, stop = {"head": (0, 24), "page": (24, FRAME_BYTES), "both": (0, FRAME_BYTES)}[part]
    overwrite(log, last + start, bytes(stop - start))

    assert wal.check(killed) is None


def test_frame_that_is_zero_in_an_earlier_transaction_is_damage(killed):
    log = wal.path_of(killed)
    overwrite(log, transactions(log)[-3] + 24, bytes(PAGE_BYTES))

    found = wal.check(killed)

    assert found is not None
    assert "transactions after it were committed" in str(found)
    assert str(log) in str(found)


@pytest.mark.parametrize("seed", range(8))
def test_one_bit_anywhere_is_damage(killed, seed):
    log = wal.path_of(killed)
    rng = random.Random(seed)
    data = bytearray(log.read_bytes())
    last = transactions(log)[-2] + FRAME_BYTES
    places = [
        rng.randrange(wal.HEADER_BYTES),
        rng.randrange(wal.HEADER_BYTES, len(data)),
        rng.randrange(last, len(data)),  # in the last transaction, where more than a bit is a tear
        last + rng.randrange(wal.FRAME_HEADER_BYTES),
    ]
    for place in places:
        changed = bytearray(data)
        changed[place] ^= 1 << rng.randrange(8)
        log.write_bytes(changed)

        assert wal.check(killed) is not None, place


def test_torn_header_before_frames_that_are_in_the_database_is_no_damage(killed):
    """The first bytes of a log that begins anew; what follows has been folded in."""
    log = wal.path_of(killed)
    old = log.read_bytes()
    engines.open_ledger(killed).close()  # folds the log in
    log.write_bytes(old)
    overwrite(log, 12, b"torn")

    assert wal.check(killed) is None


def test_torn_header_before_frames_that_are_not_in_the_database_is_damage(killed):
    """The control of the claim above."""
    overwrite(wal.path_of(killed), 12, b"torn")

    assert wal.check(killed) is not None


def test_ledger_with_a_damaged_log_is_not_opened(killed):
    log = wal.path_of(killed)
    overwrite(log, transactions(log)[3] + 100, b"\xff")

    with pytest.raises(StateDamaged, match=r"ledger\.sqlite-wal' at byte"):
        engines.open_ledger(killed)


def test_log_without_its_first_page_is_damage(killed):
    log = wal.path_of(killed)
    overwrite(log, 0, bytes(PAGE_BYTES))

    assert wal.check(killed) is not None


@pytest.mark.parametrize("holes", [(0,), (0, 2), (0, -1), (0, 1, 2), (0, -2), (0, -3, -1)])
def test_log_that_was_being_emptied_may_have_holes(killed, holes):
    """All of it is in the database by then."""
    log = wal.path_of(killed)
    data = log.read_bytes()
    fold_in(killed)
    pages = -(-len(data) // PAGE_BYTES)
    for page in holes:
        start = page % pages * PAGE_BYTES
        overwrite(log, start, bytes(min(PAGE_BYTES, len(data) - start)))

    assert wal.check(killed) is None


@pytest.mark.parametrize("frame", [0, 1])
@pytest.mark.parametrize("is_in_database", [True, False])
def test_log_without_its_first_transaction_is_damage_unless_the_database_has_the_rest(
    killed, is_in_database, frame
):
    log = wal.path_of(killed)
    assert frames(log)[frame] < transactions(log)[0]  # so SQLite takes nothing before it
    if is_in_database:
        fold_in(killed)
    overwrite(log, frames(log)[frame], bytes(FRAME_BYTES))

    found = wal.check(killed)

    assert (found is None) is is_in_database


def test_hole_after_a_transaction_is_damage_even_if_the_database_has_all(killed):
    """SQLite would take the old pages before the hole for the newest."""
    log = wal.path_of(killed)
    fold_in(killed)
    overwrite(log, frames(log)[frames(log).index(transactions(log)[0]) + 1], bytes(FRAME_BYTES))

    assert wal.check(killed) is not None
