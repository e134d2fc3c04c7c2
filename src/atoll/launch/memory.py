"""The C library's allocator, set for work in tiles: freed pages are kept, and only so many."""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # glibc, malloc.h
ARENAS = 2
KEPT_BYTES = 8 << 20  # freed memory that an arena may keep
MAPPED_BYTES = 4 << 20  # what is larger is mapped by itself and given back at once


def bound_arenas() -> None:
    """At most two arenas for the whole process; called before its threads start.

    glibc gives threads arenas of their own and each keeps what was freed in it. Measured with eight
    islands: 422 MB above the weights without this, 184 MB with it (59 MB with small windows too).
    Does nothing on another C library.
    """
    _set((_M_ARENA_MAX, ARENAS))


def keep_freed_tiles() -> None:
    """Keeps freed tiles and chunks for the next ones instead of giving them back to the system.

    By default glibc returns a freed tile of 1 MiB and takes fresh pages for the next one, each with
    a fault. Measured on 25 M parameters: error feedback with int8 takes 312 ms by default and 61 ms
    with this, the outer step of two contributions 414 and 111 ms. Does nothing on another C
    library.
    """
    _set((_M_TRIM_THRESHOLD, KEPT_BYTES), (_M_MMAP_THRESHOLD, MAPPED_BYTES))


def _set(*options: tuple[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in options:
            mallopt(option, value)
