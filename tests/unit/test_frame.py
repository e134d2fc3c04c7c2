import hashlib
import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from atoll.codecs.bf16.codec import Bf16
from atoll.codecs.int8.codec import Int8
from atoll.errors import FrameError, FrameTooLarge, LayoutMismatch, VersionMismatch
from atoll.layout import GROUP_ELEMENTS, Layout, Span
from atoll.wire import frame
from atoll.wire.header import MAX_WITH_TABLE_BYTES, SPELLED_WHERE_NOT_0, FrameHeader, Told
from tests.frames import CODEC, LAYOUT, contribution, discard, framed, ranges
from tests.frames import DATASET_ID as ID

DOCS = Path(__file__).parents[2] / "docs" / "wire-format.md"


def weights(**changes) -> FrameHeader:
    header = Told(
        kind="weights",
        run_id="run-1",
        manifest_sha256="a" * 64,
        round=3,
        result_digest="c" * 64,
    ).header(LAYOUT, CODEC)
    return replace(header, **changes)


PAYLOAD = bytes(range(60))


def whole(header: FrameHeader, payload: bytes = PAYLOAD) -> bytes:
    return framed(header.to_json(), payload)


def read(data: bytes, **settings) -> tuple[FrameHeader, bytes]:
    pieces: list[bytes] = []
    reader = frame.FrameReader(lambda piece: pieces.append(bytes(piece)), **settings)
    reader.feed(data)
    reader.finish()
    assert reader.header is not None
    return reader.header, b"".join(pieces)


class Recorder:
    """A tee that hashes, as a blob writer does."""

    def __init__(self) -> None:
        self.data = b""
        self.digests = 0

    def write(self, data) -> None:
        self.data += bytes(data)

    def digest(self) -> str:
        self.digests += 1
        return hashlib.sha256(self.data).hexdigest()


# Bytes


