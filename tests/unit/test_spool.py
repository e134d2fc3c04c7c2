"""Published frames on disk: complete, replaced as a whole, readable to the end."""

import errno
import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from atoll.codecs.fp32.codec import Fp32
from atoll.coordinator.rounds.spool import Spool, SpooledFrame
from atoll.errors import StateUnsafe, StorageFull, StoreError
from atoll.layout import GROUP_ELEMENTS, Layout
from atoll.wire import frame
from atoll.wire.header import FrameHeader, Told

LAYOUT = Layout.of([("matrix", (GROUP_ELEMENTS + 100,), "float32")])
OTHER = Layout.of([("vector", (100,), "float32")])
WEIGHTS = torch.arange(LAYOUT.size, dtype=torch.float32)
STAND_IN, RESULT, BASE = "0" * 64, "a" * 64, "c" * 64


def header(*, version: int = 1, kind: str = "weights", layout: Layout = LAYOUT) -> FrameHeader:
    return Told(
        kind=kind,
        run_id="run",
        manifest_sha256="b" * 64,
        round=version,
        base_digest=BASE if kind == "update" else None,
        result_digest=STAND_IN,
    ).header(layout, Fp32())


def spooled(
    spool: Spool, *, version: int = 1, kind: str = "weights", layout: Layout = LAYOUT
) -> SpooledFrame:
    """A frame filled with its tiles in reverse."""
    said = header(version=version, kind=kind, layout=layout)
    with spool.spooler(Fp32(), said) as spooler:
        for span in reversed(list(layout.tiles(GROUP_ELEMENTS * 4))):
            tile = WEIGHTS[span.start : span.stop]
            spooler(span, Fp32().encode(tile, noise=None, first_group=span.first_group))
        return spooler.finish(result_digest=RESULT)


def whole(found: SpooledFrame) -> bytes:
    return found.read(0, found.nbytes + 1)


def test_spooled_frame_reads_back_as_a_frame_of_its_payload(tmp_path):
    found = spooled(Spool(tmp_path))
    payload = bytearray()
    reader = frame.FrameReader(payload.extend)

    reader.feed(whole(found))
    reader.finish()

    assert bytes(payload) == WEIGHTS.numpy().tobytes()
    assert reader.header == found.header
    assert reader.header is not None and reader.header.result_digest == RESULT


def test_spooled_frame_has_exactly_the_size_it_says(tmp_path):
    found = spooled(Spool(tmp_path))

    assert len(whole(found)) == found.nbytes == frame.frame_bytes(found.header)


def test_read_at_an_offset_gives_the_bytes_there(tmp_path):
    found = spooled(Spool(tmp_path))

    assert found.read(1000, 77) == whole(found)[1000:1077]


def test_tag_names_kind_version_and_digest(tmp_path):
    """A download resumes only into the very frame it began with."""
    assert spooled(Spool(tmp_path), version=7).tag == f"weights-7-{RESULT}"


def test_frame_is_offered_for_its_kind_and_part_of_the_model_only(tmp_path):
    spool = Spool(tmp_path)
    found = spooled(spool, version=3)

    spool.put(found)

    assert spool.get("weights", LAYOUT) is found
    assert spool.get("update", LAYOUT) is None
    assert spool.get("weights", OTHER) is None


def test_frame_leads_to_its_own_round_only(tmp_path):
    found = spooled(Spool(tmp_path), version=3)

    assert found.leads(3, "whatever it has")
    assert not found.leads(2, "whatever it has")
    assert not found.leads(4, "whatever it has")


def test_update_leads_only_from_the_weights_it_applies_to(tmp_path):
    found = spooled(Spool(tmp_path), version=3, kind="update")

    assert found.leads(3, BASE)
    assert not found.leads(3, RESULT)
    assert not found.leads(3, "")


def test_newer_frame_replaces_the_older_of_its_kind(tmp_path):
    spool = Spool(tmp_path)
    for version in (1, 2, 3):
        spool.put(spooled(spool, version=version))
        spool.put(spooled(spool, version=version, kind="update"))

    assert sorted(p.name.split("-")[1] for p in tmp_path.iterdir()) == ["3", "3"]
    newest = spool.get("weights", LAYOUT)
    assert newest is not None and newest.header.round == 3


