"""What a rank holds: sections, bytes that another rank reads, and memory that goes to the disk."""

from pathlib import Path

import pytest
import torch

from atoll.errors import ConfigError, LayoutMismatch, StorageFull
from atoll.layout import Span
from atoll.models import registry
from atoll.strategies.sharded import offload
from atoll.strategies.sharded.shard import SAVED, SECTIONS, Shard
from atoll.strategies.sharded.units import Units

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE = {"vocab": 50, "block": 6, "layers": 3, "heads": 2, "width": 8}
UNITS = Units.of_model(registry.layout({"architecture": "gpt", **SIZE}))
KINDS = ("none", "disk")
every_kind = pytest.mark.parametrize("kind", KINDS)


def made(tmp_path: Path, kind: offload.Offload, *, rank: int = 1, size: int = 3) -> Shard:
    return Shard(UNITS, rank=rank, size=size, offload=kind, directory=tmp_path)


def flat(seed: int = 0) -> torch.Tensor:
    return torch.randn(UNITS.layout.size, generator=torch.Generator().manual_seed(seed))


@every_kind
def test_shard_is_zero_at_first_and_has_a_quarter_for_each_section(tmp_path, kind):
    shard = made(tmp_path, kind)

    assert shard.nbytes == 16 * UNITS.shard_size(1, 3)
    for section in SECTIONS:
        assert not shard.view(section, Span(0, shard.elements)).any()


@every_kind
def test_every_rank_takes_its_spans_of_the_flat_layout(tmp_path, kind):
    whole = flat()
    shards = [made(tmp_path, kind, rank=rank) for rank in range(3)]

    for shard in shards:
        for start in range(0, len(whole), 1_000):  # pieces that cross units and spans
            shard.fill("weights", start, whole[start : start + 1_000])

    found = torch.full_like(whole, torch.nan)
    for shard in shards:
        for unit, span in enumerate(shard.owned):
            span.of(found).copy_(shard.of(unit, "weights"))
    assert torch.equal(found, whole)
    assert not shards[0].of(0, "first_moments").any()


@every_kind
def test_saved_bytes_are_the_spans_in_unit_order(tmp_path, kind):
    whole, shard = flat(), made(tmp_path, kind)
    shard.fill("second_moments", 0, whole)

    data = b"".join(
        shard.read("second_moments", Span(start, min(start + 77, shard.elements)))
        for start in range(0, shard.elements, 77)
    )

    wanted = torch.cat([span.of(whole) for span in UNITS.owned(1, 3)])
    assert data == wanted.numpy().tobytes()


@every_kind
def test_bytes_that_were_read_are_written_back_by_ranges(tmp_path, kind):
    shard, other = made(tmp_path, kind), made(tmp_path, "none")
    shard.fill("weights", 0, flat())
    half = shard.elements // 2

    for span in (Span(half, shard.elements), Span(0, half), Span(3, 3)):
        other.write("weights", span.start, shard.read("weights", span))

    everything = Span(0, shard.elements)
    assert torch.equal(other.view("weights", everything), shard.view("weights", everything))
    assert SAVED == ("weights", "first_moments", "second_moments")


@pytest.mark.parametrize(
    ("start", "data"), [(0, b"12345"), (-1, b"1234"), (10**9, b"1234")], ids=["part", "low", "high"]
)
def test_bytes_without_a_place_are_refused_and_change_nothing(tmp_path, start, data):
    shard = made(tmp_path, "none")

    with pytest.raises(LayoutMismatch):
        shard.write("weights", start, data)

    assert not shard.view("weights", Span(0, shard.elements)).any()


def test_tensors_that_a_shard_cuts_through_have_their_places(tmp_path):
    whole = torch.arange(UNITS.layout.size, dtype=torch.float32)
    offsets = {t.name: t.offset for t in UNITS.layout.tensors}
    shard = made(tmp_path, "none")
    shard.fill("weights", 0, whole)

    for unit in UNITS.units:
        for tensor, span in shard.pieces(unit.number):
            values = shard.view("weights", span)
            first = offsets[tensor.name]
            assert first <= values[0] <= values[-1] < first + len(tensor.span)


# Disk


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_disk_leaves_the_resident_memory_and_keeps_its_values(tmp_path):
    room = offload.DiskRoom(1 << 23, torch.float32, tmp_path)  # 32 MiB
    before = resident()

    room.values.fill_(3.0)
    filled = resident()
    room.release(0, len(room.values))
    released = resident()

    assert filled - before > 28 << 20
    assert released - before < 4 << 20
    assert bool((room.values == 3.0).all())


def test_file_of_a_shard_has_no_name(tmp_path):
    shard = made(tmp_path, "disk")

    assert list(tmp_path.iterdir()) == []
    shard.close()


def test_part_of_a_page_is_not_released(tmp_path):
    room = offload.DiskRoom(5_000, torch.float32, tmp_path)
    room.values.copy_(torch.arange(5_000.0))

    room.release(100, 3_000)
    room.release(3_000, 5_000)

    assert torch.equal(room.values, torch.arange(5_000.0))


def test_disk_without_room_is_refused_with_the_way_out(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)

    with pytest.raises(StorageFull, match="offload to 'cpu'"):
        made(tmp_path, "disk")


def test_disk_without_a_directory_is_refused():
    with pytest.raises(ConfigError, match="needs a directory"):
        Shard(UNITS, rank=0, size=1, offload="disk")
