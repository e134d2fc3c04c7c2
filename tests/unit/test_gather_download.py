"""An object on its way to a file: what an earlier life left is used where it can be, and no other.

Whoever uses the bytes checks them, so what is wrong here costs a second download, not a bit.
"""

from pathlib import Path

import pytest

from atoll.blobs.memory_bucket import MemoryBucket
from atoll.gather.download import Download
from tests import gather_windows as windows
from tests.gather_late import Counted

DATA = bytes(range(251)) * 50
STRETCH, MARK = 5_000, 8
KEY = "archive/bodies/one"


@pytest.fixture
def bucket() -> Counted:
    made = MemoryBucket(windows.CLOCK)
    made.put(KEY, DATA)
    return Counted(made)


@pytest.fixture
def download(tmp_path) -> Download:
    return Download(tmp_path / "object", KEY, len(DATA), STRETCH)


def fetch(download: Download, bucket: Counted) -> bytes:
    archive = windows.archive(bucket)
    download.fetch(archive, rank=0, ranks=1, is_wanted=lambda: True)
    return download.path.read_bytes()[: len(DATA)]


def marked(path: Path, index: int, done: int) -> None:
    """Says that so many bytes of a stretch are there."""
    data = bytearray(path.read_bytes())
    place = len(DATA) + MARK * index
    data[place : place + MARK] = done.to_bytes(MARK, "big")
    path.write_bytes(data)


@pytest.mark.parametrize("done", [STRETCH + 1, 2 * STRETCH, 1 << 63])
def test_mark_beyond_its_stretch_is_not_believed(download, bucket, done):
    assert not download.prepare()
    marked(download.path, 1, done)

    assert fetch(download, bucket) == DATA
    assert bucket.body_bytes == len(DATA)


def test_mark_beyond_the_last_short_stretch_is_not_believed(download, bucket):
    download.prepare()
    marked(download.path, 2, len(DATA) - 2 * STRETCH + 1)

    assert fetch(download, bucket) == DATA


def test_mark_within_its_stretch_is_where_it_goes_on(download, bucket):
    download.prepare()
    fetch(download, bucket)
    marked(download.path, 1, 1_234)

    assert download.prepare()
    assert fetch(download, bucket) == DATA
    assert bucket.body_bytes == len(DATA) + STRETCH - 1_234


@pytest.mark.parametrize("change", [-MARK, -1, 1, MARK])
def test_file_of_another_size_is_begun_anew(download, bucket, change):
    """Its marks lie elsewhere, so nothing of it can be used."""
    download.prepare()
    fetch(download, bucket)
    whole = download.path.stat().st_size
    download.path.write_bytes(b"\xff" * (whole + change))

    assert not download.prepare()

    assert download.path.read_bytes() == bytes(whole)
    assert fetch(download, bucket) == DATA and bucket.body_bytes == 2 * len(DATA)
