"""Tensors as bytes and bytes as tensors, without a copy and without numpy.

A tensor that once lent its memory to numpy can never be resized again, and weights that are freed
after use are resized. A view keeps what it is a view of alive.
"""

import ctypes

import torch
from torch import Tensor


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


def _view(address: int, nbytes: int, *, keeps: object) -> memoryview:
    array = (ctypes.c_ubyte * nbytes).from_address(address)
    array.keeps = keeps  # type: ignore[attr-defined]  # alive as long as the view is
    return memoryview(array).cast("B")
