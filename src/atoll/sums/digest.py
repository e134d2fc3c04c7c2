"""The params digest: one hash of the weights that can also say which tensor differs.

    leaf = blake3(little-endian fp32 bytes of one span of layout.leaves)
    root = blake3(leaf 0 | leaf 1 | ...)

Owns hashing of weights. Does not judge a difference; that is the caller's.
"""

from collections import ChainMap
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from atoll.errors import BlobChanged, ConfigError, LayoutMismatch
from atoll.layout import ELEMENT_BYTES, Layout, Span

LEAF_DIGEST_BYTES = 32  # of BLAKE3


@dataclass(frozen=True, slots=True)
class ParamsDigest:
    """The root in hex, and the leaf digests one after another in the order of `layout.leaves`."""

    root: str
    leaves: bytes


class RunningDigest:
    """The digest of a flat fp32 CPU buffer [layout.size] that is being written in order.

    Whoever writes it from element `first` on says by `reached` how far it is final; each leaf is
    hashed once, in the call that completes it. Reads `flat` where it lies. Not thread-safe: threads
    that write parts of one buffer have one RunningDigest each, and `joined` combines them.
    """

    def __init__(self, layout: Layout, flat: Tensor, *, first: int = 0) -> None:
        if flat.shape != (layout.size,) or flat.dtype != torch.float32 or not flat.is_contiguous():
            raise LayoutMismatch(
                f"a buffer of shape {tuple(flat.shape)}, {flat.dtype} and strides {flat.stride()} "
                f"cannot be digested; it needs {layout.size} contiguous torch.float32 values"
            )
        self._layout = layout
        self._values = flat.detach().numpy()
        leaves = enumerate(layout.leaves)
        self._next = next((k for k, leaf in leaves if leaf.start >= first), len(layout.leaves))
        self._hashed: dict[int, bytes] = {}

    def reached(self, stop: int) -> None:
        """Says that the elements from `first` to `stop` are final and will not change any more."""
        leaves = self._layout.leaves
        while self._next < len(leaves) and leaves[self._next].stop <= stop:
            self._hashed[self._next] = self._hash(leaves[self._next])
            self._next += 1

    def finish(self) -> ParamsDigest:
        """The digest, once the whole buffer is final."""
        return self.joined([])

    def joined(self, others: Iterable["RunningDigest"]) -> ParamsDigest:
        """The digest of the whole buffer, from this one's leaves and those that `others` hashed."""
        hashed = ChainMap(self._hashed, *(other._hashed for other in others))
        # A leaf that crosses the border of two parts was hashed by neither: it is hashed here.
        spans = enumerate(self._layout.leaves)
        leaves = b"".join(hashed[k] if k in hashed else self._hash(span) for k, span in spans)
        return ParamsDigest(root_of(leaves), leaves)

    def _hash(self, span: Span) -> bytes:
        # Free of copies on a little-endian CPU. blake3 releases the GIL above 2 KiB.
        little = self._values[span.start : span.stop].astype("<f4", copy=False)
        return blake3(little.view(np.uint8).data).digest()


class StreamedDigest:
    """The digest of weights whose little-endian fp32 bytes come by in order and are not kept."""

    def __init__(self, layout: Layout) -> None:
        self._ends = iter([leaf.stop * ELEMENT_BYTES for leaf in layout.leaves])
        self._nbytes = layout.nbytes
        self._reached = 0
        self._leaves = bytearray()
        self._begin()

    def _begin(self) -> None:
        self._end, self._leaf = next(self._ends, self._nbytes), blake3()

    def feed(self, piece: memoryview) -> None:
        """The next bytes, in pieces of any size."""
        if self._reached + len(piece) > self._nbytes:
            raise LayoutMismatch(
                f"weights of more than {self._nbytes} bytes cannot be digested; the layout has "
                f"no more"
            )
        while piece:
            taken = piece[: self._end - self._reached]
            self._leaf.update(taken)
            self._reached, piece = self._reached + len(taken), piece[len(taken) :]
            if self._reached == self._end:
                self._leaves += self._leaf.digest()
                self._begin()

    def finish(self) -> ParamsDigest:
        """The digest, once all bytes came by."""
        if self._reached != self._nbytes:
            raise LayoutMismatch(
                f"weights of {self._reached} bytes cannot be digested; the layout has "
                f"{self._nbytes}"
            )
        leaves = bytes(self._leaves)
        return ParamsDigest(root_of(leaves), leaves)


def root_of(leaves: bytes) -> str:
    """The root that leaf digests, one after another, hash to."""
    return blake3(leaves).hexdigest()


def check_leaf(leaves: bytes, number: int, data: bytes | bytearray | memoryview) -> None:
    """BlobChanged unless `data` are the bytes whose digest is leaf `number` of `leaves`."""
    wanted = leaves[number * LEAF_DIGEST_BYTES : (number + 1) * LEAF_DIGEST_BYTES]
    if blake3(data).digest() != wanted:
        raise BlobChanged(
            f"leaf {number} of the weights came with {len(data)} bytes that are not those that "
            f"were recorded; restore the blob that they are in from a copy"
        )


def composed(fragments: Iterable[ParamsDigest]) -> ParamsDigest:
    """The digest of the run's whole buffer from those of its fragments, in order.

    No weight is read again: no leaf crosses a tensor, hence none crosses a fragment.
    """
    leaves = b"".join(fragment.leaves for fragment in fragments)
    return ParamsDigest(root_of(leaves), leaves)


def cut(whole: ParamsDigest, layouts: Iterable[Layout]) -> list[ParamsDigest]:
    """Cuts the whole buffer's digest into those of fragments with these `layouts`, in order."""
    found, start = [], 0
    for layout in layouts:
        stop = start + len(layout.leaves) * LEAF_DIGEST_BYTES
        leaves = whole.leaves[start:stop]
        found.append(ParamsDigest(root_of(leaves), leaves))
        start = stop
    return found


def digest(layout: Layout, flat: Tensor, *, threads: int = 1) -> ParamsDigest:
    """The digest of the flat fp32 buffer `flat`, the same for every number of threads.

    Reads `flat` where it lies; it must not change during the call.
    """
    if threads < 1:
        raise ConfigError(f"digest threads={threads} must be at least 1")
    whole = RunningDigest(layout, flat.cpu())
    if threads == 1:
        return whole.finish()
    # Leaves are hashed in any order and joined in theirs: map keeps it.
    with ThreadPoolExecutor(threads, thread_name_prefix="digest") as pool:
        leaves = b"".join(pool.map(whole._hash, layout.leaves))
    return ParamsDigest(root_of(leaves), leaves)


def first_difference(layout: Layout, mine: bytes, theirs: bytes) -> str | None:
    """The name of the first tensor whose leaf digests differ, or None when all agree.

    Raises LayoutMismatch when either side is not one digest for each leaf of `layout`.
    """
    expected = len(layout.leaves) * LEAF_DIGEST_BYTES
    for side, leaves in (("mine", mine), ("theirs", theirs)):
        if len(leaves) != expected:
            raise LayoutMismatch(
                f"the leaf digests {side!r} have {len(leaves)} bytes; this layout has "
                f"{len(layout.leaves)} leaves of {LEAF_DIGEST_BYTES} bytes each"
            )
    for number, leaf in enumerate(layout.leaves):
        place = slice(number * LEAF_DIGEST_BYTES, (number + 1) * LEAF_DIGEST_BYTES)
        if mine[place] != theirs[place]:
            return layout.name_at(leaf.start)
    return None
