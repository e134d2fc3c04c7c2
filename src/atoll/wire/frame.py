"""The frame: header, payload and checksum as one run of bytes, written and read as a stream.

    "ATOL" | u16 version | u16 flags | u32 header bytes | header | payload | sha256 of all before

A frame flagged DIGEST_CHECKED holds published weights, whose payload the receiver proves by the
params digest in the header; its trailer covers the preamble alone, so no byte is hashed twice.

Little-endian; the layout with an example is in docs/wire-format.md. Nothing here holds a payload:
pieces pass through, each byte is hashed once, and the size is known before the first of them.
"""

import hashlib
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

from atoll.codecs.base import Format
from atoll.errors import FrameError, FrameTooLarge, LayoutMismatch, VersionMismatch
from atoll.layout import GROUP_ELEMENTS, Layout, Span
from atoll.wire.header import FrameHeader

MAGIC = b"ATOL"
VERSION = 1
MAX_HEADER_BYTES = 65_536
TRAILER_BYTES = 32
DIGEST_CHECKED = 1  # the one flag of version 1
_FIXED = struct.Struct("<4sHHI")
FIXED_BYTES = _FIXED.size
MAX_PREAMBLE_BYTES = FIXED_BYTES + MAX_HEADER_BYTES

BytesLike = bytes | bytearray | memoryview
Sink = Callable[[memoryview], object]


class Tee(Protocol):
    """A second place for a frame's bytes, which hashes them as they pass; a blob writer is one."""

    def write(self, data: memoryview) -> None: ...

    def digest(self) -> str:
        """sha256 (hex) of the bytes so far."""
        ...


class Hashing:
    """The Tee where the caller gives none: it only hashes, and passes the bytes on to `sink`."""

    def __init__(self, sink: Sink | None = None) -> None:
        self.sink = sink
        self._sha256 = hashlib.sha256()

    def write(self, data: memoryview) -> None:
        self._sha256.update(data)
        if self.sink is not None:
            self.sink(data)

    def digest(self) -> str:
        return self._sha256.copy().hexdigest()


def preamble(header: FrameHeader, *, digest_checked: bool = False) -> bytes:
    """The bytes of a frame before its payload."""
    assert not digest_checked or header.result_digest is not None, header.kind
    text = header.to_json()
    if len(text) > MAX_HEADER_BYTES:
        raise FrameTooLarge(
            f"frame header takes {len(text)} bytes; at most {MAX_HEADER_BYTES} are allowed, "
            f"so give it fewer row ranges"
        )
    return _FIXED.pack(MAGIC, VERSION, DIGEST_CHECKED * digest_checked, len(text)) + text


def digest_checked_trailer(start: bytes) -> bytes:
    """The trailer of a frame flagged DIGEST_CHECKED, whose preamble is `start`."""
    return hashlib.sha256(start).digest()


def frame_bytes(header: FrameHeader) -> int:
    """The exact size of the whole frame."""
    return len(preamble(header)) + header.payload_bytes + TRAILER_BYTES


def parse_preamble(data: bytes) -> tuple[FrameHeader, int]:
    """The header at the start of `data`, and the offset at which the payload starts."""
    if len(data) < FIXED_BYTES:
        raise FrameError(f"frame ends after {len(data)} bytes; its fixed part has {FIXED_BYTES}")
    flags, header_bytes = _fixed_part(data[:FIXED_BYTES])
    stop = FIXED_BYTES + header_bytes
    if len(data) < stop:
        raise FrameError(f"frame ends after {len(data)} bytes; its header ends at {stop}")
    header = _header(data[FIXED_BYTES:stop])
    if flags and header.kind == "contribution":
        raise FrameError(
            f"a contribution has flags {DIGEST_CHECKED:#06x}; only published weights are proven "
            f"by a params digest"
        )
    return header, stop


# An upload spells its header several times: as it asks, as it begins and in the frame itself.
_header = lru_cache(maxsize=16)(FrameHeader.from_json)


class PreambleSource(Protocol):
    """A stored frame; a blob reader is one."""

    @property
    def nbytes(self) -> int: ...

    def read(self, offset: int, nbytes: int) -> bytes: ...


