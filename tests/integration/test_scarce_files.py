"""No file left to open: everything waits, nothing is lost, and goes on by itself afterwards.

The limit is the system's own. The same for a machine without files and without memory by a seam.
"""

import errno
import hashlib
import logging
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll import files
from atoll.blobs.directory import DirectoryBlobs
from atoll.cli import join as joining
from atoll.cli.options import JoinOptions
from atoll.clock import ManualClock
from atoll.codecs.fp32.codec import Fp32
from atoll.coordinator.rounds.spool import Spool
from atoll.coordinator.shown.samples import SampleStore
from atoll.errors import ConfigError, DiskFailed, Exhausted, StorageFull, StoreError
from atoll.files import SystemFiles
from atoll.island.state.store import IslandIdentity, IslandStore
from atoll.layout import Layout
from atoll.ledger import database
from atoll.protocol.samples import Sample
from atoll.wire import statuses
from atoll.wire.header import Told
from tests.clusters import Cluster
from tests.commanded import commanded, options_in
from tests.ledgers import alone
from tests.scarce_files import leaving, no_file_left

TEXT = b"a ring of islands"
NAME = hashlib.sha256(TEXT).hexdigest()
NUMBERS = [errno.EMFILE, errno.ENFILE, errno.ENOMEM]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


def put(blobs: DirectoryBlobs) -> str:
    writer = blobs.writer()
    writer.write(TEXT)
    return writer.commit().sha256


def read(blobs: DirectoryBlobs) -> bytes:
    with blobs.open(NAME) as reader:
        return reader.read(0, reader.nbytes)


# Blobs


@pytest.mark.parametrize("spare", [0, 1])
def test_blob_is_stored_once_files_are_free_again(tmp_path, spare):
    """With one file left the draft can be made, and the sync of its folder finds none."""
    blobs = DirectoryBlobs(tmp_path)

    with no_file_left(spare=spare), pytest.raises(Exhausted, match="Too many open files"):
        put(blobs)

    assert put(blobs) == NAME
    assert read(DirectoryBlobs(tmp_path)) == TEXT


def test_blob_is_read_once_files_are_free_again(tmp_path):
    blobs = DirectoryBlobs(tmp_path)
    put(blobs)

    with no_file_left(), pytest.raises(Exhausted):
        blobs.open(NAME)

    assert read(blobs) == TEXT


class Refusing(SystemFiles):
    """A system that refuses to open a directory, or to sync it, with this number."""

    def __init__(self, number: int, monkeypatch: pytest.MonkeyPatch, *, call: str) -> None:
        real: Callable[..., int] = getattr(os, call)

        def refuse(target: object, *rest: object) -> int:
            is_directory = call == "fsync" or rest[0] & os.O_DIRECTORY  # type: ignore[operator]
            if self.refuses and is_directory:
                raise OSError(number, os.strerror(number))
            return real(target, *rest)

        self.refuses = False
        monkeypatch.setattr(os, call, refuse)


@pytest.mark.parametrize("number", NUMBERS)
def test_directory_that_cannot_be_opened_says_nothing_about_the_disk(tmp_path, monkeypatch, number):
    system = Refusing(number, monkeypatch, call="open")
    blobs = DirectoryBlobs(tmp_path, files=system)

    system.refuses = True
    with pytest.raises(Exhausted):
        put(blobs)
    system.refuses = False

    assert put(blobs) == NAME


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EIO])
def test_sync_that_fails_is_a_failed_disk_whatever_its_number(tmp_path, monkeypatch, number):
    """The control: the kernel may have dropped what it was to write, so nothing is tried again."""
    system = Refusing(number, monkeypatch, call="fsync")
    blobs = DirectoryBlobs(tmp_path, files=system)

    system.refuses = True
    with pytest.raises(DiskFailed):
        put(blobs)
    system.refuses = False

    with pytest.raises(DiskFailed):
        put(blobs)


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_that_pass_by_themselves_are_repeated_by_islands(number):
    with pytest.raises(Exhausted) as caught, files.naming("open", Path("x")):
        raise OSError(number, os.strerror(number))

    assert caught.value.retry
    assert isinstance(caught.value, StorageFull)
    assert statuses.http(caught.value) == 503
    told = statuses.reported("EXHAUSTED", "later", retry=True, generation=0)
    assert isinstance(told, Exhausted) and told.retry


def test_other_numbers_stay_what_they_were():
    with pytest.raises(StoreError) as caught, files.naming("open", Path("x")):
        raise OSError(errno.EACCES, "Permission denied")

    assert type(caught.value) is StoreError and not caught.value.retry


# The spool


