"""Pieces of a payload become tiles: the same ones however the payload was cut."""

import pytest

from atoll.codecs.fp32.codec import Fp32
from atoll.codecs.topk.codec import TopK
from atoll.errors import FrameError
from atoll.layout import ELEMENT_BYTES, GROUP_ELEMENTS, Layout, Span
from atoll.wire.tiles import PayloadTiles

LAYOUT = Layout.of([("a", (GROUP_ELEMENTS,), "float32"), ("b", (GROUP_ELEMENTS + 100,), "float32")])
GROUP_BYTES = GROUP_ELEMENTS * ELEMENT_BYTES
SPANS = [
    Span(0, GROUP_ELEMENTS),
    Span(GROUP_ELEMENTS, 2 * GROUP_ELEMENTS),
    Span(2 * GROUP_ELEMENTS, LAYOUT.size),
]


def tiles_of(codec, data: bytes, cut: int) -> list[tuple[Span, bytes]]:
    found: list[tuple[Span, bytes]] = []
    tiles = PayloadTiles(
        codec,
        LAYOUT,
        lambda span, payload: found.append((span, payload.numpy().tobytes())),
        budget_bytes=GROUP_BYTES,
    )
    for start in range(0, len(data), cut):
        tiles(memoryview(data)[start : start + cut])
    return found


@pytest.mark.parametrize("cut", [1, 81, 83, 1311, 1312, 1313, 10**6])
def test_tiles_are_those_of_the_layout(cut):
    data = bytes(i % 251 for i in range(TopK().encoded_bytes(LAYOUT.size)))

    found = tiles_of(TopK(), data, cut)

    assert [span for span, _ in found] == SPANS
    assert b"".join(part for _, part in found) == data
    assert [len(part) for _, part in found] == [TopK().encoded_bytes(len(span)) for span in SPANS]


def test_payload_that_goes_on_is_refused():
    data = bytes(Fp32().encoded_bytes(LAYOUT.size) + 1)

    with pytest.raises(FrameError, match="goes on after the last tile"):
        tiles_of(Fp32(), data, len(data))


def test_tile_that_is_not_complete_is_not_handed_on():
    found = tiles_of(TopK(), bytes(TopK().encoded_bytes(GROUP_ELEMENTS) - 1), 100)

    assert found == []