def test_docs_hex_example_is_what_the_code_writes():
    dump = re.search(r"```hex\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert dump is not None
    documented = bytes.fromhex("".join(re.findall(r"^[0-9a-f]{4}: (.*?)(?:  |$)", dump[1], re.M)))
    layout = Layout.of([("w", (2,), "float32")])
    header = contribution(layout, ranges=ranges((0, 6)))
    payload = CODEC.encode(torch.tensor([1.0, -2.5]), noise=None, first_group=0)

    written: list[bytes] = []
    writer = frame.FrameWriter(header, lambda piece: written.append(bytes(piece)))
    writer.payload(payload.numpy().tobytes())
    writer.finish()

    assert documented == b"".join(written)


def test_docs_table_lists_every_header_field():
    section = re.search(r"## Header\n(.*?)\n## ", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert section is not None

    listed = re.findall(r"^\| `(\w+)` \|", section[1], re.M)

    assert sorted(listed) == sorted(field.name for field in fields(FrameHeader))


def test_writer_writes_the_documented_bytes():
    written: list[bytes] = []

    writer = frame.FrameWriter(contribution(), lambda piece: written.append(bytes(piece)))
    writer.payload(PAYLOAD[:7])
    writer.payload(bytearray(PAYLOAD[7:]))
    writer.finish()

    assert b"".join(written) == whole(contribution())


def test_writer_hashes_what_is_before_the_trailer_and_returns_the_name_of_the_blob():
    writer = frame.FrameWriter(contribution(), discard)
    writer.payload(PAYLOAD)

    found = writer.finish()

    data = whole(contribution())
    assert data[-32:] == hashlib.sha256(data[:-32]).digest()
    assert found == hashlib.sha256(data).hexdigest()


def test_writer_takes_memory_of_any_item_size():
    tee = Recorder()
    values = torch.arange(15, dtype=torch.float32)

    writer = frame.FrameWriter(contribution(), tee=tee)
    writer.payload(values.numpy().data)
    writer.finish()

    assert tee.data == whole(contribution(), values.numpy().tobytes())


def test_writer_refuses_the_first_byte_beyond_the_payload():
    tee = Recorder()
    writer = frame.FrameWriter(contribution(), tee=tee)
    writer.payload(PAYLOAD)
    before = tee.data

    with pytest.raises(FrameError, match="1 bytes beyond payload_bytes=60"):
        writer.payload(b"x")

    assert tee.data == before


def test_writer_refuses_to_finish_a_short_payload():
    writer = frame.FrameWriter(contribution(), discard)
    writer.payload(PAYLOAD[:59])

    with pytest.raises(FrameError, match="lacks 1 bytes"):
        writer.finish()


def test_frame_bytes_is_the_exact_size():
    assert frame.frame_bytes(contribution()) == len(whole(contribution()))


def test_preamble_refuses_a_header_beyond_64_kib():
    many = ranges(*((2 * n, 2 * n + 1) for n in range(8000)))

    with pytest.raises(FrameTooLarge, match="at most 65536"):
        frame.preamble(contribution(ranges=many))


def test_parse_preamble_gives_the_header_and_where_the_payload_starts():
    data = whole(contribution())

    header, offset = frame.parse_preamble(data)

    assert header == contribution()
    assert data[offset : offset + 60] == PAYLOAD


# Reading


def test_reader_gives_back_header_and_payload():
    header, payload = read(whole(contribution()))

    assert header == contribution()
    assert payload == PAYLOAD


def test_reader_gives_the_same_for_bytes_one_at_a_time():
    data = whole(contribution())
    pieces: list[bytes] = []
    reader = frame.FrameReader(lambda piece: pieces.append(bytes(piece)))

    for byte in data:
        reader.feed(bytes([byte]))
    found = reader.finish()

    assert b"".join(pieces) == PAYLOAD
    assert found == hashlib.sha256(data).hexdigest()


def test_reader_passes_views_of_the_chunk_on_without_a_copy():
    data = bytearray(whole(contribution()))
    views: list[memoryview] = []
    reader = frame.FrameReader(views.append)

    reader.feed(data)

    assert [view.obj is data for view in views] == [True]


def test_reader_hashes_through_its_tee_and_hands_it_the_whole_frame():
    tee = Recorder()

    read(whole(contribution()), tee=tee)

    assert tee.data == whole(contribution())
    assert tee.digests == 2


def test_reader_trusts_the_bytes_of_its_tee_for_the_checksum():
    damaged = bytearray(whole(contribution()))
    damaged[-40] ^= 1

    with pytest.raises(FrameError, match="damaged on the way"):
        read(bytes(damaged), tee=Recorder())


def test_reader_refuses_everything_after_an_error():
    reader = frame.FrameReader(discard)
    with pytest.raises(FrameError):
        reader.feed(b"GARBAGE GARBAGE")

    with pytest.raises(FrameError, match="refused before"):
        reader.feed(whole(contribution()))


def test_reader_does_not_finish_after_an_error():
    reader = frame.FrameReader(discard)
    reader.feed(whole(contribution()))
    with pytest.raises(FrameTooLarge):
        reader.feed(b"x")

    with pytest.raises(FrameError, match="refused before"):
        reader.finish()


@pytest.mark.parametrize(
    ("kept", "part"), [(5, "header"), (20, "header"), (-92, "payload"), (-33, "payload")]
)
def test_reader_names_the_part_in_which_a_frame_ends(kept, part):
    reader = frame.FrameReader(discard)
    reader.feed(whole(contribution())[:kept])

    with pytest.raises(FrameError, match=f"inside its {part}"):
        reader.finish()


@pytest.mark.parametrize(
    ("offset", "value", "error", "says"),
    [
        (0, b"ATOM", FrameError, "starts with b'ATOM'"),
        (4, b"\x02\x00", VersionMismatch, "version 2"),
        (6, b"\x01\x00", FrameError, "flags 0x0001"),
        (8, b"\x01\x00\x01\x00", FrameTooLarge, "65537 bytes; at most 65536"),
        (8, b"\x00\x00\x00\x00", FrameError, "not ASCII JSON"),
    ],
)
def test_reader_refuses_a_fixed_part_it_does_not_know(offset, value, error, says):
    data = bytearray(whole(contribution()))
    data[offset : offset + len(value)] = value

    with pytest.raises(error, match=says):
        read(bytes(data))
    with pytest.raises(error, match=says):
        frame.parse_preamble(bytes(data))


# The header's schema


def spelled(changes: dict[str, object], *, header: FrameHeader | None = None) -> bytes:
    plain = json.loads((header or contribution()).to_json()) | changes
    return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()


@pytest.mark.parametrize("header", [contribution(), weights(), contribution(tensors=None)])
def test_header_survives_its_spelling(header):
    assert FrameHeader.from_json(header.to_json()) == header


def test_header_is_ascii_with_sorted_keys_and_no_spaces():
    text = contribution(LAYOUT, tensors=(("größe", "float32", (15,)),)).to_json()

    keys = list(json.loads(text))
    assert text.isascii()
    assert b" " not in text
    assert keys == sorted(keys)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"kind": "gossip"}, FrameError, "kind='gossip' must be one of contribution, weights"),
        ({"kind": None}, FrameError, "kind=None must be one of"),
        ({"run_id": ""}, FrameError, "run_id='' must be 1 to 128"),
        ({"run_id": "a b"}, FrameError, "run_id='a b' must be"),
        ({"manifest_sha256": "a" * 63}, FrameError, "manifest_sha256=.* must be 64 lower-case"),
        ({"manifest_sha256": "A" * 64}, FrameError, "manifest_sha256=.* must be 64 lower-case"),
        ({"manifest_sha256": "a" * 64 + "\n"}, FrameError, "manifest_sha256=.* must be 64"),
        ({"layout_digest": None}, FrameError, "layout_digest=None must be"),
        ({"base_digest": None}, FrameError, "base_digest=None must be 64"),
        ({"result_digest": "c" * 64}, FrameError, "result_digest=.* carries none"),
        ({"round": -1}, FrameError, "round=-1 must be an integer from 0"),
        ({"round": True}, FrameError, "round=True must be an integer"),
        ({"round": 1.0}, FrameError, "round=1.0 must be an integer"),
        ({"round": "1"}, FrameError, "round='1' must be an integer"),
        ({"round": 2**63}, FrameError, "round=9223372036854775808 must be an integer"),
        ({"round": None}, FrameError, "round=None must be an integer"),
        ({"incarnation": 0}, FrameError, "incarnation=0 must be an integer from 1"),
        ({"incarnation": None}, FrameError, "incarnation=None must be an integer"),
        ({"worker_id": None}, FrameError, "worker_id=None must be"),
        ({"worker_id": "a/b"}, FrameError, "worker_id='a/b' must be"),
        ({"codec": "FP32"}, FrameError, "codec='FP32' must be"),
        ({"elements": 0}, FrameError, "elements=0 must be an integer from 1"),
        ({"payload_bytes": 0}, FrameError, "payload_bytes=0 must be an integer from 1"),
        ({"weight": -1}, FrameError, "weight=-1 must be"),
        ({"rows": -1}, FrameError, "rows=-1 must be"),
        ({"tokens": False}, FrameError, "tokens=False must be"),
        ({"loss_sum": 1}, FrameError, "loss_sum=1 must be a finite float"),
        ({"loss_sum": float("nan")}, FrameError, "NaN; numbers must be finite"),
        ({"loss_sum": float("inf")}, FrameError, "Infinity; numbers must be finite"),
        ({"residual": float("nan")}, FrameError, "NaN; numbers must be finite"),
        ({"residual": float("inf")}, FrameError, "Infinity; numbers must be finite"),
        ({"residual": -0.5}, FrameError, "residual=-0.5 must be a finite float from 0 on"),
        ({"residual": "0.5"}, FrameError, "residual='0.5' must be a finite float from 0 on"),
        ({"residual": 1}, FrameError, "residual=1 must be a finite float from 0 on"),
        ({"residual": True}, FrameError, "residual=True must be a finite float"),
        ({"residual": None}, FrameError, "residual=None must be a finite float"),
        ({"residual": [0.5]}, FrameError, r"residual=\[0.5\] must be a finite float"),
        ({"carried": -1}, FrameError, "carried=-1 must be an integer from 0"),
        ({"carried": 1.0}, FrameError, "carried=1.0 must be an integer"),
        ({"carried": 2**63}, FrameError, "carried=9223372036854775808 must be an integer"),
        ({"ranges": None}, FrameError, "ranges=None must be a list"),
        ({"ranges": [[ID, 0]]}, FrameError, r"ranges entry=\['d*', 0\] must be"),
        ({"ranges": [[0, 4]]}, FrameError, r"ranges entry=\[0, 4\] must be \[dataset_id"),
        ({"ranges": [[ID, 0, True]]}, FrameError, "ranges stop=True must be"),
        ({"ranges": [[ID, 4, 4]]}, FrameError, r"ranges entry=.*4, 4\] must be a range that"),
        ({"ranges": [[ID, 0, 4], [ID, 3, 5]]}, FrameError, "3, 5.* a range of rows from 4"),
        ({"ranges": [[ID, -2, 4]]}, FrameError, "ranges start=-2 must be"),
        ({"ranges": [[1, 0, 4]]}, FrameError, "ranges dataset_id=1 must be 16 hex"),
        ({"ranges": [["D" * 16, 0, 4]]}, FrameError, "dataset_id='D*' must be 16 hex digits"),
        ({"ranges": [[ID, 0, 4], ["0" * 16, 4, 5]]}, FrameError, "in ascending order"),
        ({"datasets": [ID, ID]}, FrameError, "unknown 'datasets'"),
        ({"tensors": {}}, FrameError, "tensors={} must be a list"),
        ({"tensors": [["w", "float32"]]}, FrameError, "tensors entry=.* must be"),
        ({"tensors": [["w", "float32", 15]]}, FrameError, "tensors entry=.* must be"),
        ({"tensors": [["w", "float32", [-15]]]}, FrameError, "tensors dimension=-15 must be"),
        ({"tensors": [["w", "float32", [True, 15]]]}, FrameError, "dimension=True must be"),
        ({"tensors": [[7, "float32", [15]]]}, FrameError, "tensors name=7 must be a string"),
        ({"tensors": [["w", "float 32", [15]]]}, FrameError, "tensors dtype='float 32' must"),
        ({"tensors": [["w", "float32", [14]]]}, LayoutMismatch, "14 elements but .*=15"),
        ({"tensors": []}, LayoutMismatch, "0 elements but"),
        ({"tensors": [["w", "float32", [1] * 16 + [15]]]}, LayoutMismatch, "17 dimensions"),
        (
            {"tensors": [["w", "float32", [7]], ["w", "float32", [8]]]},
            LayoutMismatch,
            "'w' twice",
        ),
        ({"extra": 1}, FrameError, "unknown 'extra'; known are kind, run_id"),
    ],
)
def test_header_refuses_a_field_that_breaks_its_rule_by_name(changes, error, says):
    with pytest.raises(error, match=says):
        FrameHeader.from_json(spelled(changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"worker_id": "a"}, "worker_id='a' stands in a frame of kind 'weights'"),
        ({"incarnation": 1}, "incarnation=1 stands"),
        ({"ranges": [[ID, 0, 1]]}, "ranges=.* stands"),
        ({"base_digest": "b" * 64}, "base_digest=.* stands"),
        ({"result_digest": None}, "result_digest=None must be"),
        ({"kind": "update"}, "base_digest=None must be"),
    ],
)
def test_header_of_published_weights_refuses_what_they_do_not_carry(changes, says):
    with pytest.raises(FrameError, match=says):
        FrameHeader.from_json(spelled(changes, header=weights()))


