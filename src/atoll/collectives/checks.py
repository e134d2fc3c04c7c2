"""What every transport refuses before anything is sent."""

from collections.abc import Sequence

import torch
from torch import Tensor

from atoll.collectives import memory
from atoll.collectives.codecs import WireCodec
from atoll.errors import ConfigError, LayoutMismatch, ProtocolError


def flat(values: Tensor) -> int:
    """How many elements; LayoutMismatch for anything but a flat, contiguous CPU tensor."""
    if values.dim() != 1 or not values.is_contiguous() or values.device.type != "cpu":
        raise LayoutMismatch(
            f"a tensor of shape {tuple(values.shape)}, strides {values.stride()} on "
            f"{values.device} cannot be exchanged; give a flat contiguous one on the CPU"
        )
    return values.numel()


def alike(name: str, given: Tensor, wanted: Tensor) -> None:
    """LayoutMismatch unless a tensor is as a rank's part is."""
    flat(given)
    if given.shape != wanted.shape or given.dtype != wanted.dtype:
        raise LayoutMismatch(
            f"{name} has {given.numel()} elements of {given.dtype}; this rank's part has "
            f"{wanted.numel()} of {wanted.dtype}"
        )


def source(source: int, size: int) -> None:
    """ConfigError unless `source` is a rank."""
    if not 0 <= source < size:
        raise ConfigError(f"source={source} is not one of size={size} ranks")


def peer(name: str, other: int, *, rank: int, size: int) -> None:
    """ConfigError unless something can be sent to, or come from, `other`."""
    if not 0 <= other < size or other == rank:
        raise ConfigError(
            f"{name}={other} is not another one of size={size} ranks than this one, {rank}; what a "
            f"rank has itself needs no message"
        )


def coded(codec: WireCodec, values: Tensor) -> None:
    """LayoutMismatch for values that no codec takes."""
    if values.dtype != torch.float32:
        raise LayoutMismatch(
            f"codec={codec.name!r} takes fp32 values, these are of {values.dtype}; widen them, or "
            f"give no codec"
        )


def apart(shard: Tensor, out: Tensor) -> None:
    """LayoutMismatch where the owner's values would take what its bytes say."""
    if memory.overlap(shard, out):
        raise LayoutMismatch(
            f"shard, of {shard.numel()} elements, lies in out, and a codec would write over the "
            f"owner's own values; give a shard of its own memory"
        )


def residual(residual: Tensor | None, values: Tensor, codec: WireCodec | None) -> None:
    """LayoutMismatch unless a residual fits what is sent."""
    if residual is None:
        return
    flat(residual)
    is_fit = residual.dtype == torch.bfloat16 and residual.shape == values.shape
    if codec is None or codec.codec.lossless or not is_fit:
        raise LayoutMismatch(
            f"residual has {residual.numel()} elements of {residual.dtype} for codec="
            f"{codec and codec.name!r} and {values.numel()} values; it goes with a lossy codec and "
            f"has a bf16 for each value"
        )


def swap(parts: Sequence[Tensor], sizes: Sequence[int], *, rank: int, size: int) -> None:
    """LayoutMismatch unless there are bytes for, and a size from, each rank."""
    if len(parts) != size or len(sizes) != size or min(sizes) < 0:
        raise LayoutMismatch(
            f"{len(parts)} parts and sizes={list(sizes)} do not fit {size} ranks; give one part, "
            f"and one size from 0 on, for each"
        )
    for part in parts:
        flat(part)
        if part.dtype != torch.uint8:
            raise LayoutMismatch(f"a part of {part.dtype} is no bytes; give uint8")
    if len(parts[rank]) != sizes[rank]:
        raise LayoutMismatch(
            f"rank {rank} keeps {len(parts[rank])} bytes of its own and says "
            f"sizes[{rank}]={sizes[rank]}; they must agree"
        )


def within(key: object, lengths: Sequence[int], limit: int) -> None:
    """ProtocolError naming the ranks that have more than `limit` bytes to say."""
    over = {rank: length for rank, length in enumerate(lengths) if not 0 <= length <= limit}
    if over:
        told = ", ".join(f"rank {rank} has {length}" for rank, length in over.items())
        raise ProtocolError(
            f"{key}: {told} bytes to say; at most {limit} are taken of each, and nothing was sent"
        )
