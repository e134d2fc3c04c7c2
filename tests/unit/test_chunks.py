"""The hand-made data part is protobuf's own, byte for byte."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.wire import chunks
from atoll.wire.proto import transfer_pb2

PARTS = [transfer_pb2.UploadPart, transfer_pb2.DownloadPart]
SIZES = [0, 1, 127, 128, 16_383, 16_384, 1 << 20, (1 << 21) + 3]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("message", PARTS)
def test_data_part_is_what_protobuf_writes(message, size):
    data = bytes(range(256)) * (size // 256 + 1)

    made = chunks.data_part(data[:size])

    assert made == message(data=data[:size]).SerializeToString()


@pytest.mark.parametrize("size", SIZES)
def test_data_of_gives_back_the_data_without_a_copy(size):
    message = chunks.data_part(b"x" * size)

    found = chunks.data_of(message)

    assert found is not None
    assert bytes(found) == b"x" * size
    assert found.obj is message


@pytest.mark.parametrize(
    "message",
    [
        b"",
        transfer_pb2.UploadPart(commit=True).SerializeToString(),
        transfer_pb2.UploadPart(open=transfer_pb2.UploadOpen(nbytes=5)).SerializeToString(),
        chunks.data_part(b"abc") + b"\x18\x01",
        chunks.data_part(b"abc")[:-1],
        b"\x12",
        b"\x12\xff\xff\xff\xff\xff\xff",
    ],
)
def test_data_of_leaves_every_other_message_to_protobuf(message):
    assert chunks.data_of(message) is None


@given(st.binary(max_size=40))
def test_data_of_agrees_with_protobuf_on_any_bytes(message):
    found = chunks.data_of(message)

    if found is not None:
        assert transfer_pb2.UploadPart.FromString(message).data == bytes(found)