@pytest.mark.parametrize(
    "name", sorted({f.name for f in fields(FrameHeader)} - SPELLED_WHERE_NOT_0.keys())
)
def test_header_refuses_a_missing_field_by_name(name):
    plain = json.loads(contribution().to_json())
    del plain[name]

    with pytest.raises(FrameError, match=f"lacks '{name}'"):
        FrameHeader.from_json(json.dumps(plain).encode())


@pytest.mark.parametrize(("name", "nothing"), SPELLED_WHERE_NOT_0.items())
def test_header_spells_a_field_that_is_0_for_most_only_where_it_is_not(name, nothing):
    """So a run of one fragment, one round at a time and no loss has the headers it always had."""
    without, with_ = contribution(), contribution(**{name: nothing + 3})

    assert name not in json.loads(without.to_json())
    assert json.loads(with_.to_json())[name] == 3
    assert FrameHeader.from_json(without.to_json()) == without
    assert FrameHeader.from_json(with_.to_json()) == with_


@pytest.mark.parametrize(("name", "nothing"), [*SPELLED_WHERE_NOT_0.items(), ("residual", -0.0)])
def test_header_refuses_a_spelled_0_of_such_a_field(name, nothing):
    with pytest.raises(FrameError, match="canonical spelling"):
        FrameHeader.from_json(spelled({name: nothing}))


