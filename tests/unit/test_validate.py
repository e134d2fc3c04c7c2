"""The validator: what it takes, what it refuses, how early, and that a cutting changes nothing."""

import hashlib
import math
import tracemalloc

import numpy as np
import pytest
import torch

from atoll.coordinator.accept.uploads import PayloadCheck
from atoll.errors import ConfigError, ContributionError, NotFinite, StorageFull
from atoll.gather import statement as statements
from atoll.gather import validate
from atoll.gather.validate import MAX_SENTENCE, Checked, Validator
from atoll.gather.words import Reason, Skip
from atoll.layout import Layout
from atoll.optim.base import MAX_NORM
from tests import gather_objects as objects
from tests.frames import framed
from tests.gather_objects import (
    CODEC,
    FIXED_BYTES,
    KEY,
    LARGE,
    OTHER_KEY,
    SMALL,
    TILE_ELEMENTS,
    TRAILER_BYTES,
    expected,
    fed,
    header_of,
    object_of,
    stated,
    values_for,
    verdict,
)
from tests.unit.test_topk import BAD, Chunk
from tests.unit.test_topk_support import OTHER_ORDERS, squares_by_hand, terms_of

pytestmark = pytest.mark.usefixtures("one_thread")

PAYLOAD = objects.payload_of(values_for(SMALL))
GOOD = object_of(PAYLOAD)
HEADER_ENDS = len(GOOD) - len(PAYLOAD) - TRAILER_BYTES
LARGE_PAYLOAD = objects.payload_of(values_for(LARGE))
LARGE_GOOD = object_of(LARGE_PAYLOAD, LARGE)
LARGE_ENDS = [t.span.stop for t in LARGE.tensors]
LARGE_START = len(LARGE_GOOD) - len(LARGE_PAYLOAD) - TRAILER_BYTES
TILE_BYTES = CODEC.encoded_bytes(TILE_ELEMENTS)
LAST_CHUNK = LARGE.size // 4096


def reason_of(found: object) -> Reason:
    assert isinstance(found, tuple), found
    return Reason(found[0])


