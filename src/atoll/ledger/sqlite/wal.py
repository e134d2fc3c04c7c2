"""Whether a SQLite write-ahead log is whole: SQLite itself reads one up to its first bad frame.

That is right for the end that a power cut left and wrong for a bit that changed in the middle: what
was committed after it would be gone without a word. Layout: https://www.sqlite.org/fileformat2.html
section 4. Reads the file before SQLite does; writes nothing.

A frame that is not as its checksum says is taken for a power cut only when it can be one: in the
last transaction, and not by the change of a single bit.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

HEADER_BYTES = 32
FRAME_HEADER_BYTES = 24
_MAGIC = {0x377F0682: "<", 0x377F0683: ">"}
_MASK = 0xFFFFFFFF
_MIN_PAGE_BYTES, _MAX_PAGE_BYTES = 512, 65536


@dataclass(frozen=True)
class WalDamage:
    """The first place where the log is not as it was written."""

    path: Path
    offset: int
    reason: str

    def __str__(self) -> str:
        return f"{str(self.path)!r} at byte {self.offset}: {self.reason}"


@dataclass(frozen=True)
class _Header:
    order: str
    page_bytes: int
    salts: bytes
    sums: tuple[int, int]


@dataclass(frozen=True)
class _Frame:
    """One frame as it stands in the file."""

    offset: int
    head: bytes
    page: bytes

    @property
    def number(self) -> int:
        """Of its page."""
        return int.from_bytes(self.head[:4], "big")

    @property
    def salts(self) -> bytes:
        return self.head[8:16]

    @property
    def stored(self) -> tuple[int, int]:
        first, second = struct.unpack(">2I", self.head[16:24])
        return first, second

    @property
    def ends_transaction(self) -> bool:
        return self.head[4:8] != bytes(4)

    @property
    def summed(self) -> bytes:
        return self.head[:8] + self.page


def path_of(ledger: Path) -> Path:
    """Where SQLite keeps the log of a database."""
    return ledger.with_name(ledger.name + "-wal")


def is_folded(ledger: Path) -> bool:
    """Whether the log is empty, so that the main file holds all. A full disk leaves some in it."""
    return not nbytes(path_of(ledger))


def nbytes(path: Path) -> int:
    """The size of a file; 0 when there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def check(ledger: Path) -> WalDamage | None:
    """The first damage of a database's log; None when it is whole, ends torn, or is absent."""
    path = path_of(ledger)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(HEADER_BYTES)
            if len(head) < HEADER_BYTES:
                return None
            if size > HEADER_BYTES and not nbytes(ledger):
                return WalDamage(
                    path,
                    0,
                    f"the database {str(ledger)!r} that it belongs to is missing or empty; put "
                    f"that back beside it, since SQLite deletes the log of an empty database",
                )
            header = _parse(head)
            if header is None:
                return _judge_header(path, file, ledger, nbytes=size)
            return _check_frames(path, file, header, nbytes=size)
    except FileNotFoundError:
        return None


def _parse(head: bytes) -> _Header | None:
    magic, _, page_bytes = struct.unpack(">3I", head[:12])
    first, second = struct.unpack(">2I", head[24:32])
    order = _MAGIC.get(magic)
    if order is None or _sums(head[:24], (0, 0), order=order) != (first, second):
        return None
    return _Header(order, page_bytes, head[16:24], (first, second))


def _check_frames(path: Path, file: BinaryIO, header: _Header, *, nbytes: int) -> WalDamage | None:
    step = FRAME_HEADER_BYTES + header.page_bytes
    sums, offset = header.sums, HEADER_BYTES
    while offset + step <= nbytes:
        frame = _frame(file.read(step), offset)
        found = _sums(frame.summed, sums, order=header.order)
        if frame.salts != header.salts or frame.stored != found:
            rest = _frames(file, offset + step, step=step, nbytes=nbytes)
            return _judge(path, header, [frame, *rest], found=found)
        sums, offset = found, offset + step
    return None


def _frames(file: BinaryIO, start: int, *, step: int, nbytes: int) -> list[_Frame]:
    """The frames from where the file stands, `start`, to its end."""
    return [_frame(file.read(step), at) for at in range(start, nbytes - step + 1, step)]


def _frame(data: bytes, offset: int) -> _Frame:
    return _Frame(offset, data[:FRAME_HEADER_BYTES], data[FRAME_HEADER_BYTES:])


