"""Versions as the contributions that make them: the frame, and what an island makes of it."""

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from atoll.codecs.fp32.codec import Fp32
from atoll.errors import AtollError, FrameError, FrameTooLarge, StoreError
from atoll.island.state.weights import IslandWeights
from atoll.layout import Layout
from atoll.strategies import registry
from atoll.strategies.gather import artifact, local
from atoll.strategies.gather.artifact import ArtifactFormat, Table
from atoll.sums import digest as digests
from atoll.versions import weights as stored
from atoll.wire import frame
from atoll.wire.frame import FrameWriter
from tests import gather_reference as naive
from tests.clusters import flat_of, module_of
from tests.gather_runs import fetched, manifest
from tests.gathers import LAYOUT, SIZES, bits, peers, start

RATE = 0.3
STRATEGY = registry.of(manifest(outer__lr=RATE))
GIVEN = peers(3)
BASE = start()
RUN: dict[str, Any] = {"run_id": "run", "manifest_sha256": "a" * 64, "round_number": 1}


def digest(flat: Any, layout: Layout = LAYOUT) -> str:
    return digests.digest(layout, flat).root


@pytest.fixture(scope="module")
def after() -> torch.Tensor:
    """The weights of version 1, by the naive program."""
    found = naive.window(GIVEN, SIZES, list(BASE.numpy()), lr=RATE)
    return torch.tensor([float(value) for value in found.weights])


@pytest.fixture(scope="module")
def whole(after) -> bytes:
    """The frame that leads to it."""
    return made(GIVEN, result=digest(after))


def made(given: Mapping[str, naive.Peer], *, result: str, base: str | None = None) -> bytes:
    pieces = local.frame_of(
        STRATEGY,
        LAYOUT,
        fetched(given),
        base_digest=base or digest(BASE),
        result_digest=result,
        **RUN,
    )
    assert pieces is not None
    return b"".join(pieces)


def weights_frame(flat: torch.Tensor, version: int) -> bytes:
    head = stored.weights_header(
        LAYOUT, run_id="run", manifest_sha256="a" * 64, version=version, digest=digest(flat)
    )
    data = bytearray()
    writer = FrameWriter(head, data.extend)
    writer.payload(flat.numpy().tobytes())
    writer.finish()
    return bytes(data)


class Island:
    """An island that holds version 0."""

    def __init__(self, strategy: Any = STRATEGY) -> None:
        self.model = module_of(LAYOUT)
        self.weights = IslandWeights(self.model, LAYOUT, strategy=strategy, download=Fp32())
        self.take(weights_frame(BASE, 0))

    def take(self, data: bytes, *, cut: int = 1 << 16) -> None:
        receiver = self.weights.receive(run_id="run")
        for offset in range(0, len(data), cut):
            receiver.feed(data[offset : offset + cut])
        receiver.finish()

    def flat(self) -> torch.Tensor:
        self.weights.train()
        self.weights.reset()
        return flat_of(self.model)


@pytest.mark.parametrize("cut", [997, 1 << 16, 1 << 30])
def test_island_folds_the_contributions_itself_however_the_frame_is_cut(whole, after, cut):
    island = Island()

    island.take(whole, cut=cut)

    assert bits(island.flat()) == bits(after)
    assert island.weights.held == (1, digest(after))


def test_frame_holds_the_table_and_then_group_by_group_the_payloads_of_all(whole):
    """Written down anew from the description."""
    header, at = frame.parse_preamble(whole)
    uids = sorted(GIVEN)
    norms = {uid: [s**0.5 for s in naive.squares(GIVEN[uid].payload, SIZES)] for uid in uids}
    factors = naive.clipped(norms)
    wanted = struct.pack("<d", RATE)
    for uid, source in zip(uids, fetched(GIVEN), strict=True):
        wanted += struct.pack("<Q", GIVEN[uid].weight) + bytes.fromhex(source.sha256)
        wanted += b"".join(struct.pack("<f", factor) for factor in factors[uid])
    for group in range(0, LAYOUT.size, 65_536):
        first, stop = group // 4096 * 82, (group + 65_536) // 4096 * 82
        wanted += b"".join(GIVEN[uid].payload[first:stop] for uid in uids)

    assert whole[at:-32] == wanted
    assert whole[-32:] == hashlib.sha256(whole[:at]).digest()
    assert (header.kind, header.round, header.codec) == ("update", 1, "artifact_topk_64")


def test_frame_is_the_same_at_any_tile_size(whole, after, monkeypatch):
    monkeypatch.setattr(artifact, "TILE_BYTES", 2 * 65_536 * 4)

    assert made(GIVEN, result=digest(after)) == whole


