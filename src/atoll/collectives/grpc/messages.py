"""How a message between ranks is written: the values, then what they are.

    values | u64 group | u64 step | u32 micro | u8 op | u32 unit | u32 phase | u64 start | u64 stop

Little-endian. What it is stands behind the values, so that these begin where the message begins
and are read where they lie.
"""

import struct
from typing import get_args

from atoll.collectives import memory
from atoll.collectives.base import Key, Label, Op
from atoll.errors import ProtocolError
from atoll.layout import Span

_TRAILER = struct.Struct("<QQIBIIQQ")
TRAILER_BYTES = _TRAILER.size
_OPS: tuple[Op, ...] = get_args(Op)


def packed(label: Label, values: memoryview) -> bytes:
    """The message; copies the values once."""
    key, span = label.key, label.span
    numbers = (key.group, key.step, key.micro, _OPS.index(key.op), key.unit, label.phase)
    return b"".join((values, _TRAILER.pack(*numbers, span.start, span.stop)))


def unpacked(message: bytes) -> tuple[Label, memoryview]:
    """What the values are, and the values; ProtocolError for what no rank writes."""
    if len(message) < TRAILER_BYTES:
        raise ProtocolError(
            f"a message of {len(message)} bytes is too short; what it is takes {TRAILER_BYTES}"
        )
    size = len(message) - TRAILER_BYTES
    found: tuple[int, ...] = _TRAILER.unpack_from(message, size)
    group, step, micro, op, unit, phase, start, stop = found
    if op >= len(_OPS) or start > stop:
        raise ProtocolError(
            f"op={op} and elements [{start}, {stop}) of the message are out of range; there are "
            f"{len(_OPS)} kinds, and a span does not end before it starts"
        )
    key = Key(group=group, step=step, op=_OPS[op], micro=micro, unit=unit)
    return Label(key, phase, Span(start, stop)), memory.readable(message, size)