class Kept:
    """A tee that keeps what it gets, and counts who asks for its digest."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: memoryview) -> None:
        self.data += bytes(data)

    def digest(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


class Full(Kept):
    """A disk that is full after some bytes."""

    def write(self, data: memoryview) -> None:
        super().write(data)
        if len(self.data) > HEADER_ENDS:
            raise StorageFull("no room")


# --- what is taken ---


@pytest.mark.parametrize("size", [1, 3, 81, 83, 1009, 10**6])
def test_good_object_is_taken_however_it_is_cut(size):
    found = verdict(GOOD, size=size)

    assert found == Checked(
        sha256=hashlib.sha256(GOOD).hexdigest(),
        nbytes=len(GOOD),
        header=header_of(),
        payload_start=HEADER_ENDS,
        squares=tuple(squares_by_hand(values_for(SMALL), [t.span.stop for t in SMALL.tensors])),
        norm=found.norm if isinstance(found, Checked) else math.nan,
    )


@pytest.mark.parametrize("size", [997, TILE_BYTES - 1, TILE_BYTES, TILE_BYTES + 1, 10**6])
def test_norms_of_several_tiles_are_the_definition_to_the_bit(size):
    found = verdict(LARGE_GOOD, LARGE, size=size)

    assert isinstance(found, Checked)
    by_hand = squares_by_hand(values_for(LARGE), LARGE_ENDS)
    assert list(found.squares) == by_hand
    total = 0.0
    for square in by_hand:
        total += square
    assert found.norm == math.sqrt(total)


@pytest.mark.parametrize("other", OTHER_ORDERS.values(), ids=OTHER_ORDERS.keys())
def test_norms_in_another_order_would_show(other):
    """The control: these objects tell the order of the sum."""
    found = verdict(LARGE_GOOD, LARGE)

    assert isinstance(found, Checked)
    assert list(found.squares) != [
        other(part) if part else 0.0 for part in terms_of(values_for(LARGE), LARGE_ENDS)
    ]


def test_zeros_are_taken():
    found = verdict(object_of(objects.payload_of(torch.zeros(SMALL.size))))

    assert isinstance(found, Checked)
    assert (found.squares, found.norm) == ((0.0,) * 5, 0.0)


def test_tee_gets_the_object_and_hashes_it():
    tee = Kept()

    found = fed(Validator(expected(), stated(GOOD), tee=tee), GOOD, 100)

    assert tee.data == GOOD
    assert found.sha256 == tee.digest()


def test_signed_document_begins_the_validation():
    document = statements.signed(stated(GOOD), KEY)

    found = fed(validate.begin(expected(), document, KEY.public), GOOD, 100)

    assert found == verdict(GOOD)


# --- the statement: before a byte of the object is read ---


OFF = {
    "run_id": "run-2",
    "manifest_sha256": "0" * 64,
    "uid": "island-1",
    "window": 4,
    "base_digest": "0" * 64,
}


@pytest.mark.parametrize(("name", "value"), OFF.items(), ids=OFF.keys())
def test_statement_for_another_is_refused_by_field(name, value):
    with pytest.raises(Skip, match=f"^the statement of 'island-0' has {name}={value!r}") as caught:
        Validator(expected(), stated(GOOD, **{name: value}))

    assert (caught.value.reason, caught.value.reason.fault) == (Reason.STATEMENT, "peer")


def test_rows_are_compared_where_they_are_known():
    right = expected(sample_digest="5" * 64)

    assert fed(Validator(right, stated(GOOD)), GOOD, 100) == verdict(GOOD)
    with pytest.raises(Skip, match="has sample_digest='6666") as caught:
        Validator(right, stated(GOOD, sample_digest="6" * 64))
    assert caught.value.reason is Reason.STATEMENT


@pytest.mark.parametrize("nbytes", [1, len(PAYLOAD) + 45, len(PAYLOAD) + 12 + 65536 + 33, 2**62])
def test_size_that_no_frame_has_is_refused_with_the_statement(nbytes):
    with pytest.raises(Skip, match=rf"names an object of {nbytes} bytes; a frame of this run has"):
        Validator(expected(), stated(GOOD, nbytes=nbytes))


def test_sizes_of_frames_begin_and_end_with_the_header():
    assert expected().frame_bytes() == range(len(PAYLOAD) + 46, len(PAYLOAD) + 12 + 65536 + 33)
    assert len(GOOD) in expected().frame_bytes()


def test_statement_of_another_key_is_refused():
    document = statements.signed(stated(GOOD), OTHER_KEY)

    with pytest.raises(Skip) as caught:
        validate.begin(expected(), document, KEY.public)

    assert caught.value.reason is Reason.SIGNATURE


@pytest.mark.parametrize("bound", [0.0, -1.0, math.inf, math.nan])
def test_bound_that_bounds_nothing_is_refused(bound):
    with pytest.raises(ConfigError, match="norm_bound="):
        expected(norm_bound=bound)


# --- what is refused, and after how many bytes ---


def with_payload(chunk: int, data: bytes, layout: Layout = LARGE, payload: bytes = LARGE_PAYLOAD):
    """A frame and statement of a peer that means it, with other bytes in one chunk."""
    start = 82 * chunk
    return object_of(payload[:start] + data + payload[start + len(data) :], layout)


def full_chunk(**changes) -> bytes:
    """A chunk of 4096 that sends its first 64 values."""
    chunk = Chunk([*range(64)], [(i % 2, 0) for i in range(64)], (100, 120))
    return chunk._replace(**changes).written()


def ends_at(tile: int) -> int:
    """Where the last byte of a tile is."""
    return min(LARGE_START + TILE_BYTES * (tile + 1), len(LARGE_GOOD) - TRAILER_BYTES)


def headed(**changes) -> bytes:
    return object_of(PAYLOAD, **changes)


def replaced(at: int, data: bytes) -> bytes:
    return GOOD[:at] + data + GOOD[at + len(data) :]


def whole_weights() -> bytes:
    told = header_of(
        kind="weights", worker_id=None, incarnation=None, base_digest=None, ranges=(),
        result_digest="c" * 64,
    )  # fmt: skip
    return framed(told.to_json(), PAYLOAD)


HEADERS = {
    "run": (headed(run_id="run-2"), "FRAME", "run_id='run-2'"),
    "manifest": (headed(manifest_sha256="0" * 64), "FRAME", "manifest_sha256="),
    "uid": (headed(worker_id="island-1"), "FRAME", "worker_id='island-1'"),
    "window": (headed(round=4), "FRAME", "round=4"),
    "base": (headed(base_digest="0" * 64), "FRAME", "base_digest="),
    "fragment": (headed(fragment=1), "FRAME", "fragment=1"),
    "codec": (headed(codec="topk_32"), "FRAME", "codec='topk_32'"),
    "layout": (headed(layout_digest="0" * 64), "FRAME", "layout_digest="),
    "size": (headed(payload_bytes=len(PAYLOAD) + 1), "FRAME", "payload_bytes="),
    "kind": (whole_weights(), "FRAME", "kind='weights'"),
    "residual": (headed(residual=1.1e18), "NORM", "has residual=1.1e[+]18, above 1e[+]18"),
}


@pytest.mark.parametrize(("data", "reason", "rule"), HEADERS.values(), ids=HEADERS.keys())
def test_header_is_refused_with_its_last_byte_and_nothing_is_kept(data, reason, rule):
    tee = Kept()
    validator = Validator(expected(), stated(data), tee=tee)

    with pytest.raises(Skip, match=rule) as caught:
        fed(validator, data, 1)

    assert caught.value.reason == Reason(reason)
    assert validator.nbytes == len(data) - len(PAYLOAD) - TRAILER_BYTES
    assert tee.data == b""


FIXED = {
    "magic": (replaced(0, b"B"), "starts with"),
    "version": (replaced(4, b"\x02"), "has version 2"),
    "flags": (replaced(6, b"\x02"), "has flags"),
    "huge header": (replaced(8, b"\x01\x00\x01\x00"), "at most 65536"),
}


@pytest.mark.parametrize(("data", "rule"), FIXED.values(), ids=FIXED.keys())
def test_fixed_part_is_refused_with_its_last_byte(data, rule):
    validator = Validator(expected(), stated(data))

    with pytest.raises(Skip, match=rule) as caught:
        fed(validator, data, 1)

    assert (caught.value.reason, validator.nbytes) == (Reason.FRAME, FIXED_BYTES)


LATE_CHUNK = TILE_ELEMENTS // 4096 + 5  # in the second tile
TILES = {
    "repeated": (LATE_CHUNK, full_chunk(places=[*range(63), 62]), "INDICES", "do not ascend", 1),
    "count": (LATE_CHUNK, bytes(82), "INDICES", "as many places", 1),
    "order": (3, full_chunk(places=[1, 0, *range(2, 64)]), "INDICES", "do not ascend", 0),
    "beyond": (LAST_CHUNK, BAD["beyond the end"][0], "INDICES", "beyond its last", 2),
    "padding": (LAST_CHUNK, BAD["stray low bits"][0], "INDICES", "where none belong", 2),
    "falling table": (LATE_CHUNK, full_chunk(codes=(121, 120)), "TABLE", "no encoder writes", 1),
    "no such code": (LATE_CHUNK, full_chunk(codes=(100, 253)), "TABLE", "no encoder writes", 1),
    "not a number": (
        *(LATE_CHUNK, full_chunk(flags=[(0, 0)] * 64, codes=(255, 0))),
        *("TABLE", "holds NaN or infinity", 1),
    ),
    "too large": (LATE_CHUNK, full_chunk(codes=(100, 252)), "NORM", "has norm=.*above 1e", 1),
}


@pytest.mark.parametrize(
    ("chunk", "data", "reason", "rule", "tile"), TILES.values(), ids=TILES.keys()
)
def test_payload_is_refused_with_the_tile_that_is_wrong(chunk, data, reason, rule, tile):
    whole = with_payload(chunk, data)
    validator = Validator(expected(LARGE), stated(whole, LARGE))

    with pytest.raises(Skip, match=rule) as caught:
        fed(validator, whole, 1)

    assert caught.value.reason == Reason(reason)
    assert reason == "NORM" or caught.value.sentence.endswith(f"in chunk {chunk}")
    assert validator.nbytes == ends_at(tile)


@pytest.mark.parametrize(("chunk", "data"), [(7, full_chunk()), (LAST_CHUNK, b"")])
def test_other_chunks_are_taken_where_these_are_refused(chunk, data):
    """The control: it is what is in the chunk, not that it was changed."""
    assert isinstance(verdict(with_payload(chunk, data), LARGE), Checked)


@pytest.mark.parametrize("size", [1, 50, TILE_BYTES, 10**6])
@pytest.mark.parametrize("later", ["repeated", "falling table"])
def test_first_thing_wrong_stands_however_it_is_cut(size, later):
    """A norm in the first tile, another fault in the second and one byte too many: the norm."""
    chunk, data, *_ = TILES[later]
    payload = bytearray(LARGE_PAYLOAD)
    payload[82 * chunk : 82 * chunk + 82] = data
    whole = with_payload(2, full_chunk(codes=(100, 252)), payload=bytes(payload))

    found = verdict(whole + b"\0", LARGE, size=size, nbytes=len(whole))

    assert reason_of(found) is Reason.NORM
    assert found == verdict(whole, LARGE)


def test_damaged_checksum_is_refused():
    data = bytearray(GOOD)
    data[-1] ^= 1
    validator = Validator(expected(), stated(bytes(data)))

    with pytest.raises(Skip, match="its trailer says") as caught:
        fed(validator, bytes(data), 1)

    assert (caught.value.reason, validator.nbytes) == (Reason.FRAME, len(GOOD))


def test_frame_that_the_statement_does_not_name_is_refused():
    """Swapped: a good frame of the same peer and window, of the same size."""
    swapped = object_of(objects.payload_of(values_for(SMALL, seed=1)))
    right = stated(GOOD)
    assert isinstance(verdict(swapped), Checked)

    with pytest.raises(Skip, match="where its statement names") as caught:
        fed(Validator(expected(), right), swapped, 100)

    assert caught.value.reason is Reason.FRAME


@pytest.mark.parametrize("by", [-1, 1])
def test_frame_of_another_size_than_stated_is_refused_with_its_header(by):
    validator = Validator(expected(), stated(GOOD, nbytes=len(GOOD) + by))

    with pytest.raises(Skip, match=f"has a frame of {len(GOOD)} bytes") as caught:
        fed(validator, GOOD, 1)

    assert (caught.value.reason, validator.nbytes) == (Reason.SIZE, HEADER_ENDS)


@pytest.mark.parametrize("size", [1, 100, 10**6])
def test_one_byte_too_many_is_refused_and_what_follows_too(size):
    validator = Validator(expected(), stated(GOOD))

    with pytest.raises(Skip, match=f"goes on after the {len(GOOD)} bytes") as caught:
        fed(validator, GOOD + b"\0", size)

    assert (caught.value.reason, validator.nbytes) == (Reason.SIZE, len(GOOD))
    with pytest.raises(Skip, match="goes on after"):
        validator.finish()


def test_byte_after_the_end_is_refused():
    validator = Validator(expected(), stated(GOOD))
    found = fed(validator, GOOD, 100)

    validator.feed(b"")
    assert validator.finish() == found
    with pytest.raises(Skip, match="goes on after"):
        validator.feed(b"\0")
    with pytest.raises(Skip, match="goes on after"):
        validator.finish()


@pytest.mark.parametrize("size", [0, 1, FIXED_BYTES, HEADER_ENDS, HEADER_ENDS + 82, len(GOOD) - 1])
def test_object_that_ends_early_is_refused_for_good(size):
    validator = Validator(expected(), stated(GOOD))
    validator.feed(GOOD[:size])
    assert (validator.nbytes, validator.missing) == (size, len(GOOD) - size)

    with pytest.raises(Skip, match=f"ends after {size} of the {len(GOOD)} bytes") as caught:
        validator.finish()

    assert caught.value.reason is Reason.SIZE
    with pytest.raises(Skip, match=f"ends after {size} of"):
        validator.feed(GOOD[size:])


def test_after_a_refusal_the_same_one_stands_and_nothing_more_is_taken():
    tee = Kept()
    data = with_payload(3, bytes(82))
    validator = Validator(expected(LARGE), stated(data, LARGE), tee=tee)
    with pytest.raises(Skip) as first:
        fed(validator, data, 100)
    kept = len(tee.data)

    with pytest.raises(Skip) as again:
        validator.feed(data[validator.nbytes :])
    with pytest.raises(Skip) as at_the_end:
        validator.finish()

    assert first.value is again.value is at_the_end.value
    assert len(tee.data) == kept


def test_full_disk_is_no_fault_of_the_peer():
    validator = Validator(expected(), stated(GOOD), tee=Full())

    with pytest.raises(StorageFull):
        fed(validator, GOOD, 100)
    with pytest.raises(StorageFull):
        validator.finish()


def test_validators_share_nothing():
    """Pieces of a bad object between those of a good one."""
    bad = with_payload(3, bytes(82))
    one = Validator(expected(LARGE), stated(LARGE_GOOD, LARGE))
    two = Validator(expected(LARGE), stated(bad, LARGE))
    one.feed(LARGE_GOOD[:5000])
    with pytest.raises(Skip):
        fed(two, bad, 997)

    one.feed(LARGE_GOOD[5000:])

    assert one.finish() == verdict(LARGE_GOOD, LARGE)


def test_sentence_is_bounded_whatever_a_peer_writes():
    rows = (("x" * 30_000, "float32", (SMALL.size,)),)

    found = verdict(headed(tensors=rows))

    assert isinstance(found, tuple)
    assert found[0] is Reason.FRAME
    assert 100 < len(found[1]) <= MAX_SENTENCE


def test_memory_is_a_piece_and_a_tile():
    size = 1000 * 4096
    layout = Layout.of([("w", (size,), "float32")])
    chunk = full_chunk()
    data = object_of(chunk * 1000, layout)
    validator = Validator(expected(layout), stated(data, layout))
    pieces = [*objects.cut(data, 4096)]
    fed(Validator(expected(layout), stated(data, layout)), data, 4096)  # what is made once
    tracemalloc.start()

    for piece in pieces:
        validator.feed(piece)
    validator.finish()

    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20, peak
    assert len(data) > 80_000


# --- the bound of the accept path ---


def of_norm(count: int, code: int) -> bytes:
    """A payload whose first chunk sends `count` values of one magnitude, and zeros."""
    above = [(int(i < count), 0) for i in range(64)]
    chunk = Chunk([*range(64)], above, (0, code)).written()
    return chunk + PAYLOAD[82:]


def accepts(payload: bytes) -> bool:
    check = PayloadCheck(CODEC, SMALL)
    check(memoryview(payload))
    try:
        check.norm()
    except (NotFinite, ContributionError):
        return False
    return True


# 2^51 is taken, 2^60 = 1.15e18 is not.
@pytest.mark.parametrize(
    ("code", "is_taken"), [(238, True), (244, True), (245, False), (252, False)]
)
def test_bound_is_that_of_the_accept_path(code, is_taken):
    payload = of_norm(1, code)

    found = verdict(object_of(payload))

    assert accepts(payload) is is_taken
    assert isinstance(found, Checked) is is_taken
    assert is_taken or reason_of(found) is Reason.NORM
    assert expected().norm_bound == MAX_NORM


def test_norm_at_the_bound_is_taken_and_one_value_more_is_not():
    exact = math.sqrt(sum(squares_by_hand(values_for(SMALL), [SMALL.size])))
    found = verdict(GOOD)
    assert isinstance(found, Checked)
    assert found.norm == pytest.approx(exact, rel=1e-12)

    at = Validator(expected(norm_bound=found.norm), stated(GOOD))
    below = Validator(expected(norm_bound=float(np.nextafter(found.norm, 0))), stated(GOOD))

    assert fed(at, GOOD, 100) == found
    with pytest.raises(Skip) as caught:
        fed(below, GOOD, 100)
    assert caught.value.reason is Reason.NORM
