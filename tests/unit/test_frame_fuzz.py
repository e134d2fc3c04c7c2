"""Frames that were cut, damaged, forged or padded: a typed error, bounded memory, nothing else."""

import json
import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import FrameError, FrameTooLarge, LayoutMismatch, VersionMismatch
from atoll.layout import Layout
from atoll.wire import frame
from atoll.wire.header import FrameHeader, Told
from tests.frames import CODEC, contribution, discard, framed, ranges

LAYOUT = Layout.of([("w", (2, 2), "float32")])
HEADER = contribution(LAYOUT, CODEC, ranges=ranges((0, 6)), residual=0.25, carried=2)
# The same examples in every run, and no deadline: a busy machine is no finding.
fuzzed = settings(max_examples=80, deadline=None, derandomize=True)
REFUSALS = (FrameError, VersionMismatch, LayoutMismatch)


def whole(text: bytes = HEADER.to_json(), payload: bytes = bytes(16)) -> bytes:
    return framed(text, payload)


FRAME = whole()


def read(chunks, *, is_expected=True) -> bytes:
    pieces: list[bytes] = []
    reader = frame.FrameReader(lambda piece: pieces.append(bytes(piece)))
    for chunk in chunks:
        reader.feed(chunk)
    reader.finish()
    if is_expected:
        assert reader.header is not None
        frame.expect(reader.header, layout=LAYOUT, codec=CODEC, kind="contribution")
    return b"".join(pieces)


def is_refused(data: bytes, *, is_expected=True) -> bool:
    """Whether the reader raises one of its typed errors; any other error passes through."""
    try:
        read([data], is_expected=is_expected)
    except REFUSALS:
        return True
    return False


def test_every_truncation_is_refused():
    taken = [size for size in range(len(FRAME)) if not is_refused(FRAME[:size])]

    assert taken == []


def test_every_single_bit_flip_is_refused():
    def flipped(bit: int) -> bytes:
        data = bytearray(FRAME)
        data[bit // 8] ^= 1 << bit % 8
        return bytes(data)

    taken = [
        bit for bit in range(8 * len(FRAME)) if not is_refused(flipped(bit), is_expected=False)
    ]

    assert taken == []


@fuzzed
@given(st.lists(st.integers(0, len(FRAME)), max_size=30), st.binary(min_size=16, max_size=16))
def test_payload_arrives_whole_for_any_chunk_boundaries(cuts, payload):
    data = whole(payload=payload)
    edges = [0, *sorted(cuts), len(data)]

    received = read([data[a:b] for a, b in pairwise(edges)])

    assert received == payload


@fuzzed
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_by_a_typed_error(data):
    assert is_refused(data)


@fuzzed
@given(st.binary(max_size=400))
def test_any_bytes_as_a_header_are_refused_by_a_typed_error(text):
    assert is_refused(whole(text), is_expected=False)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


@fuzzed
@given(st.sampled_from(sorted(json.loads(HEADER.to_json()))), json_values)
def test_a_header_with_any_value_in_one_field_is_refused_or_spelled_back(name, value):
    plain = json.loads(HEADER.to_json()) | {name: value}
    text = json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()

    try:
        header = FrameHeader.from_json(text)
    except REFUSALS:
        return

    assert header.to_json() == text


@fuzzed
@given(st.integers(1, 1000), st.integers(1, 60))
def test_a_stream_too_long_is_refused_at_its_first_byte_too_many(surplus, chunk_bytes):
    data = FRAME + bytes(surplus)
    received: list[int] = []
    reader = frame.FrameReader(lambda piece: received.append(piece.nbytes))
    whole_chunks = len(FRAME) // chunk_bytes * chunk_bytes
    for start in range(0, whole_chunks, chunk_bytes):
        reader.feed(data[start : start + chunk_bytes])

    with pytest.raises(FrameTooLarge, match="follow the end of the frame"):
        reader.feed(data[whole_chunks : len(FRAME) + 1])

    assert sum(received) <= 16


def test_a_stream_ten_times_too_long_is_refused_before_its_payload_is_passed_on():
    received: list[memoryview] = []
    reader = frame.FrameReader(received.append)

    with pytest.raises(FrameTooLarge):
        reader.feed(FRAME * 10)

    assert received == []


@pytest.mark.parametrize("bits", ["0000c07f", "0000807f", "000080ff"])
def test_values_that_are_not_finite_pass_the_frame(bits):
    payload = bytes.fromhex(bits) * 4

    assert read([whole(payload=payload)]) == payload


HOSTILE = {
    "elements": HEADER.to_json()
    .replace(b'"elements":4', b'"elements":1152921504606846976')
    .replace(b'[["w","float32",[2,2]]]', b"null"),
    "payload": HEADER.to_json().replace(b'"payload_bytes":16', b'"payload_bytes":%d' % 2**60),
    "shape": HEADER.to_json().replace(b"[2,2]", b"[%d,%d,%d]" % ((2**62,) * 3)),
    "ranges": HEADER.to_json().replace(b"0,6]]", b"0,%d]]" % 2**62),
}


def peak_bytes(data: bytes) -> int:
    reader = frame.FrameReader(discard)
    tracemalloc.start()
    try:
        reader.feed(data)
    except REFUSALS:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return peak


@pytest.mark.parametrize("claim", sorted(HOSTILE))
def test_a_header_that_claims_much_allocates_little(claim):
    assert HOSTILE[claim] != HEADER.to_json()

    peak = peak_bytes(whole(HOSTILE[claim]))

    assert peak < 1 << 20


@pytest.mark.parametrize("claim", ["elements", "payload", "shape"])
def test_a_header_that_claims_more_than_the_layout_is_refused(claim):
    assert is_refused(whole(HOSTILE[claim]))


def test_reader_keeps_nothing_of_a_long_payload():
    size = 32 << 20
    layout = Layout.of([("w", (size // 4,), "float32")])
    header = Told(
        kind="weights",
        run_id="r",
        manifest_sha256="a" * 64,
        round=1,
        result_digest="c" * 64,
    ).header(layout, CODEC)
    reader = frame.FrameReader(discard)
    reader.feed(frame.preamble(header))
    chunk = bytes(1 << 20)

    tracemalloc.start()
    for _ in range(size >> 20):
        reader.feed(chunk)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 64 * 1024
