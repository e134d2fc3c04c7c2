"""The body of a frame, payload and trailer, in a file of its own: its preamble is kept elsewhere.

A contribution's header states what its encoding leaves behind, which is known once the payload is
written, and the hash of a frame begins with the header. So the header may come last: the payload is
then read back to be hashed, out of the page cache, and each byte is still hashed once.
"""

from typing import BinaryIO

from atoll.wire.frame import FrameWriter, Hashing
from atoll.wire.header import FrameHeader

_PIECE_BYTES = 1 << 20


def begin(header: FrameHeader, file: BinaryIO) -> FrameWriter:
    """A writer of the body to `file`, in one pass, where the header is known before the payload."""
    hashing = Hashing()
    writer = FrameWriter(header, tee=hashing)
    hashing.sink = file.write
    return writer


def end(header: FrameHeader, file: BinaryIO) -> str:
    """Adds the trailer to `file`, which holds the payload alone; the sha256 of the whole frame.

    FrameError when the payload is shorter than the header says.
    """
    hashing = Hashing()
    writer = FrameWriter(header, tee=hashing)
    left = header.payload_bytes
    file.seek(0)
    while left and (piece := file.read(min(left, _PIECE_BYTES))):
        writer.payload(piece)
        left -= len(piece)
    file.flush()  # the descriptor too stands at the end of the payload from here on
    hashing.sink = file.write
    return writer.finish()