def test_frame_has_82_bytes_for_each_chunk_and_contribution_and_little_more(whole):
    chunks = -(-LAYOUT.size // 4096)
    head = 8 + len(GIVEN) * (40 + 4 * len(LAYOUT.tensors))

    _, at = frame.parse_preamble(whole)

    assert len(whole) - at - 32 - head <= len(GIVEN) * chunks * 82


def test_version_of_more_bytes_than_the_weights_travels_as_weights():
    layout = Layout.of([("p", (4096,), "float32")])
    each = 82 + 40 + 4
    most = (4 * layout.size - 8) // each

    assert STRATEGY.bundle(layout, most) is not None
    assert STRATEGY.bundle(layout, most + 1) is None
    sources = fetched({str(k): GIVEN["4"] for k in range(most + 1)})
    assert (
        local.frame_of(STRATEGY, layout, sources, base_digest="", result_digest="", **RUN) is None
    )


def test_contribution_whose_file_was_cut_is_named(after):
    [source, *others] = fetched(GIVEN)
    short = replace(source, read=lambda at, n: source.read(at, n)[: n // 2])

    with pytest.raises(StoreError, match=source.sha256):
        local.frame_of(
            STRATEGY, LAYOUT, [short, *others], base_digest="0" * 64, result_digest="0" * 64, **RUN
        )


# What is forged


def place_of_table(data: bytes) -> int:
    return frame.parse_preamble(data)[1]


def spelled(data: bytes, **changes: Any) -> bytes:
    """The frame under a header with `changes`."""
    header, at = frame.parse_preamble(data)
    start = frame.preamble(replace(header, **changes), digest_checked=True)
    return start + data[at:-32] + hashlib.sha256(start).digest()


def patched(data: bytes, offset: int, new: bytes) -> bytes:
    """The frame with other bytes in its payload."""
    at = place_of_table(data) + offset
    return data[:at] + new + data[at + len(new) :]


ROW = 40 + 4 * len(LAYOUT.tensors)
BODY = 8 + len(GIVEN) * ROW
NOT_FACTORS = [float("nan"), float("inf"), -0.5, 1.5]


@pytest.mark.parametrize(
    ("offset", "new", "said"),
    [
        (0, struct.pack("<d", float("nan")), "rate=nan"),
        (0, struct.pack("<d", 0.0), "rate=0.0"),
        (0, struct.pack("<d", float("inf")), "rate=inf"),
        (8, struct.pack("<Q", 0), "contribution 0 of the artifact has weight=0"),
        (8 + ROW, struct.pack("<Q", 2**64 - 1), "contribution 1 of the artifact has weight="),
        *[
            (8 + 2 * ROW + 40 + 4, struct.pack("<f", factor), "contribution 2 .* a factor outside")
            for factor in NOT_FACTORS
        ],
        (BODY, b"\xff" * 82, "slice 0 of elements 0 to 65536"),
        (BODY + 3 * 16 * 82 + 82 - 1, b"\xff", "slice 0 of elements 65536 to 131072"),
        (0, struct.pack("<d", RATE / 2), "arrived with digest"),
        (8, struct.pack("<Q", 9), "arrived with digest"),
        (8 + 40, struct.pack("<f", 0.5), "arrived with digest"),
    ],
)
def test_forged_payload_is_refused_and_whole_weights_follow(whole, after, offset, new, said):
    island = Island()

    with pytest.raises(FrameError, match=said):
        island.take(patched(whole, offset, new))

    island.weights.forget()
    island.take(weights_frame(after, 1))
    assert bits(island.flat()) == bits(after)


def test_contributions_in_another_order_do_not_become_the_version(after):
    turned = {f"{100 - int(uid):03}": peer for uid, peer in GIVEN.items()}

    with pytest.raises(FrameError, match="arrived with digest"):
        Island().take(made(turned, result=digest(after)))


def test_hash_in_the_table_is_what_the_coordinator_recorded_and_decides_nothing(whole, after):
    island = Island()

    island.take(patched(whole, 8 + 8, b"\0" * 32))

    assert bits(island.flat()) == bits(after)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"payload_bytes": 1}, FrameError),
        ({"payload_bytes": 8}, FrameError),
        ({"payload_bytes": 2**62}, FrameError),
        ({"payload_bytes": ArtifactFormat(LAYOUT, 4).nbytes}, FrameError),
        ({"payload_bytes": ArtifactFormat(LAYOUT, 10**9).nbytes}, FrameTooLarge),
        ({"codec": "artifact_topk_65"}, FrameError),
        ({"kind": "weights", "base_digest": None}, FrameError),
        ({"base_digest": "b" * 64}, FrameError),
        ({"result_digest": "b" * 64}, FrameError),
        ({"elements": 5, "tensors": None}, AtollError),
        ({"layout_digest": "b" * 64, "tensors": None}, AtollError),
    ],
)
def test_forged_header_is_refused(whole, changes, kind):
    island = Island()

    with pytest.raises(kind):
        island.take(spelled(whole, **changes))

    assert island.weights.held == (0, digest(BASE))


def test_refused_header_leaves_the_weights_alone(whole):
    island = Island()

    with pytest.raises(FrameError):
        island.take(spelled(whole, base_digest="b" * 64))

    assert bits(island.flat()) == bits(BASE)


def test_island_of_another_run_takes_no_artifact(whole):
    other = registry.of(
        manifest().model_copy(
            update={"strategy": "diloco", "gather": type(manifest()).model_fields["gather"].default}
        )
    )

    with pytest.raises(FrameError, match="codec='artifact_topk_64' where the run has 'fp32'"):
        Island(other).take(whole)


@pytest.mark.parametrize("end", [1, 40, 5_000, 100_000])
def test_frame_that_ends_early_is_refused(whole, end):
    with pytest.raises(FrameError):
        Island().take(whole[:-end])


def test_table_is_read_as_it_was_written(whole):
    of = ArtifactFormat(LAYOUT, len(GIVEN))
    at = place_of_table(whole)

    found = Table.parse(whole[at : at + of.table_bytes], of)

    assert found.weights == tuple(GIVEN[uid].weight for uid in sorted(GIVEN))
    assert found.to_bytes() == whole[at : at + of.table_bytes]
