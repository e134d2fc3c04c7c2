"""The codec seam: fp32 values of the flat buffer <-> bytes of an exactly known size.

A codec works group by group (`layout.GROUP_ELEMENTS`), so any tile made of whole groups encodes to
the same bytes, and any tile can be reached in a payload without reading what is before it.
"""

from typing import Protocol

from torch import Tensor

from atoll.codecs.noise import Noise


class Fused(Protocol):
    """Whole steps of a sync over a tile, each in one pass of the codec's compiled loops.

    The bits are those of the codec's own encode and decode with torch's steps between them.
    """

    def feed(self, values: Tensor, residual: Tensor, payload: Tensor, *, decay: float) -> None:
        """Error feedback, as `codecs.feedback`: `residual` (bf16) is updated in place."""
        ...

    def publish(self, master: Tensor, published: Tensor, payload: Tensor) -> None:
        """Encodes `master` - `published` into `payload`; adds what that decodes to `published`."""
        ...

    def square_sum(self, payload: Tensor, elements: int) -> float | None:
        """`codecs.finite.square_sum` of the values in `payload`; FrameError as `decode` raises it.

        None where no loop does it: the caller decodes the payload and sums itself.
        """
        ...


class Format(Protocol):
    """What a payload's bytes are, and how many."""

    @property
    def name(self) -> str: ...

    @property
    def format(self) -> str:
        """What frames say about their bytes: the name, and the settings that change them."""
        ...

    def encoded_bytes(self, elements: int) -> int:
        """Exact payload bytes of a span of `elements` that starts on a group boundary."""
        ...


class Codec(Format, Protocol):
    """How values travel. Implementations are frozen values without state, safe to share."""

    @property
    def lossless(self) -> bool:
        """Whether decode(encode(x)) has the bits of x for every finite x."""
        ...

    def fused(self, payload: Tensor, elements: int) -> Fused | None:
        """The compiled loops for a tile of `elements` whose bytes are, or will be, in `payload`.

        None where none are ready: numba is missing, they are still being compiled, or the tile is
        too small or badly aligned. The caller then encodes or decodes step by step.
        """
        ...

    def encode(
        self, values: Tensor, *, noise: Noise | None, first_group: int, out: Tensor | None = None
    ) -> Tensor:
        """`values` (fp32, [n]) as a uint8 tensor [encoded_bytes(n)].

        `first_group` is the index of the group the span starts on: rounding noise is keyed by it,
        so it never depends on the tile size. `noise` is required by stochastic codecs only. With
        `out` (uint8, [encoded_bytes(n)], at any alignment) the bytes are written there and `out` is
        returned. Without it the result may alias `values` (a lossless codec does); it must be
        consumed before they change. `values` are never written.
        """
        ...

    def decode(self, payload: Tensor, elements: int, *, out: Tensor | None = None) -> Tensor:
        """The fp32 values [elements] of a uint8 `payload`; a new tensor or a view of the payload.

        With `out` (fp32, [elements]) the values are written there and `out` is returned. Raises
        FrameError, before `out` changes, when the payload's size is not `encoded_bytes(elements)`
        or its bits name no values: places out of order or out of range, bits where none belong. So
        who decodes before it folds has checked them. Bit-identical on every machine. Does not judge
        the values: what is not finite decodes to values that are not finite.
        """
        ...
