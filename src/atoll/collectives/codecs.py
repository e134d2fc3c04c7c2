"""How values travel between ranks where not as they are: a codec, and what its rounding draws.

The codecs are those of `atoll.codecs`. Their groups count from the start of a part, which is one
rank's span of a tensor, so a part's bytes depend neither on where it lies nor on chunks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from atoll.codecs import buffers, feedback, registry
from atoll.codecs.base import Codec
from atoll.codecs.noise import HashedNoise
from atoll.codecs.settings import CodecSettings, Rounding
from atoll.collectives import memory
from atoll.errors import ConfigError
from atoll.layout import GROUP_ELEMENTS, Span

# The most of a coded chunk, which brings four times the values of others: on a slow link the next
# one is encoded while this one travels.
CHUNK_BYTES = 512 << 10

Stage = Literal["reduce", "gather"]


@dataclass(frozen=True, slots=True)
class WireCodec:
    """A codec of messages, the same on all ranks; `seed` is the run's.

    fp32 values alone. No message says that it is coded: the ranks know, and its size shows it.
    """

    codec: Codec
    seed: int = 0

    @property
    def name(self) -> str:
        return self.codec.name

    def nbytes(self, elements: int) -> int:
        """Of a message of so many elements."""
        return self.codec.encoded_bytes(elements)

    def chunk_elements(self, chunk_bytes: int) -> int:
        """Whole groups, so that chunks change no byte: as many as fit, and one at least."""
        most = min(chunk_bytes, CHUNK_BYTES) // self.nbytes(GROUP_ELEMENTS)
        return max(1, most) * GROUP_ELEMENTS

    def part(
        self, stage: Stage, *, step: int, micro: int, unit: int, sender: int, owner: int
    ) -> "PartCodec":
        """For one sender's values of one part; no other draws the same noise in a training.

        A group's number changes nothing: who repeats a step after a death draws what was drawn.
        """
        lane = f"{stage}/{micro}/{unit}/{sender}/{owner}"
        return PartCodec(self.codec, HashedNoise(self.seed, step, lane))


@dataclass(frozen=True, slots=True)
class PartCodec:
    """Encodes pieces of one part; a piece begins on a group of it."""

    codec: Codec
    noise: HashedNoise

    def encode(self, values: Tensor, piece: Span, residual: Tensor | None = None) -> Tensor:
        """The bytes of `values` [piece], in memory of their own.

        A `residual` (bf16, [piece]) is added before and takes what rounding dropped.
        """
        own, first = lent(values), piece.first_group
        out = torch.empty(self.codec.encoded_bytes(len(piece)), dtype=torch.uint8)
        if residual is None:
            return self.codec.encode(own, noise=self.noise, first_group=first, out=out)
        return feedback.encode_with_feedback(
            self.codec, own, lent(residual), noise=self.noise, first_group=first, out=out
        )


def decode(coding: WireCodec, payload: Tensor, out: Tensor) -> None:
    """`out` becomes what the bytes say; FrameError before it changes."""
    coding.codec.decode(payload, out.numel(), out=lent(out))


def fold(coding: WireCodec, payload: Tensor, total: Tensor) -> None:
    """Adds what the bytes say to `total`, one rounding an element; FrameError before it changes."""
    codec = coding.codec
    buffers.check_payload(codec, payload, total.numel())
    room = torch.empty(min(total.numel(), buffers.RUN_GROUPS * GROUP_ELEMENTS))
    for run in buffers.runs(total.numel()):  # decoded and added while it is in the cache
        place = payload[codec.encoded_bytes(run.start) : codec.encoded_bytes(run.stop)]
        run.of(total).add_(codec.decode(place, len(run), out=room[: len(run)]))


def add_up(coding: WireCodec, payloads: Iterable[Tensor], total: Tensor) -> None:
    """`total` becomes the sum of what the bytes say, in that order."""
    for index, payload in enumerate(payloads):
        (fold if index else decode)(coding, payload, total)


def lent(values: Tensor) -> Tensor:
    """The same memory as another tensor, which alone is bound to numpy where a loop needs it.

    Weights that are freed after use are resized, which numpy forbids for good.
    """
    return memory.tensor_of(memory.bytes_of(values), values.dtype)


GRADIENTS = ("fp32", "int8")
PARAMETERS = ("fp32", "bf16", "int8")


def of_gradients(name: str, *, seed: int) -> WireCodec | None:
    """By its name in a run's settings; rounded at random, so that sums are right on average."""
    return _named("gradients", name, GRADIENTS, "stochastic", seed)


def of_parameters(name: str) -> WireCodec | None:
    """By its name in a run's settings; rounded to nearest: weights are sent whole every time."""
    return _named("parameters", name, PARAMETERS, "nearest", 0)


def _named(
    what: str, name: str, known: Sequence[str], rounding: Rounding, seed: int
) -> WireCodec | None:
    if name not in known:
        raise ConfigError(f"{what}={name!r} are not known; they travel as {', '.join(known)}")
    if name == registry.DEFAULT.codec:
        return None  # as they are
    settings = CodecSettings.model_validate({"codec": name, "rounding": rounding})
    return WireCodec(settings.build(), seed)
