"""The data plane's hot message, without protobuf's copies.

`UploadPart.data`, `DownloadPart.data` and `PartPiece.data` are all field 2 of their message, so a
part that carries only data is: tag 0x12, the length as a varint, the bytes. Both sides build and
read it by hand; everything else, and what does not look exactly like this, goes through protobuf.
"""

CHUNK_BYTES = 1 << 20  # measured: 2 MiB is a tenth faster on loopback and takes twice the memory
_DATA_TAG = 0x12  # field 2, length-delimited
_MORE = 0x80


def data_part(data: bytes) -> bytes:
    """The serialized part that carries `data`: one copy."""
    return b"".join((_prefix(len(data)), data))


def data_of(message: bytes) -> memoryview | None:
    """The data of a serialized part that carries nothing else, without a copy; else None."""
    if not message or message[0] != _DATA_TAG:
        return None
    length, shift, offset = 0, 0, 1
    while offset < min(len(message), 6):
        byte = message[offset]
        offset += 1
        length |= (byte & ~_MORE) << shift
        shift += 7
        if not byte & _MORE:
            return memoryview(message)[offset:] if offset + length == len(message) else None
    return None


def _prefix(length: int) -> bytes:
    digits = bytearray([_DATA_TAG])
    while length >= _MORE:
        digits.append(length & ~_MORE & 0xFF | _MORE)
        length >>= 7
    digits.append(length)
    return bytes(digits)