def read_preamble(source: PreambleSource) -> tuple[FrameHeader, int]:
    """The header of a stored frame, and the offset at which its payload starts."""
    return parse_preamble(source.read(0, min(source.nbytes, MAX_PREAMBLE_BYTES)))


def _fixed_part(fixed: bytes) -> tuple[int, int]:
    """The flags, and how many bytes the header has."""
    fields: tuple[bytes, int, int, int] = _FIXED.unpack(fixed)
    magic, version, flags, header_bytes = fields
    if magic != MAGIC:
        raise FrameError(f"frame starts with {magic!r}; a frame starts with {MAGIC!r}")
    if version != VERSION:
        raise VersionMismatch(
            f"frame has version {version}; this program reads version {VERSION}, so run the same "
            f"release on both sides"
        )
    if flags not in (0, DIGEST_CHECKED):
        raise FrameError(
            f"frame has flags {flags:#06x}; version {VERSION} knows {DIGEST_CHECKED:#06x} only"
        )
    if header_bytes > MAX_HEADER_BYTES:
        raise FrameTooLarge(
            f"the frame's header has {header_bytes} bytes; at most {MAX_HEADER_BYTES} are allowed"
        )
    return flags, header_bytes


def expect(header: FrameHeader, *, layout: Layout, codec: Format, kind: str) -> None:
    """Raises unless the frame carries exactly this layout in exactly this codec.

    FrameError for kind, codec and a payload too small, LayoutMismatch naming the first tensor that
    differs, FrameTooLarge for a payload beyond what the layout takes.
    """
    for name, wanted in (("kind", kind), ("codec", codec.format)):
        if (found := getattr(header, name)) != wanted:
            raise FrameError(f"the frame has {name}={found!r} where the run has {wanted!r}")
    table = header.table()
    if table is not None:
        layout.check_table(table, subject="the frame")
    if header.layout_digest != layout.digest or header.elements != layout.size:
        raise LayoutMismatch(
            f"the frame has layout_digest={header.layout_digest!r} with {header.elements} elements "
            f"where the run has {layout.digest!r} with {layout.size}; "
            f"names, shapes and dtypes must be the run's"
        )
    expected_bytes = codec.encoded_bytes(layout.size)
    if header.payload_bytes != expected_bytes:
        too_large = header.payload_bytes > expected_bytes
        raise (FrameTooLarge if too_large else FrameError)(
            f"the frame has payload_bytes={header.payload_bytes} where {codec.name} takes "
            f"{expected_bytes} for {layout.size} elements"
        )


def locate(payload_offset: int, codec: Format, span: Span) -> tuple[int, int]:
    """Offset and size of a span's bytes in a frame; the span must start on a group boundary."""
    first = span.first_group * codec.encoded_bytes(GROUP_ELEMENTS)
    return payload_offset + first, codec.encoded_bytes(len(span))


class FrameWriter:
    """Writes one frame as a stream: the preamble at once, then the payload's pieces, then its sum.

    `write` gets every byte in order and must be done with it on return. Where the target hashes
    what it is given, pass it as `tee` in place of `write` and nothing is hashed twice. One thread.
    """

    def __init__(
        self, header: FrameHeader, write: Sink | None = None, *, tee: Tee | None = None
    ) -> None:
        assert (write is None) != (tee is None), "give the bytes one way to go"
        self._out: Tee = Hashing(write) if tee is None else tee
        self._left = self._size = header.payload_bytes
        self._out.write(memoryview(preamble(header)))

    def payload(self, piece: BytesLike) -> None:
        """Appends a piece of the payload; FrameError at the first byte beyond the header's size."""
        view = memoryview(piece).cast("B")
        if view.nbytes > self._left:
            raise FrameError(
                f"payload goes {view.nbytes - self._left} bytes beyond payload_bytes={self._size}"
            )
        self._left -= view.nbytes
        self._out.write(view)

    def finish(self) -> str:
        """Writes the trailer, and gives the sha256 (hex) of the whole frame, the name of its blob.

        FrameError when the payload is shorter than the header says.
        """
        if self._left:
            raise FrameError(f"payload lacks {self._left} bytes of payload_bytes={self._size}")
        self._out.write(memoryview(bytes.fromhex(self._out.digest())))
        return self._out.digest()


