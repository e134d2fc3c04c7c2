"""Error feedback: what a lossy codec drops is remembered and added to the next values.

    v = values + residual;  payload = encode(v);  residual := bf16(v - decode(payload))

Seide et al. 2014 (1-bit SGD), with one deviation: the residual is stored in bf16 by definition, on
every island, which halves what must be persisted with a contribution. What bf16 drops of a residual
is lost, at most 2^-9 of it. Owns the arithmetic; when a residual is promoted or rolled back is the
caller's.
"""

import torch
from torch import Tensor

from atoll.codecs import buffers
from atoll.codecs.base import Codec
from atoll.codecs.noise import Noise
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
    out: Tensor | None = None,
) -> Tensor:
    """The payload of `values` + `residual`; `residual` (bf16, [n]) is updated in place.

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
        fused.feed(values, residual, payload)
        return payload
    wanted = torch.empty(min(elements, buffers.RUN_GROUPS * GROUP_ELEMENTS))  # v of one run, fp32
    decoded = torch.empty_like(wanted)
    for span in buffers.runs(elements):
        place = payload[codec.encoded_bytes(span.start) : codec.encoded_bytes(span.stop)]
        part = residual[span.start : span.stop]  # bf16, a view: it is updated in place
        # The residual first: bf16 widens to fp32 without rounding, and the add rounds once.
        v = wanted[: len(span)].copy_(part).add_(values[span.start : span.stop])
        group = first_group + span.first_group  # noise is keyed by the group in the whole buffer
        codec.encode(v, noise=noise, first_group=group, out=place)
        # What arrives is what the other side decodes, not what was meant: the rest stays here.
        part.copy_(v.sub_(codec.decode(place, len(span), out=decoded[: len(span)])))
    return payload
