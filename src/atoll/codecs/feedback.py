"""Error feedback: what a lossy codec drops is remembered and added to the next values.

    v = values + decay * residual;  payload = encode(v);  residual := bf16(v - decode(payload))

Seide et al. 2014 (1-bit SGD); with a decay below 1 SparseLoCo (arXiv 2508.15706), where the
residual is the momentum. One deviation: the residual is stored in bf16 by definition, on every
island, which halves what must be persisted with a contribution. What bf16 drops of a residual is
lost, at most 2^-9 of it. Owns the arithmetic; when a residual is promoted or rolled back is the
caller's.
"""

import math

import numpy as np
import torch
from torch import Tensor

from atoll.codecs import buffers, tree
from atoll.codecs.base import Codec
from atoll.codecs.noise import Noise
from atoll.codecs.tree import halve
from atoll.compiled.arrays import DOUBLES, HALVES, Doubles, Halves
from atoll.compiled.base import compiled
from atoll.compiled.bits import widened
from atoll.compiled.jit import loop
from atoll.errors import ConfigError
from atoll.layout import GROUP_ELEMENTS


def new_residual(codec: Codec, elements: int) -> Tensor | None:
    """A residual of zeros (bf16, [elements]), or None for a codec that drops nothing."""
    return None if codec.lossless else torch.zeros(elements, dtype=torch.bfloat16)


def encode_with_feedback(
    codec: Codec,
    values: Tensor,
    residual: Tensor | None,
    *,
    noise: Noise | None,
    first_group: int,
    decay: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """The payload of `values` + `decay` * `residual`; `residual` (bf16, [n]) is updated in place.

    `values` are never written. With a lossless codec the residual must be None and this is a plain
    encode, which may alias `values`. Values that are not finite leave a residual that is not: check
    them first, or roll back. Any tile of whole groups gives the same bytes and residuals.
    """
    if (residual is None) != codec.lossless:
        raise ConfigError(
            f"codec {codec.name!r} drops {'nothing' if codec.lossless else 'part of each value'} "
            f"but was given {'no residual' if residual is None else 'a residual'}; "
            f"take it from new_residual(codec, elements)"
        )
    if residual is None:
        return codec.encode(values, noise=noise, first_group=first_group, out=out)
    buffers.check_values(values)
    elements = values.numel()
    assert residual.dtype == torch.bfloat16, residual.dtype
    assert residual.shape == values.shape, (residual.shape, values.shape)
    payload = buffers.new_or(out, size=codec.encoded_bytes(elements), dtype=torch.uint8)
    fused = codec.fused(payload, elements)
    if fused is not None:
        fused.feed(values, residual, payload, decay=decay)
        return payload
    wanted = torch.empty(min(elements, buffers.RUN_GROUPS * GROUP_ELEMENTS))  # v of one run, fp32
    decoded = torch.empty_like(wanted)
    for span in buffers.runs(elements):
        place = payload[codec.encoded_bytes(span.start) : codec.encoded_bytes(span.stop)]
        part = residual[span.start : span.stop]  # bf16, a view: it is updated in place
        # The residual first: bf16 widens to fp32 without rounding; product and sum round once each.
        v = wanted[: len(span)].copy_(part)
        if decay != 1.0:
            v.mul_(decay)
        v.add_(values[span.start : span.stop])
        group = first_group + span.first_group  # noise is keyed by the group in the whole buffer
        codec.encode(v, noise=noise, first_group=group, out=place)
        # What arrives is what the other side decodes, not what was meant: the rest stays here.
        part.copy_(v.sub_(codec.decode(place, len(span), out=decoded[: len(span)])))
    return payload


def residual_norm(residual: Tensor) -> float:
    """The L2 norm of a residual (bf16, [n]): the same bits on every machine, for any tile size.

    NaN or infinite when a value is not finite. The sum is a tree of adds in fp64 for each group,
    and the groups' sums from the left; squares of bf16 are exact there.
    """
    assert residual.dtype == torch.bfloat16, residual.dtype
    if compiled.ready(residual.numel()):
        bits = residual.view(torch.uint16).numpy()
        return math.sqrt(_sum_of_squares(bits, np.empty(GROUP_ELEMENTS // 2)))
    sum_of_squares = 0.0
    scratch = torch.empty(GROUP_ELEMENTS, dtype=torch.float64)
    for _, span in buffers.groups(residual.numel()):
        scratch[len(span) :] = 0.0  # the last group may be short
        group = scratch[: len(span)].copy_(span.of(residual))
        group.mul_(group)
        sum_of_squares += float(tree.total(scratch.view(1, -1))[0])
    return math.sqrt(sum_of_squares)


@loop(HALVES, DOUBLES)
def _sum_of_squares(residual: Halves, scratch: Doubles) -> float:
    """The same sum as `residual_norm` takes the root of; `scratch` has half a group."""
    half, found = scratch.size, 0.0
    for first in range(0, residual.size, 2 * half):
        lower = residual[first : first + half]
        upper = residual[first + half : first + 2 * half]
        scratch[lower.size :] = 0.0  # the last group may be short
        for i in range(lower.size):
            value = np.float64(widened(np.uint32(lower[i])))
            scratch[i] = value * value
        for i in range(upper.size):
            value = np.float64(widened(np.uint32(upper[i])))
            scratch[i] += value * value
        found += halve(scratch)
    return found
