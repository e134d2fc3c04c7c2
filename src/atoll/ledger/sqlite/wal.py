"""Whether a SQLite write-ahead log is whole: SQLite itself reads one up to its first bad frame.

That is right for the end that a power cut left and wrong for a bit that changed in the middle: what
was committed after it would be gone without a word. Layout: https://www.sqlite.org/fileformat2.html
section 4. Reads the file before SQLite does; writes nothing.

A frame that is not as its checksum says is taken for a power cut only when it can be one: in the
last transaction, and not by the change of a single bit in what was committed. Of a transaction
whose end is not there nothing was: a page that lay there before may differ by a bit from it.
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

HEADER_BYTES = 32
FRAME_HEADER_BYTES = 24
_MAGIC = {0x377F0682: "<", 0x377F0683: ">"}
_NUMBERS_BYTES = 8  # of a frame: its page's number, and whether it ends a transaction
_MASK = 0xFFFFFFFF
Sums = tuple[int, int]
_MIN_PAGE_BYTES, _MAX_PAGE_BYTES = 512, 65536


@dataclass(frozen=True)
class WalDamage:
    """The first place where the log is not as it was written."""

    path: Path
    offset: int
    reason: str

    def __str__(self) -> str:
        return f"{str(self.path)!r} at byte {self.offset}: {self.reason}"


class _Header(NamedTuple):
    order: str  # of the bytes of a word, as `struct` names it
    page_bytes: int
    salts: bytes
    sums: Sums


class _Frame(NamedTuple):
    """One frame as it stands in the file."""

    offset: int
    number: int  # of its page
    ends_transaction: bool
    salts: bytes
    stored: Sums
    summed: bytes  # what its sums cover: the first 8 bytes of its header, and the page

    @property
    def page(self) -> bytes:
        return self.summed[8:]


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
    size = nbytes(path)
    if size <= HEADER_BYTES:
        return None
    if not nbytes(ledger):
        reason = (
            f"the database {str(ledger)!r} that it belongs to is missing or empty; put that back "
            f"beside it, since SQLite deletes the log of an empty database"
        )
        return WalDamage(path, 0, reason)
    with path.open("rb") as file:
        header = _parse(file.read(HEADER_BYTES))
        if header is None:
            return _judge_header(path, file, ledger, nbytes=size)
        return _check_frames(path, file, header, nbytes=size)


def _parse(head: bytes) -> _Header | None:
    magic, page_bytes, salts, *sums = struct.unpack(">I4xI4x8s2I", head)
    order = _MAGIC.get(magic)
    if order is None or _sums(head[:24], (0, 0), order=order) != (*sums,):
        return None
    return _Header(order, page_bytes, salts, (*sums,))


def _check_frames(path: Path, file: BinaryIO, header: _Header, *, nbytes: int) -> WalDamage | None:
    sums = header.sums
    frames = _frames(file, page_bytes=header.page_bytes, nbytes=nbytes)
    for frame in frames:
        found = _sums(frame.summed, sums, order=header.order)
        if frame.salts != header.salts or frame.stored != found:
            return _judge(path, header, [frame, *frames], found=found)
        sums = found
    return None


def _frames(file: BinaryIO, *, page_bytes: int, nbytes: int) -> Iterator[_Frame]:
    """The frames after the header, where the file stands, to its end; the last is whole."""
    step = FRAME_HEADER_BYTES + page_bytes
    for offset in range(HEADER_BYTES, nbytes - step + 1, step):
        data = file.read(step)
        number, pages, salts, *sums = struct.unpack_from(">2I8s2I", data)
        summed = data[:8] + data[FRAME_HEADER_BYTES:]
        yield _Frame(offset, number, pages != 0, salts, (*sums,), summed)


def _judge_header(path: Path, file: BinaryIO, ledger: Path, *, nbytes: int) -> WalDamage | None:
    """Whether a log whose header is bad holds anything that the database does not.

    SQLite begins a log anew, with a new header, only once the database has all of the old one, and
    that header is on the disk before any new frame. So a power cut that tears it leaves frames that
    are in the database already, which is harmless. Disks that write sectors whole tear no header,
    but SQLite does not count on that.
    """
    with ledger.open("rb") as database:
        [page_bytes] = struct.unpack(">H", database.read(18)[16:18])
    page_bytes = _MAX_PAGE_BYTES if page_bytes == 1 else page_bytes
    if page_bytes < _MIN_PAGE_BYTES:
        return None  # the database itself is none; SQLite says so
    frames = list(_frames(file, page_bytes=page_bytes, nbytes=nbytes))
    # The newest content of each page; frames with other salts are left from an earlier use.
    pages = {frame.number: frame.page for frame in frames if frame.salts == frames[0].salts}
    if _is_in(ledger, pages):
        return None
    return WalDamage(path, 0, "its header is not as its checksum says; SQLite would skip it whole")


def _is_in(ledger: Path, pages: dict[int, bytes]) -> bool:
    """Whether the database holds these pages already."""
    if 0 in pages:  # they count from 1, so such a frame is none
        return False
    with ledger.open("rb") as database:
        return all(
            os.pread(database.fileno(), len(page), (number - 1) * len(page)) == page
            for number, page in pages.items()
        )


def _judge(path: Path, header: _Header, frames: list[_Frame], *, found: Sums) -> WalDamage | None:
    """Whether the log breaks at `frames[0]` as a power cut breaks it; `found` is that one's sum."""
    bad = frames[0]
    # Frames of an earlier use of the file have other salts.
    present = [frame for frame in frames if frame.salts == header.salts]
    commits = [index for index, frame in enumerate(present) if frame.ends_transaction]
    if commits and not _is_last(present[commits[0] :], header, found=found):
        reason = "a frame is not as its checksum says, and transactions after it were committed"
        return WalDamage(path, bad.offset, reason)
    if bad.salts == header.salts:
        # Of a transaction without an end nothing was committed, unless its end is what changed.
        looked = len(bad.summed) if commits else _NUMBERS_BYTES
        is_flip = _explained_by_one_bit(bad, found, looked=looked)
    else:
        is_flip = _is_one_bit(bad.salts, header.salts)
    return WalDamage(path, bad.offset, "one bit of a frame has changed") if is_flip else None