@pytest.mark.parametrize(("name", "value"), [("first", 1), ("residual", 0.5), ("carried", 1)])
def test_header_of_published_weights_refuses_what_a_contribution_alone_states(name, value):
    with pytest.raises(FrameError, match=f"{name}={value} stands"):
        FrameHeader.from_json(spelled({name: value}, header=weights()))


def test_header_takes_the_whole_model_for_a_fragment_and_nothing_below():
    assert contribution(fragment=-1).fragment == -1
    with pytest.raises(FrameError, match="fragment=-2"):
        contribution(fragment=-2)


def test_header_names_the_dataset_of_each_range():
    """Rows count from 0 in each dataset."""
    header = contribution(
        ranges=(*ranges((4, 6), dataset_id="0" * 16), *ranges((0, 2), dataset_id="f" * 16))
    )

    assert FrameHeader.from_json(header.to_json()) == header


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not ASCII JSON"),
        (b"[]", "must be a JSON object"),
        (b"3", "must be a JSON object"),
        (b"{", "not ASCII JSON"),
        (b"\xff{}", "not ASCII JSON"),
        (b"[" * 60_000, "not ASCII JSON"),
        (b'{"a":' * 10_000, "not ASCII JSON"),
        (b'{"round":' + b"9" * 50_000 + b"}", "not ASCII JSON"),
        (b'{"round":1,"round":1}', "'round' twice"),
        (b'{"kind":{"a":1,"a":2}}', "'a' twice"),
        (b'{"loss_sum":-Infinity}', "-Infinity; numbers must be finite"),
    ],
)
def test_header_refuses_text_that_is_no_plain_object(data, says):
    with pytest.raises(FrameError, match=says):
        FrameHeader.from_json(data)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"round":3', b'"round": 3'),
        (b'"loss_sum":2048.5', b'"loss_sum":2.0485e3'),
        (b'"loss_sum":2048.5', b'"loss_sum":2048.50'),
        (b'"run-1"', b'"\\u0072un-1"'),
        (b'{"base', b'\n{"base'),
    ],
)
def test_header_refuses_another_spelling_of_the_same_header(old, new):
    data = contribution().to_json()
    assert old in data

    with pytest.raises(FrameError, match="canonical"):
        FrameHeader.from_json(data.replace(old, new))