def test_newer_frame_leaves_those_of_other_parts_of_the_model(tmp_path):
    spool = Spool(tmp_path)
    first = spooled(spool, layout=OTHER, version=1)

    spool.put(first)
    spool.put(spooled(spool, version=2))

    assert spool.get("weights", OTHER) is first
    assert whole(first)


def test_reader_goes_on_after_its_frame_was_replaced(tmp_path):
    """A download never sees two versions in one body."""
    spool = Spool(tmp_path)
    first = spooled(spool, version=1)
    spool.put(first)
    before = whole(first)

    spool.put(spooled(spool, version=2))

    assert whole(first) == before
    assert not first.path.exists()


def test_frame_closes_its_file_when_nobody_holds_it(tmp_path):
    spool = Spool(tmp_path)
    opened = len(os.listdir("/proc/self/fd"))

    for version in range(20):
        spool.put(spooled(spool, version=version))
    gc.collect()

    assert len(os.listdir("/proc/self/fd")) <= opened + 1


def test_leftovers_of_an_earlier_life_are_removed(tmp_path: Path):
    (tmp_path / "weights-9-1.frame").write_bytes(b"half a frame")

    Spool(tmp_path)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["notes.txt", "weights-9-1.frame.bak", "other-9-1.frame"])
def test_only_names_of_a_spool_are_removed_from_it(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(b"somebody's")

    Spool(tmp_path)

    assert (tmp_path / name).read_bytes() == b"somebody's"


def test_spool_that_is_a_link_is_refused_and_what_it_leads_to_stays(tmp_path: Path):
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "weights-1-1.frame").write_bytes(b"theirs")
    (tmp_path / "spool").symlink_to("victim")

    with pytest.raises(StateUnsafe, match=r"spool' is a symbolic link"):
        Spool(tmp_path / "spool")

    assert (tmp_path / "victim" / "weights-1-1.frame").read_bytes() == b"theirs"


def test_frame_is_not_written_through_a_link_in_its_place(tmp_path: Path):
    spool = Spool(tmp_path / "spool")
    (tmp_path / "victim").write_bytes(b"theirs")
    (tmp_path / "spool" / "weights-1-1.frame").symlink_to(tmp_path / "victim")

    with pytest.raises(StoreError, match=r"weights-1-1\.frame"):
        spooled(spool)

    assert (tmp_path / "victim").read_bytes() == b"theirs"


# A disk that takes no more


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spool:
    """A spool on a disk without room."""

    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", no_room)
    return Spool(tmp_path)


def test_frame_without_room_is_refused_as_storage_full(full):
    with pytest.raises(StorageFull, match="weights-1-1"):
        spooled(full)


def test_frame_without_room_leaves_neither_file_nor_descriptor(full, tmp_path):
    opened = set(os.listdir("/proc/self/fd"))

    with pytest.raises(StorageFull) as refused:  # `refused` keeps the spooler alive by its frames
        spooled(full)

    assert refused.tb is not None
    assert list(tmp_path.iterdir()) == []
    assert set(os.listdir("/proc/self/fd")) == opened


def test_frame_that_cannot_be_opened_is_a_store_error(tmp_path):
    spool = Spool(tmp_path)
    (tmp_path / "weights-1-1.frame").mkdir()

    with pytest.raises(StoreError, match="cannot open"):
        spooled(spool)


def test_frame_that_is_never_finished_is_removed_with_its_descriptor(tmp_path):
    opened = set(os.listdir("/proc/self/fd"))

    with Spool(tmp_path).spooler(Fp32(), header()) as spooler:
        assert spooler.path.exists()

    assert list(tmp_path.iterdir()) == []
    assert set(os.listdir("/proc/self/fd")) == opened


def test_tiles_may_come_from_several_threads_at_once(tmp_path):
    spans = list(LAYOUT.tiles(GROUP_ELEMENTS * 4))
    together = threading.Barrier(len(spans), timeout=60)

    def give(span):
        tile = Fp32().encode(WEIGHTS[span.start : span.stop], noise=None, first_group=0)
        together.wait()
        spooler(span, tile)

    with Spool(tmp_path).spooler(Fp32(), header()) as spooler:
        with ThreadPoolExecutor(len(spans)) as pool:
            list(pool.map(give, spans))
        found = spooler.finish(result_digest=RESULT)

    assert whole(found) == whole(spooled(Spool(tmp_path / "alone")))
