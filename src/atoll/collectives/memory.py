"""Tensors as bytes and bytes as tensors, without a copy and without numpy.

A tensor that once lent its memory to numpy can never be resized again, and weights that are freed
after use are resized. A view keeps what it is a view of alive.
"""

import contextlib
import ctypes
from collections import deque

import torch
from torch import Tensor

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def keep_freed() -> None:
    """Has the allocator keep what messages are received into, where there is one that can.

    Left to itself glibc gives a freed megabyte back to the system and asks for it again: a fault
    and a pass of zeros for each page, which cost a gRPC rank a fifth of its processor time. These
    are the bounds that it moves to by itself once somebody has freed a large tensor.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 64 << 20)


def bytes_of(values: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor; writing to it writes to the tensor."""
    assert values.is_contiguous() and values.device.type == "cpu", values.device
    return _view(values.data_ptr(), values.numel() * values.element_size(), keeps=values)


def readable(data: bytes, nbytes: int) -> memoryview:
    """The first bytes of a message where they lie, as torch takes them; never written to.

    torch reads from memory only that may be written, which bytes are not.
    """
    address = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value
    assert address is not None
    return _view(address, nbytes, keeps=data)


def tensor_of(data: bytes | bytearray | memoryview, dtype: torch.dtype) -> Tensor:
    """What a message brought, flat; for reading alone."""
    found = readable(data, len(data)) if isinstance(data, bytes) else data
    return torch.frombuffer(found, dtype=dtype)


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    first, second = one.data_ptr(), other.data_ptr()
    ends = first + one.numel() * one.element_size(), second + other.numel() * other.element_size()
    return max(first, second) < min(ends)


class Buffers:
    """Memory to receive into, given again once nobody looks at what came there. Thread-safe.

    Fresh memory costs a fault and a pass of zeros for each page: as much as a second copy.
    """

    def __init__(self, nbytes: int, *, kept: int) -> None:
        """At most `kept` buffers of `nbytes` lie here unused."""
        self._nbytes = nbytes
        self._kept = kept
        self.unused: deque[Tensor] = deque()

    def take(self, nbytes: int) -> memoryview:
        """So many bytes, no more than a buffer has; free again when the view is gone."""
        assert nbytes <= self._nbytes, nbytes
        try:
            buffer = self.unused.pop()
        except IndexError:
            buffer = torch.empty(self._nbytes, dtype=torch.uint8)
        return _view(buffer.data_ptr(), nbytes, keeps=_Lent(buffer, self))

    def give_back(self, buffer: Tensor) -> None:
        if len(self.unused) < self._kept:
            self.unused.append(buffer)


class _Lent:
    """A buffer while somebody looks at it."""

    def __init__(self, buffer: Tensor, owner: Buffers) -> None:
        self._buffer = buffer
        self._owner = owner

    def __del__(self) -> None:
        self._owner.give_back(self._buffer)


# Longer than any memory, to be cut: ctypes makes a class for every length, and forgets it in a way
# that only the garbage collector cleans up.
_Anywhere = ctypes.c_ubyte * (1 << 62)


def _view(address: int, nbytes: int, *, keeps: object) -> memoryview:
    array = _Anywhere.from_address(address)
    array.keeps = keeps  # type: ignore[attr-defined]  # alive as long as the view is
    return memoryview(array).cast("B")[:nbytes]