def test_header_refuses_a_norm_too_large_to_be_a_float():
    data = contribution(residual=0.5).to_json().replace(b'"residual":0.5', b'"residual":1e999')

    with pytest.raises(FrameError, match="residual=inf must be a finite float from 0 on"):
        FrameHeader.from_json(data)


def test_header_refuses_a_float_too_large_to_be_one():
    data = contribution().to_json().replace(b'"loss_sum":2048.5', b'"loss_sum":1e999')

    with pytest.raises(FrameError, match="loss_sum=inf must be a finite float"):
        FrameHeader.from_json(data)


def test_header_shows_only_a_piece_of_a_long_value():
    with pytest.raises(FrameError) as caught:
        FrameHeader.from_json(spelled({"run_id": "x" * 50_000}))

    assert len(str(caught.value)) < 300


def test_header_leaves_the_table_out_above_48_kib():
    layout = Layout.of((f"layer.{n:05}.weight", (2,), "float32") for n in range(2000))

    header = contribution(layout)

    assert header.tensors is None
    assert header.layout_digest == layout.digest


def test_header_keeps_a_table_up_to_48_kib():
    layout = Layout.of((f"layer.{n:05}.weight", (2,), "float32") for n in range(1200))

    header = contribution(layout)

    assert header.table() == layout.table()
    assert len(header.to_json()) <= MAX_WITH_TABLE_BYTES


# What a run expects


@pytest.mark.parametrize("codec", [CODEC, Bf16(), Int8(block=64)])
def test_expect_takes_the_header_of_the_same_layout_and_codec(codec):
    header = contribution(codec=codec)

    frame.expect(header, layout=LAYOUT, codec=codec, kind="contribution")

    assert header.payload_bytes == codec.encoded_bytes(LAYOUT.size)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ([("embed", (3, 4), "float32"), ("norm", (3,), "float32")], r"\['embed', 'float32', \[3"),
        ([("embed", (4, 3), "float32"), ("norm", (3,), "bfloat16")], r"\['norm', 'bfloat16'"),
        ([("embed", (4, 3), "float32"), ("bias", (3,), "float32")], r"\['bias', 'float32'"),
        ([("embed", (4, 3), "float32")], "lists 1 tensors where the run's layout has 2"),
    ],
)
def test_expect_names_the_first_tensor_that_differs(other, says):
    header = contribution(Layout.of(other))

    with pytest.raises(LayoutMismatch, match=says):
        frame.expect(header, layout=LAYOUT, codec=CODEC, kind="contribution")


