"""The params digest: one hash of the weights that can also say which tensor differs.

    leaf = blake3(little-endian fp32 bytes of one span of layout.leaves)
    root = blake3(leaf 0 | leaf 1 | ...)

Owns hashing of weights. Does not judge a difference; that is the caller's.
"""

from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from atoll.errors import ConfigError, LayoutMismatch
from atoll.layout import Layout, Span

LEAF_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class ParamsDigest:
    """The root in hex, and the leaf digests one after another in the order of `layout.leaves`."""

    root: str
    leaves: bytes


class RunningDigest:
    """The digest of a flat fp32 CPU buffer that becomes final from its start to its end.

    Each leaf is hashed once, as soon as it is final: in a thread of `pool`, else in the call that
    completes it. Reads `flat` where it lies. One thread at a time.
    """

    def __init__(self, layout: Layout, flat: Tensor, *, pool: Executor | None = None) -> None:
        _check_flat(layout, flat)
        self._layout = layout
        self._values = flat.detach().numpy()
        self._pool = pool
        self._leaves: list[bytes | Future[bytes]] = []

    def reached(self, stop: int) -> None:
        """The elements before `stop` are final: they must not change before `finish`."""
        leaves = self._layout.leaves
        while len(self._leaves) < len(leaves) and leaves[len(self._leaves)].stop <= stop:
            span = leaves[len(self._leaves)]
            hashed = self._hash(span) if self._pool is None else self._pool.submit(self._hash, span)
            self._leaves.append(hashed)

    def finish(self) -> ParamsDigest:
        """The digest, once the whole buffer is final."""
        self.reached(self._layout.size)
        leaves = b"".join(
            leaf if isinstance(leaf, bytes) else leaf.result() for leaf in self._leaves
        )
        return ParamsDigest(root_of(leaves), leaves)

    def _hash(self, span: Span) -> bytes:
        # Free of copies on a little-endian CPU. blake3 releases the GIL above 2 KiB.
        little = self._values[span.start : span.stop].astype("<f4", copy=False)
        return blake3(little.view(np.uint8).data).digest()


def root_of(leaves: bytes) -> str:
    """The root that leaf digests, one after another, hash to."""
    return blake3(leaves).hexdigest()


def digest(layout: Layout, flat: Tensor, *, threads: int = 1) -> ParamsDigest:
    """The digest of the flat fp32 buffer `flat`, the same for every number of threads.

    Reads `flat` where it lies; it must not change during the call.
    """
    if threads < 1:
        raise ConfigError(f"digest threads={threads} must be at least 1")
    _check_flat(layout, flat)
    if threads == 1:
        return RunningDigest(layout, flat.cpu()).finish()
    with ThreadPoolExecutor(threads, thread_name_prefix="digest") as pool:
        return RunningDigest(layout, flat.cpu(), pool=pool).finish()


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
    left = np.frombuffer(mine, dtype=np.uint8).reshape(-1, LEAF_DIGEST_BYTES)
    right = np.frombuffer(theirs, dtype=np.uint8).reshape(-1, LEAF_DIGEST_BYTES)
    differing = np.flatnonzero((left != right).any(axis=1))
    if differing.size == 0:
        return None
    return layout.name_at(layout.leaves[int(differing[0])].start)


def _check_flat(layout: Layout, flat: Tensor) -> None:
    if flat.shape != (layout.size,) or flat.dtype != torch.float32 or not flat.is_contiguous():
        raise LayoutMismatch(
            f"a buffer of shape {tuple(flat.shape)}, {flat.dtype} and strides {flat.stride()} "
            f"cannot be digested; this layout needs {layout.size} contiguous torch.float32 values"
        )
