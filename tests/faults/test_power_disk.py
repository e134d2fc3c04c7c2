"""The disk model itself: what is sure after which sync, and what a power cut may do to the rest."""

import random
from collections.abc import Sequence

from tests.faults.power import images
from tests.faults.power.disk import PAGE, Disk
from tests.faults.power.trace import Event

ALL = 1 << 20  # a sync that began after everything before it
DRAWS = 400
MAKE_FOLDER = Event("mkdir", ("folder",))


def test_bytes_are_sure_after_a_sync_of_the_file_and_its_name_after_one_of_the_directory() -> None:
    made = [MAKE_FOLDER, *_sync("."), *_write("folder/a", b"first"), *_sync("folder/a")]

    assert images.nothing(_disk(made)).files == {"folder": None}
    assert images.nothing(_disk([*made, *_sync("folder")])).files == {
        "folder": None,
        "folder/a": b"first",
    }


def test_name_without_synced_bytes_leads_to_nothing_or_zeros() -> None:
    disk = _disk([*_write("a", b"first"), *_sync(".")])

    assert images.nothing(disk).files == {"a": b""}
    assert images.names_only(disk).files == {"a": bytes(5)}


def test_sync_is_not_sure_of_what_was_written_after_it_began() -> None:
    written = _write("a", b"late")
    sync = [Event("open", ("a",), fd=9), Event("sync", ("a",), fd=9, began=1)]

    disk = _disk([*written, *sync, *_sync(".")])

    assert images.nothing(disk).files == {"a": b""}


def test_rename_is_sure_once_the_directory_it_leads_to_is_synced() -> None:
    made = [MAKE_FOLDER, *_write("a", b"first"), *_sync("a"), *_sync(".")]
    moved = [*made, Event("rename", ("a", "folder/b"))]

    left = _disk([*moved, *_sync(".")])
    arrived = _disk([*moved, *_sync("folder")])

    assert images.nothing(left).files == {"a": b"first", "folder": None}
    assert images.nothing(arrived).files == {"folder": None, "folder/b": b"first"}


def test_rename_is_never_half_done() -> None:
    disk = _disk([*_write("a", b""), *_sync("."), Event("rename", ("a", "b"))])

    assert {tuple(image.files) for image in _drawn(disk)} == {("a",), ("b",)}


def test_names_are_lost_in_any_order() -> None:
    disk = _disk([*_write("a", b""), *_write("b", b"")])

    assert {tuple(image.files) for image in _drawn(disk)} == {(), ("a",), ("b",), ("a", "b")}


def test_pages_are_of_any_age_and_hold_no_later_write_without_the_earlier() -> None:
    zeros = [*_write("a", bytes(2 * PAGE)), *_sync("a"), *_sync(".")]
    disk = _disk([*zeros, *_write("a", b"x", b"xy", at=0), *_write("a", b"z", at=PAGE)])

    found = {(image.files["a"] or b"") for image in _drawn(disk)}

    assert {(content[:2], content[PAGE : PAGE + 1]) for content in found} == {
        (first, second) for first in (b"\0\0", b"x\0", b"xy") for second in (b"\0", b"z")
    }


def test_write_is_torn_at_a_sector() -> None:
    disk = _disk([*_write("a", b""), *_sync("."), *_write("a", b"x" * PAGE)])

    lengths = {len((image.files["a"] or b"").rstrip(b"\0")) for image in _drawn(disk)}

    assert lengths == set(range(0, PAGE + 1, 512))


def _disk(events: Sequence[Event]) -> Disk:
    disk = Disk()
    for event in events:
        disk.apply(event)
    return disk


def _write(path: str, *pieces: bytes, at: int = 0) -> list[Event]:
    """Opens, writes each piece at the same place, closes."""
    opened = Event("open", (path,), fd=3, flags=frozenset({"O_CREAT"}))
    written = [Event("write", (path,), fd=3, number=at, data=piece) for piece in pieces]
    return [opened, *written, Event("close", fd=3)]


def _sync(path: str) -> list[Event]:
    opened = Event("open", (path,), fd=4)
    return [opened, Event("sync", (path,), fd=4, began=ALL), Event("close", fd=4)]


def _drawn(disk: Disk) -> list[images.Image]:
    return [images.drawn(disk, random.Random(number)) for number in range(DRAWS)]