def test_expect_compares_digests_where_the_table_was_left_out():
    other = Layout.of([("embed", (3, 4), "float32"), ("norm", (3,), "float32")])
    header = contribution(other, tensors=None)

    with pytest.raises(LayoutMismatch, match=other.digest):
        frame.expect(header, layout=LAYOUT, codec=CODEC, kind="contribution")


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"layout_digest": "d" * 64}, LayoutMismatch, "layout_digest='dddd"),
        ({"elements": 2**60, "tensors": None}, LayoutMismatch, f"with {2**60} elements"),
        ({"payload_bytes": 61}, FrameTooLarge, "payload_bytes=61 where fp32 takes 60"),
        ({"payload_bytes": 2**60}, FrameTooLarge, f"payload_bytes={2**60}"),
        ({"payload_bytes": 59}, FrameError, "payload_bytes=59 where fp32 takes 60"),
        ({"codec": "int8_256"}, FrameError, "codec='int8_256' where the run has 'fp32'"),
    ],
)
def test_expect_refuses_what_differs_from_the_run_by_name(changes, error, says):
    header = replace(contribution(), **changes)

    with pytest.raises(error, match=says):
        frame.expect(header, layout=LAYOUT, codec=CODEC, kind="contribution")


@pytest.mark.parametrize(
    ("sent", "wanted"),
    [(Int8(block=64), Int8()), (Bf16(rounding="stochastic"), Bf16())],
    ids=["block", "rounding"],
)
def test_expect_refuses_the_same_codec_with_other_settings(sent, wanted):
    with pytest.raises(FrameError, match=f"codec='{sent.format}' where .* '{wanted.format}'"):
        frame.expect(contribution(codec=sent), layout=LAYOUT, codec=wanted, kind="contribution")


def test_expect_refuses_another_kind():
    with pytest.raises(FrameError, match="kind='contribution' where the run has 'update'"):
        frame.expect(contribution(), layout=LAYOUT, codec=CODEC, kind="update")


def test_expect_calls_only_a_payload_too_large_oversized():
    with pytest.raises(FrameError) as caught:
        frame.expect(
            contribution(payload_bytes=59), layout=LAYOUT, codec=CODEC, kind="contribution"
        )

    assert caught.value.code == "FRAME"


@pytest.mark.parametrize("codec", [CODEC, Bf16(), Int8()], ids=lambda codec: codec.format)
def test_locate_finds_the_bytes_of_every_tile(codec):
    layout = Layout.of([("w", (3 * GROUP_ELEMENTS + 1000,), "float32")])
    values = torch.arange(layout.size, dtype=torch.float32)
    encoded = codec.encode(values, noise=None, first_group=0).numpy().tobytes()
    data = whole(contribution(layout, codec), encoded)
    _, start = frame.parse_preamble(data)

    places = [frame.locate(start, codec, tile) for tile in layout.tiles(2 * 4 * GROUP_ELEMENTS)]

    assert b"".join(data[offset : offset + nbytes] for offset, nbytes in places) == encoded
    offset, nbytes = places[1]
    tail = bytearray(data[offset : offset + nbytes])
    decoded = codec.decode(torch.frombuffer(tail, dtype=torch.uint8), GROUP_ELEMENTS + 1000)
    everything = codec.decode(torch.frombuffer(bytearray(encoded), dtype=torch.uint8), layout.size)
    assert torch.equal(decoded, everything[2 * GROUP_ELEMENTS :])


def test_locate_refuses_a_span_inside_a_group():
    with pytest.raises(AssertionError):
        frame.locate(0, CODEC, Span(1, 5))


# What the reader is to expect


def refuse(header: FrameHeader) -> None:
    raise FrameError(f"round {header.round} is not wanted")


def feed(reader: frame.FrameReader, data: bytes, cut: int) -> None:
    for start in range(0, len(data), cut):
        reader.feed(data[start : start + cut])


@pytest.mark.parametrize("cut", [1, 7, 1000])
def test_unexpected_header_is_refused_before_a_byte_goes_on(cut):
    data = whole(contribution())
    tee = Recorder()
    pieces: list[memoryview] = []
    reader = frame.FrameReader(pieces.append, tee=tee, expect=refuse)
    header_ends = len(data) - len(PAYLOAD) - frame.TRAILER_BYTES

    with pytest.raises(FrameError, match="round 3 is not wanted"):
        feed(reader, data[:header_ends], cut)

    assert (tee.data, pieces) == (b"", [])
    with pytest.raises(FrameError, match="was refused before"):
        reader.finish()


def test_expected_header_is_shown_once():
    seen: list[FrameHeader] = []

    header, payload = read(whole(contribution()), expect=seen.append)

    assert (seen, payload) == ([header], PAYLOAD)
