"""How a message between ranks is written: the values, then what they are.

    values | u64 group | u64 sub-group | u64 step | u32 micro | u8 op | u32 unit | u32 phase
           | u64 start | u64 stop

Little-endian. What it is stands behind the values, so that these begin where the message begins
and are read where they lie. Over a socket that is turned round, with their length first:

    u64 bytes of values | u64 group | ... | u64 stop | values

Now and then, and when it is asked, the receiver says how many messages more lie in its mailbox.
It is asked with a message of one byte, over a socket with a header of zeros. A ranged read has

    u64 start | u64 stop | name in UTF-8

and a question is

    body | name in UTF-8 | u16 bytes of the name
"""

import struct
from typing import get_args

from atoll.collectives import memory
from atoll.collectives.base import Key, Label, Op
from atoll.collectives.exchange import CHUNK_BYTES
from atoll.errors import ProtocolError
from atoll.layout import Span

_TRAILER = struct.Struct("<QQQIBIIQQ")
TRAILER_BYTES = _TRAILER.size
ASK = b"?"
_LENGTH = struct.Struct("<Q")
HEADER_BYTES = _LENGTH.size + TRAILER_BYTES
ASK_HEADER = bytes(HEADER_BYTES)
MAX_VALUES_BYTES = CHUNK_BYTES + (64 << 10)  # over any carrier
_RANGE = struct.Struct("<QQ")
_NAME = struct.Struct("<H")
_INVITATION = struct.Struct("<H32s")
MAX_NAME_BYTES = 512
_OPS: tuple[Op, ...] = get_args(Op)


def packed(label: Label, values: memoryview) -> bytes:
    """The message; copies the values once."""
    return b"".join((values, _trailer(label)))


def unpacked(message: bytes) -> tuple[Label, memoryview]:
    """What the values are, and the values; ProtocolError for what no rank writes."""
    if len(message) <= TRAILER_BYTES:
        raise ProtocolError(
            f"a message of {len(message)} bytes is too short; what it is takes {TRAILER_BYTES}, "
            f"and no rank sends nothing"
        )
    size = len(message) - TRAILER_BYTES
    return _label(message, size), memory.readable(message, size)


def count(taken: int) -> bytes:
    """The answer: so many more messages lie in the mailbox."""
    return bytes([taken])


def count_of(answer: bytes) -> int:
    """How many; ProtocolError for what no rank answers."""
    if len(answer) != 1:
        raise ProtocolError(f"an answer of {len(answer)} bytes is not one, which has 1")
    return answer[0]


def header(label: Label, nbytes: int) -> bytes:
    """What goes over a socket before the values."""
    return _LENGTH.pack(nbytes) + _trailer(label)


def announced(header: memoryview) -> tuple[Label, int]:
    """What comes over a socket, and how many bytes; ProtocolError for what no rank writes."""
    (nbytes,) = _LENGTH.unpack_from(header)
    if not 0 < nbytes <= MAX_VALUES_BYTES:
        raise ProtocolError(
            f"a message of {nbytes} bytes is empty or too long; at most "
            f"{MAX_VALUES_BYTES} are taken"
        )
    return _label(header, _LENGTH.size), nbytes


def _trailer(label: Label) -> bytes:
    key, span = label.key, label.span
    which = (key.group, label.subgroup, key.step, key.micro, _OPS.index(key.op), key.unit)
    return _TRAILER.pack(*which, label.phase, span.start, span.stop)


def _label(data: bytes | memoryview, offset: int) -> Label:
    found: tuple[int, ...] = _TRAILER.unpack_from(data, offset)
    group, subgroup, step, micro, op, unit, phase, start, stop = found
    if op >= len(_OPS) or start > stop:
        raise ProtocolError(
            f"op={op} and elements [{start}, {stop}) of the message are out of range; there are "
            f"{len(_OPS)} kinds, and a span does not end before it starts"
        )
    key = Key(group=group, step=step, op=_OPS[op], micro=micro, unit=unit)
    return Label(key, phase, Span(start, stop), subgroup)


def read_request(name: str, start: int, stop: int) -> bytes:
    """What a ranged read asks with."""
    written = name.encode()
    if len(written) > MAX_NAME_BYTES:
        raise ProtocolError(
            f"name={name[:40]!r}… has {len(written)} bytes; at most {MAX_NAME_BYTES} are read"
        )
    return _RANGE.pack(start, stop) + written


def range_asked(request: bytes) -> tuple[str, int, int]:
    """Name, start and stop of a ranged read; ProtocolError for what no rank asks."""
    if not _RANGE.size <= len(request) <= _RANGE.size + MAX_NAME_BYTES:
        raise ProtocolError(
            f"a read of {len(request)} bytes is not one; it has {_RANGE.size} and a name of at "
            f"most {MAX_NAME_BYTES}"
        )
    start, stop = _RANGE.unpack_from(request)
    try:
        name = request[_RANGE.size :].decode()
    except UnicodeDecodeError as exc:
        raise ProtocolError("the name of a read is not UTF-8") from exc
    if start > stop:
        raise ProtocolError(f"bytes [{start}, {stop}) of {name!r} end before they start")
    return name, start, stop


def question(name: str, body: bytes | bytearray | memoryview) -> bytes:
    """What is asked at a desk; copies the body once."""
    written = name.encode()
    if len(written) > MAX_NAME_BYTES:
        raise ProtocolError(
            f"name={name[:40]!r}… has {len(written)} bytes; at most {MAX_NAME_BYTES} are taken"
        )
    return b"".join((body, written, _NAME.pack(len(written))))


def asked(request: bytes) -> tuple[str, memoryview]:
    """Name and body of a question; ProtocolError for what no rank asks."""
    end = len(request) - _NAME.size
    length = _NAME.unpack_from(request, end)[0] if end >= 0 else 0
    if end < length or length > MAX_NAME_BYTES:
        raise ProtocolError(
            f"a question of {len(request)} bytes is not one; it ends in a name of at most "
            f"{MAX_NAME_BYTES} and its length"
        )
    try:
        name = request[end - length : end].decode()
    except UnicodeDecodeError as exc:
        raise ProtocolError("the name of a question is not UTF-8") from exc
    return name, memory.readable(request, end - length)


def invite(port: int, key: bytes) -> bytes:
    """Where a bulk socket is to be opened, and the key to show."""
    return _INVITATION.pack(port, key)


def invitation(answer: bytes) -> tuple[int, bytes]:
    """Port and key; ProtocolError for what no rank answers."""
    if len(answer) != _INVITATION.size:
        raise ProtocolError(
            f"{len(answer)} bytes are no invitation, which has {_INVITATION.size}; update the peer"
        )
    port, key = _INVITATION.unpack(answer)
    return port, key