def _is_last(frames: list[_Frame], header: _Header, *, found: Sums) -> bool:
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


def _explained_by_one_bit(frame: _Frame, found: Sums, *, looked: int) -> bool:
    """Whether changing one of the first `looked` bytes by a bit gives the checksum it carries.

    Where all are looked at, the checksum itself may be what changed.

    The sums are linear modulo 2^32, so a word's change arrives multiplied by a weight that depends
    on its place alone.
    """
    stored = frame.stored
    is_whole = looked == len(frame.summed)
    if is_whole and _is_one_bit(struct.pack(">2I", *stored), struct.pack(">2I", *found)):
        return True
    wanted = ((stored[0] - found[0]) & _MASK, (stored[1] - found[1]) & _MASK)
    changes = [sign * (1 << bit) for bit in range(32) for sign in (1, -1)]
    # From the last pair of words to the first: what a change of either adds to the two sums.
    weights = [(1, 1), (0, 1)]
    for place in reversed(range(0, len(frame.summed), 8)):
        for first, second in weights if place < looked else ():
            for change in changes:
                if (change * first & _MASK, change * second & _MASK) == wanted:
                    return True
        # One more pair of words, which itself is 0.
        weights = [_sums(bytes(8), weight, order="<") for weight in weights]
    return False


def _sums(data: bytes, start: Sums, *, order: str) -> Sums:
    first, second = start
    for one, other in struct.iter_unpack(f"{order}2I", data):
        first = (first + one + second) & _MASK
        second = (second + other + first) & _MASK
    return first, second
