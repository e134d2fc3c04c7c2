"""Tensors as bytes and bytes as tensors, without a copy and without numpy.

A tensor that once lent its memory to numpy can never be resized again, and weights that are freed
after use are resized. Whoever takes a view here keeps what it is a view of alive.
"""

import ctypes

import torch
from torch import Tensor


def bytes_of(values: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor; writing to it writes to the tensor."""
    assert values.is_contiguous() and values.device.type == "cpu", values.device
    return _view(values.data_ptr(), values.numel() * values.element_size())


def tensor_of(data: bytes | bytearray | memoryview, dtype: torch.dtype) -> Tensor:
    """What a message brought, flat; for reading alone, since bytes never change.

    A memoryview must be of memory that may be written: torch takes no other.
    """
    if not isinstance(data, bytes):
        return torch.frombuffer(data, dtype=dtype)
    address = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value
    assert address is not None
    return torch.frombuffer(_view(address, len(data)), dtype=dtype)


def _view(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
