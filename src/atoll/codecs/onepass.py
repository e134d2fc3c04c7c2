"""What is done with a codec's tile, in one pass: where `compiled` has a loop for it.

Every function says whether it did; if not, nothing was changed and the caller takes its own steps,
which give the same bits.
"""

import torch
from torch import Tensor

from atoll.codecs import buffers
from atoll.codecs.base import Codec
from atoll.codecs.bf16 import Bf16
from atoll.codecs.int8 import Int8
from atoll.compiled.base import loops_for


def feed(codec: Codec, values: Tensor, residual: Tensor, payload: Tensor) -> bool:
    """Error feedback of a tile: see `codecs.feedback`. `residual` is bf16."""
    loops = loops_for(values.numel())
    if loops is None or not buffers.is_aligned(payload):
        return False
    kept = residual.view(torch.uint16).numpy()
    if isinstance(codec, Int8):
        loops.feed_int8(values.numpy(), kept, payload.numpy(), codec.block)
    elif _is_plain_bf16(codec):
        loops.feed_bf16(values.numpy(), kept, payload.view(torch.uint16).numpy())
    else:
        return False
    return True


def publish(codec: Codec, master: Tensor, published: Tensor, payload: Tensor) -> bool:
    """The payload of master - published, which `published` is moved by."""
    loops = loops_for(master.numel())
    if loops is None or not buffers.is_aligned(payload):
        return False
    true, known = master.numpy(), published.numpy()
    if isinstance(codec, Int8):
        loops.publish_int8(true, known, payload.numpy(), codec.block)
    elif _is_plain_bf16(codec):
        loops.publish_bf16(true, known, payload.view(torch.uint16).numpy())
    else:
        return False
    return True


def square_sum(codec: Codec, payload: Tensor, elements: int) -> float | None:
    """The sum of squares of what `payload` decodes to; None where there is no loop for it.

    FrameError when the payload has another size.
    """
    if not isinstance(codec, Int8):
        return None
    buffers.check_payload(
        payload,
        codec=codec.name,
        elements=elements,
        expected_bytes=codec.encoded_bytes(elements),
    )
    loops = loops_for(elements)
    if loops is None or not buffers.is_aligned(payload):
        return None
    return loops.square_sum_int8(payload.numpy(), elements, codec.block)


def _is_plain_bf16(codec: Codec) -> bool:
    return isinstance(codec, Bf16) and codec.rounding == "nearest"
