"""The buffers codecs are given: their checks, and typed views of bytes at any alignment.

Owns no memory of its own and no format.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from atoll.codecs.base import Codec
from atoll.errors import FrameError
from atoll.layout import GROUP_ELEMENTS, Span

# A call of torch costs as much as the arithmetic of some thousand values, so it gets several groups
# at once; more than 1 MiB of fp32 with its scratch memory would leave the cache.
RUN_GROUPS = 4


def check_values(values: Tensor) -> None:
    """Asserts what every caller of a codec guarantees: flat, contiguous fp32 on the CPU."""
    assert values.dtype == torch.float32, values.dtype
    assert values.dim() == 1, values.shape
    assert values.is_contiguous(), values.stride()
    assert values.device.type == "cpu", values.device


def check_payload(codec: Codec, payload: Tensor, elements: int) -> None:
    """FrameError unless `payload` (uint8) has exactly the bytes that `elements` encode to."""
    expected_bytes = codec.encoded_bytes(elements)
    assert payload.dtype == torch.uint8, payload.dtype
    assert payload.is_contiguous(), payload.stride()
    if elements < 0 or payload.numel() != expected_bytes:
        raise FrameError(
            f"{codec.name} payload has {payload.numel()} bytes where {elements} elements take "
            f"{expected_bytes}; the header and the payload must agree"
        )


def new_or(out: Tensor | None, *, size: int, dtype: torch.dtype) -> Tensor:
    """A tensor [size] of `dtype`: `out`, asserted to be one and contiguous, or a new one."""
    if out is None:
        return torch.empty(size, dtype=dtype)
    assert out.dtype == dtype, (out.dtype, dtype)
    assert out.shape == (size,), (out.shape, size)
    assert out.is_contiguous(), out.stride()
    return out


def typed(data: Tensor, dtype: torch.dtype) -> Tensor:
    """`data` (uint8) as a view of `dtype`, or a copy of it where its address allows no view.

    A payload inside a frame starts at any byte.
    """
    return (data if is_aligned(data, dtype) else data.clone()).view(dtype)


def is_aligned(payload: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Whether the bytes of `payload` start where numbers of `dtype` may."""
    return not (payload.data_ptr() % dtype.itemsize or payload.storage_offset() % dtype.itemsize)


def runs(elements: int) -> Iterator[Span]:
    """A span of `elements` cut into what one call of torch handles: RUN_GROUPS groups at a time."""
    run = RUN_GROUPS * GROUP_ELEMENTS
    for start in range(0, elements, run):
        yield Span(start, min(start + run, elements))


def groups(elements: int) -> Iterator[tuple[int, Span]]:
    """Every codec group of a span of `elements`: its index from the span's start, and its place."""
    for index, start in enumerate(range(0, elements, GROUP_ELEMENTS)):
        yield index, Span(start, min(start + GROUP_ELEMENTS, elements))