class FrameReader:
    """Reads one frame fed in chunks cut anywhere; keeps the preamble and never a payload.

    `sink` gets each piece of the payload as a view that is good only during the call. A `tee` gets
    every byte of a frame, and its running digest is used in place of hashing here. `expect` gets
    the header once it is complete: what it raises refuses the frame before a byte goes on to tee or
    sink. Pieces reach both before the checksum is known: use them only once `finish` has returned.
    Of a frame flagged DIGEST_CHECKED the payload is passed on unhashed: the caller proves it by the
    digest. One thread at a time.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        tee: Tee | None = None,
        expect: Callable[[FrameHeader], object] | None = None,
    ) -> None:
        self._sink = sink
        self._expect = expect
        self._tee: Tee = Hashing() if tee is None else tee
        self._head = bytearray()
        self._head_bytes = FIXED_BYTES  # grows by the header's size once that is read
        self.header: FrameHeader | None = None  # once it is complete
        self.nbytes = 0  # taken so far: the offset at which a broken upload resumes
        self._left = 0  # payload bytes to come
        self._trailer = bytearray()
        self._blob_sha256: str | None = None
        self._refused = False
        self._digest_checked = False

    def feed(self, chunk: BytesLike) -> None:
        """Takes the next bytes; raises at the first one that cannot belong to the frame.

        A chunk that goes beyond the frame's end is refused before any of its payload is passed on.
        After an error every further call raises.
        """
        self._check_not_refused()
        self._refused = True  # until this chunk is through
        view = memoryview(chunk).cast("B")
        self.nbytes += view.nbytes
        while view.nbytes and self.header is None:
            view = self._take_preamble(view)
        if self.header is not None:
            self._take_body(view)
        self._refused = False

    def finish(self) -> str:
        """The sha256 (hex) of all that was hashed, once the trailer has proven it.

        Of a frame that is hashed whole that is the name of its blob. FrameError when bytes are
        missing.
        """
        self._check_not_refused()
        if self._blob_sha256 is None:
            part = "header" if self.header is None else "payload" if self._left else "checksum"
            raise FrameError(f"frame ends after {self.nbytes} bytes, inside its {part}")
        return self._blob_sha256

    def _check_not_refused(self) -> None:
        if self._refused:
            raise FrameError("the frame was refused before; start again with a new reader")

    def _take_preamble(self, view: memoryview) -> memoryview:
        missing = self._head_bytes - len(self._head)
        self._head += view[:missing]
        if len(self._head) == FIXED_BYTES == self._head_bytes:
            flags, header_bytes = _fixed_part(bytes(self._head))
            self._digest_checked = flags == DIGEST_CHECKED
            self._head_bytes += header_bytes
        if len(self._head) == self._head_bytes:
            self.header, _ = parse_preamble(bytes(self._head))
            if self._expect is not None:
                self._expect(self.header)
            self._left = self.header.payload_bytes
            self._tee.write(memoryview(bytes(self._head)))
        return view[missing:]

    def _take_body(self, view: memoryview) -> None:
        room = self._left + TRAILER_BYTES - len(self._trailer)
        if view.nbytes > room:
            beyond = view.nbytes - room
            raise FrameTooLarge(
                f"{beyond} bytes follow the end of the frame; its header fixes its size"
            )
        piece, rest = view[: self._left], view[self._left :]
        if piece.nbytes:
            self._left -= piece.nbytes
            if not self._digest_checked:
                self._tee.write(piece)
            self._sink(piece)
        self._trailer += rest
        if rest.nbytes and len(self._trailer) == TRAILER_BYTES:
            self._verify()

    def _verify(self) -> None:
        computed = self._tee.digest()
        if computed != self._trailer.hex():
            raise FrameError(
                f"frame has sha256 {computed} but its trailer says {self._trailer.hex()}; "
                f"it was damaged on the way, so send it again"
            )
        self._tee.write(memoryview(bytes(self._trailer)))
        self._blob_sha256 = self._tee.digest()