def test_frame_is_spooled_once_files_are_free_again(tmp_path):
    layout = Layout.of([("vector", (10,), "float32")])
    spool = Spool(tmp_path)
    header = Told(
        kind="weights", run_id="run", manifest_sha256="b" * 64, round=1, result_digest="0" * 64
    ).header(layout, Fp32())

    with no_file_left(), pytest.raises(Exhausted):
        spool.spooler(Fp32(), header)

    with spool.spooler(Fp32(), header) as spooler:
        for span in layout.tiles(1 << 20):
            values = torch.ones(len(span))
            spooler(span, Fp32().encode(values, noise=None, first_group=span.first_group))
        found = spooler.finish(result_digest="a" * 64)
    assert found.nbytes == len(found.read(0, found.nbytes + 1))


# Telemetry


def sample(number: int) -> Sample:
    return Sample(sequence=number, wall=1.0, round=1, step=number)


def test_telemetry_waits_says_nothing_of_damage_and_loses_nothing(tmp_path):
    store = SampleStore(tmp_path / "telemetry.sqlite")
    store.add("a", 1, [sample(1)])

    with no_file_left(), pytest.raises(Exhausted) as caught:
        store.add("a", 1, [sample(2)])

    assert "damage" not in str(caught.value) and "restart" not in str(caught.value)
    store.add("a", 1, [sample(2)])
    store.close()
    again = SampleStore(tmp_path / "telemetry.sqlite")
    assert [s.sequence for s in again.history().samples] == [1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["telemetry.sqlite"]
    again.close()


def test_telemetry_that_cannot_be_opened_for_want_of_files_is_not_put_aside(tmp_path):
    path = tmp_path / "telemetry.sqlite"
    store = SampleStore(path)
    store.add("a", 1, [sample(1)])
    store.close()

    with no_file_left(), pytest.raises(Exhausted):
        SampleStore(path)

    again = SampleStore(path)
    assert [s.sequence for s in again.history().samples] == [1]
    again.close()


def test_telemetry_that_is_damaged_is_put_aside(tmp_path):
    """The control: with files to open, a file that is no database is still damage."""
    path = tmp_path / "telemetry.sqlite"
    path.write_bytes(b"no database" * 100)

    SampleStore(path).close()

    assert path.with_name("telemetry.sqlite.damaged").exists()


# The ledger


def test_ledger_in_use_goes_on_without_a_file(cluster):
    """It has all of its files open, and its temporary tables are in memory."""
    with no_file_left():
        a, _ = cluster.pair()
        assert a.assignment().action == "train"


@pytest.mark.parametrize("said", ["unable to open database file", "out of memory"])
def test_ledger_in_use_that_finds_no_file_is_tried_again(said):
    found = database.translate(OSError(said), name="'x'", is_in_use=True)

    assert isinstance(found, Exhausted) and found.retry


def test_ledger_at_a_wrong_path_is_not_waited_for():
    found = database.translate(OSError("unable to open database file"), name="'x'")

    assert type(found) is StoreError


def test_transaction_without_memory_is_undone_and_repeated(cluster):
    cluster.pair()
    before = cluster.coordinator.state_hash()

    def write_without_memory() -> None:
        with cluster.ledger.writing() as t:
            t.credentials.set({"worker": "0" * 64})
            raise MemoryError

    with pytest.raises(Exhausted):
        write_without_memory()

    assert cluster.coordinator.state_hash() == before
    alone(cluster.ledger).credentials.set({"worker": "0" * 64})
    assert cluster.coordinator.state_hash() != before


# The coordinator


def test_contribution_without_a_file_is_refused_and_taken_when_sent_again(cluster):
    a, b = cluster.pair()
    sent = a.frame()

    with no_file_left(), pytest.raises(Exhausted) as caught:
        a.send(sent)

    assert caught.value.retry
    assert cluster.run_clock(seconds=2.0) == 0
    a.send(sent)
    b.contribute()
    assert cluster.settle() == 1
    assert cluster.coordinator.status().refusals == {"EXHAUSTED": 1}
    assert cluster.audit(with_replay=True).problems == []


@pytest.mark.parametrize(("spare", "closes"), [(0, 0), (1, 0), (2, 0), (3, 1)])
def test_round_is_looked_at_every_second_and_closes_once_files_are_free(tmp_path, spare, closes):
    """Two contributions and the frame of the version: with three files it need not wait."""
    expected = Cluster(tmp_path / "alone")
    expected.rounds(2, *expected.pair())
    cluster = Cluster(tmp_path / "scarce")
    a, b = cluster.pair()
    cluster.rounds(1, a, b)
    for island in (a, b):
        island.contribute()

    with no_file_left(spare=spare):
        closed = cluster.run_clock(seconds=5.0)
    cluster.run_clock(seconds=2.0)

    assert cluster.version == 2
    assert closed == closes
    assert cluster.digests_by_round() == expected.digests_by_round()
    assert cluster.audit(with_replay=True).problems == []
    cluster.restart()
    assert cluster.version == 2
    for each in (expected, cluster):
        each.close()


def test_coordinator_without_files_says_so_and_not_that_its_disk_is_full(cluster, caplog):
    a, b = cluster.pair()
    a.contribute()
    sent = b.frame()
    with no_file_left():
        with pytest.raises(Exhausted):
            b.send(sent)
        with pytest.raises(Exhausted, match="can open no more files"):
            cluster.coordinator.disk.check()

    assert "no file can be opened" in caplog.text and "no room on the disk" not in caplog.text
    cluster.run_clock(seconds=2.0)
    cluster.coordinator.disk.check()


def test_audit_without_files_ends_and_finds_no_damage(cluster):
    cluster.rounds(1, *cluster.pair())

    with no_file_left(), pytest.raises(Exhausted):
        cluster.audit(with_replay=True)

    assert cluster.audit(with_replay=True).problems == []


# The limit


@pytest.fixture
def low() -> Iterator[int]:
    """A soft limit far below the hard one, which a command may raise."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = leaving(60)
    assert found < before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (found, before[1]))
    yield found
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def logged_limits(caplog: pytest.LogCaptureFixture) -> list[tuple[int, int]]:
    found = [vars(r) for r in caplog.records if r.message == "limit of open files"]
    return [(record["before"], record["now"]) for record in found]


def check_raised(low: int, caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == hard
    assert logged_limits(caplog) == [(low, hard)]


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(logging.getLogger("atoll"), "propagate", True)
    caplog.set_level(logging.INFO, "atoll")
    return caplog


def test_serving_raises_the_limit_of_open_files_and_logs_it(tmp_path, low, told):
    with commanded(options_in(tmp_path)):
        check_raised(low, told)


def test_joining_raises_the_limit_of_open_files_and_logs_it(low, told, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(ConfigError, match="parallel"):
        joining.join(JoinOptions(url="http://127.0.0.1:1", parallel="sideways"))

    check_raised(low, told)


# An island's own state


class FilesComeBack(ManualClock):
    """Gives the files back after so many seconds of waiting."""

    def __init__(self, held: ExitStack, *, after: int) -> None:
        super().__init__()
        self._held, self._left = held, after

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self._left -= 1
        if self._left == 0:
            self._held.close()


META = {"preamble": "00ff", "sha256": "a" * 64}
STEPS: dict[str, Callable[[IslandStore], object]] = {
    "identity": lambda s: s.set_identity(IslandIdentity("b", "c" * 64)),
    "begin": lambda s: s.begin(3),
    "complete": lambda s: s.complete(s.directory / "pending-2", META, {"x": torch.full((2,), 2.0)}),
    "promote": lambda s: s.promote(2),
    "pending": lambda s: s.pending(2),
    "checkpoint": lambda s: s.checkpoint(),
    "rounds": lambda s: s.rounds(),
    "frame": lambda s: s.frame(s.pending(2)).close(),
    "discard": lambda s: s.discard_pending(),
}

OPENING_NONE = {"begin"}  # makes and renames alone, so it has nothing to wait for


def kept(home: Path, clock: ManualClock | None = None) -> IslandStore:
    """An island with round 1 accepted and round 2 pending."""
    store = IslandStore(home, clock=clock)
    store.set_identity(IslandIdentity("a", "b" * 64))
    for number in (1, 2):
        path = store.begin(number)
        (path / "frame").write_bytes(b"frame")
        store.complete(path, META, {"x": torch.full((2,), float(number))})
        if number == 1:
            store.promote(1)
    return store


def left(store: IslandStore) -> dict[str, bytes]:
    """What a new life finds; the files that mean something."""
    store.close()
    with closing(IslandStore(store.directory)) as again:
        found = again.directory.rglob("*")
        return {
            str(path.relative_to(again.directory)): path.read_bytes()
            for path in found
            if path.is_file() and not path.name.startswith(("lock", "spare", "trash"))
        }


@pytest.mark.parametrize("spare", [0, 1])
@pytest.mark.parametrize("step", STEPS)
def test_island_without_files_waits_and_ends_where_one_with_files_does(tmp_path, step, spare):
    expected = kept(tmp_path / "with")
    STEPS[step](expected)

    with ExitStack() as held:
        clock = FilesComeBack(held, after=3)
        store = kept(tmp_path / "without", clock)
        held.enter_context(no_file_left(spare=spare))
        STEPS[step](store)

    if spare == 0:
        assert clock.now() == (0.0 if step in OPENING_NONE else 3.0)
    assert left(store) == left(expected)


def test_island_whose_disk_refuses_otherwise_still_ends(tmp_path):
    """The control: only what passes by itself is waited for."""
    store = kept(tmp_path)
    (tmp_path / "pending-2" / "complete.json").write_text("no object")

    with pytest.raises(StoreError, match="cannot read"):
        store.pending(2)
    store.close()