def _judge_header(path: Path, file: BinaryIO, ledger: Path, *, nbytes: int) -> WalDamage | None:
    """A header is on the disk before the frames after it; torn, it stands before old frames.

    A log is begun anew only once the database has all of it, so one that would change nothing is
    harmless. A disk that writes its sectors whole tears no header; SQLite does not count on that.
    """
    with ledger.open("rb") as database:
        [page_bytes] = struct.unpack(">H", database.read(18)[16:18])
    page_bytes = _MAX_PAGE_BYTES if page_bytes == 1 else page_bytes
    if page_bytes < _MIN_PAGE_BYTES:
        return None  # the database itself is none; SQLite says so
    step = FRAME_HEADER_BYTES + page_bytes
    frames = _frames(file, HEADER_BYTES, step=step, nbytes=nbytes)
    if _is_in(ledger, _newest_pages(frames)):
        return None
    return WalDamage(path, 0, "its header is not as its checksum says; SQLite would skip it whole")


def _newest_pages(frames: list[_Frame]) -> dict[int, bytes]:
    """By page number its newest content, of the frames with the salts of the first one.

    Frames with other salts are left from an earlier use of the file.
    """
    return {frame.number: frame.page for frame in frames if frame.salts == frames[0].salts}


def _is_in(ledger: Path, pages: dict[int, bytes]) -> bool:
    """Whether the database holds these pages already."""
    with ledger.open("rb") as database:
        for number, page in pages.items():
            if number == 0:  # pages count from 1, so this frame is none
                return False
            database.seek((number - 1) * len(page))
            if database.read(len(page)) != page:
                return False
    return True


def _judge(
    path: Path, header: _Header, frames: list[_Frame], *, found: tuple[int, int]
) -> WalDamage | None:
    """Whether the log breaks at `frames[0]` as a power cut breaks it; `found` is that one's sum."""
    bad = frames[0]
    # Frames of an earlier use of the file have other salts.
    present = [frame for frame in frames if frame.salts == header.salts]
    commits = [index for index, frame in enumerate(present) if frame.ends_transaction]
    if commits and not _is_last(present[commits[0] :], header, found=found):
        return WalDamage(
            path,
            bad.offset,
            "a frame is not as its checksum says, and transactions after it were committed",
        )
    if bad.salts == header.salts:
        is_flip = _explained_by_one_bit(bad, found)
    else:
        is_flip = _is_one_bit(bad.salts, header.salts)
    return WalDamage(path, bad.offset, "one bit of a frame has changed") if is_flip else None


def _is_last(frames: list[_Frame], header: _Header, *, found: tuple[int, int]) -> bool:
    """Whether nothing was committed after the transaction that `frames[0]` ends.

    SQLite writes over a torn transaction under the same salts. Where the new one is shorter, and a
    second power cut tears it too, the end of the old one stands right behind it: a frame that does
    not go on from its sums, be they those it carries or those `found` in the first bad frame.
    """
    if len(frames) == 1:
        return True
    end, after = frames[:2]
    if after.offset != end.offset + FRAME_HEADER_BYTES + header.page_bytes or after.number == 0:
        return False
    starts = (end.stored, found)
    return all(_sums(after.summed, start, order=header.order) != after.stored for start in starts)


def _is_one_bit(mine: bytes, theirs: bytes) -> bool:
    return (int.from_bytes(mine, "big") ^ int.from_bytes(theirs, "big")).bit_count() == 1


def _explained_by_one_bit(frame: _Frame, found: tuple[int, int]) -> bool:
    """Whether changing one bit of the frame gives the checksum that it carries.

    The sums are linear modulo 2^32, so a word's change arrives multiplied by a weight that depends
    on its place alone.
    """
    stored = frame.stored
    if _is_one_bit(struct.pack(">2I", *stored), struct.pack(">2I", *found)):
        return True
    wanted = ((stored[0] - found[0]) & _MASK, (stored[1] - found[1]) & _MASK)
    changes = [sign * (1 << bit) for bit in range(32) for sign in (1, -1)]
    # From the last pair of words to the first: what a change of either adds to the two sums.
    weights = [(1, 1), (0, 1)]
    for _ in range(len(frame.summed) // 8):
        for first, second in weights:
            for change in changes:
                if (change * first & _MASK, change * second & _MASK) == wanted:
                    return True
        weights = [_after(weight) for weight in weights]
    return False


def _after(weight: tuple[int, int]) -> tuple[int, int]:
    """How much of a change is in each of the two sums after one more pair of words."""
    first = (weight[0] + weight[1]) & _MASK
    return first, (weight[1] + first) & _MASK


def _sums(data: bytes, start: tuple[int, int], *, order: str) -> tuple[int, int]:
    first, second = start
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for index in range(0, len(words), 2):
        first = (first + words[index] + second) & _MASK
        second = (second + words[index + 1] + first) & _MASK
    return first, second
