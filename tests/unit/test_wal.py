"""A log's end that a power cut left is no damage; any other change of it is."""

import contextlib
import random
import shutil
import sqlite3
import struct
from pathlib import Path

import pytest

from atoll.errors import StateDamaged
from atoll.ledger import engines
from atoll.ledger.sqlite import database as sqlite_database
from atoll.ledger.sqlite import wal
from tests.ledgers import alone

PAGE_BYTES = 4096
FRAME_BYTES = wal.FRAME_HEADER_BYTES + PAGE_BYTES


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger as a killed process leaves it: thirty transactions are in the log alone."""
    home = tmp_path_factory.mktemp("written")
    ledger = engines.open_ledger(home / "live.sqlite")
    for number in range(30):
        alone(ledger).members.register(f"worker-{number % 7}", "key", wall=float(number))
    for suffix in ("", "-wal"):
        shutil.copyfile(home / f"live.sqlite{suffix}", home / f"killed.sqlite{suffix}")
    ledger.close()
    return home / "killed.sqlite"


@pytest.fixture
def killed(written: Path, tmp_path: Path) -> Path:
    for suffix in ("", "-wal"):
        shutil.copyfile(f"{written}{suffix}", tmp_path / f"ledger.sqlite{suffix}")
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three transactions into the second use of the log; beside it, `before`: the end of the first.

    The database is the same for both.
    """
    monkeypatch.setattr(sqlite_database, "CHECKPOINT_BYTES", 200_000)
    live, copied = tmp_path / "live.sqlite", tmp_path / "ledger.sqlite"
    ledger = engines.open_ledger(live)
    number, first = 0, salts(live)
    while salts(live) == first:
        shutil.copyfile(wal.path_of(live), tmp_path / "before.sqlite-wal")
        alone(ledger).members.register(f"worker-{number % 7}", "key", wall=float(number))
        number += 1
    for _ in range(2):
        alone(ledger).members.register("worker-0", "key", wall=float(number))
    for suffix in ("", "-wal"):
        shutil.copyfile(f"{live}{suffix}", f"{copied}{suffix}")
    ledger.close()
    return copied


def salts(ledger: Path) -> bytes:
    """What tells one use of the log's file from another."""
    return wal.path_of(ledger).read_bytes()[16:24]


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
    """The database has all of the log, and the log is still there."""
    log = wal.path_of(killed)
    kept = log.read_bytes()
    with contextlib.closing(sqlite3.connect(killed)) as opened:
        opened.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    log.write_bytes(kept)


def committed(killed: Path, *, blob_bytes: int) -> bytes:
    """What the log is after one more transaction; the ledger and its log stay as they are."""
    copied = killed.with_name("copied.sqlite")
    for suffix in ("", "-wal"):
        shutil.copyfile(f"{killed}{suffix}", f"{copied}{suffix}")
    with contextlib.closing(sqlite3.connect(copied, isolation_level=None)) as opened:
        opened.execute("PRAGMA wal_autocheckpoint = 0").fetchall()
        opened.execute("CREATE TABLE more AS SELECT randomblob(?)", (blob_bytes,))
        return wal.path_of(copied).read_bytes()


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


def test_transaction_torn_over_a_longer_one_that_was_torn_is_what_two_power_cuts_leave(killed):
    """Both go by the same salts, and the end of each is there."""
    log = wal.path_of(killed)
    start = log.stat().st_size
    for blob_bytes in (60_000, 20_000):
        log.write_bytes(committed(killed, blob_bytes=blob_bytes))
        overwrite(log, start, bytes(FRAME_BYTES))

        assert wal.check(killed) is None, blob_bytes
    assert transactions(log)[-2] > start


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


@pytest.mark.parametrize("transaction", [0, 1])
@pytest.mark.parametrize("is_in_database", [True, False])
def test_hole_before_committed_transactions_is_damage(killed, is_in_database, transaction):
    """Also when the database has all: SQLite would take old pages before the hole for the newest.

    A log is never cut, so no power cut leaves one.
    """
    log = wal.path_of(killed)
    if is_in_database:
        fold_in(killed)
    first = [wal.HEADER_BYTES, transactions(log)[0] + FRAME_BYTES][transaction]
    overwrite(log, first, bytes(FRAME_BYTES))

    assert wal.check(killed) is not None


def test_log_that_was_begun_anew_has_old_frames_behind_the_new(begun_anew):
    log = wal.path_of(begun_anew)
    data = log.read_bytes()

    assert len({data[at + 8 : at + 16] for at in frames(log)}) == 2
    assert wal.check(begun_anew) is None


@pytest.mark.parametrize("frame", [0, 1, -1])
def test_first_transaction_that_is_torn_before_old_frames_is_no_damage(begun_anew, frame):
    """Frames that did not reach the disk are still those of the earlier use."""
    log = wal.path_of(begun_anew)
    first = [at for at in frames(log) if at <= transactions(log)[0]]
    old = begun_anew.with_name("before.sqlite-wal").read_bytes()
    for at in (first[frame], *(at for at in frames(log) if at > first[-1])):
        overwrite(log, at, old[at : at + FRAME_BYTES])

    assert wal.check(begun_anew) is None


@pytest.mark.parametrize(("place", "is_damage"), [(2_000, False), (3, True), (7, True)])
def test_one_bit_of_a_transaction_without_an_end_matters_where_its_end_may_be(
    killed, place, is_damage
):
    """Nothing of it was committed: the page there may be an older one that differs by a bit."""
    log = wal.path_of(killed)
    data = log.read_bytes()
    [*_, before, last] = transactions(log)
    first = before + FRAME_BYTES
    assert first < last, "of several frames"
    log.write_bytes(data[:last])
    overwrite(log, first + place, bytes([data[first + place] ^ 1]))

    assert (wal.check(killed) is not None) == is_damage


def test_old_frame_before_committed_transactions_is_damage(begun_anew):
    """The control: the first transaction was synced before the second began."""
    log = wal.path_of(begun_anew)
    old = begun_anew.with_name("before.sqlite-wal").read_bytes()
    at = wal.HEADER_BYTES
    overwrite(log, at, old[at : at + FRAME_BYTES])

    assert wal.check(begun_anew) is not None


def test_torn_header_of_a_log_that_is_begun_anew_is_no_damage(begun_anew):
    """The header before any frame of its own, as it may be when the power goes right then."""
    log = wal.path_of(begun_anew)
    header = log.read_bytes()[: wal.HEADER_BYTES]
    shutil.copyfile(begun_anew.with_name("before.sqlite-wal"), log)
    overwrite(log, 0, header[:20])

    assert wal.check(begun_anew) is None
