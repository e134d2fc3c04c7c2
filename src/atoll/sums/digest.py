"""The params digest: one hash of the weights that can also say which tensor differs.

    leaf = sha256(little-endian fp32 bytes of one span of layout.leaves)
    root = sha256(leaf 0 | leaf 1 | ...)

Owns hashing of weights. Does not judge a difference; that is the caller's.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from atoll.errors import ConfigError, LayoutMismatch
from atoll.layout import Layout

LEAF_DIGEST_BYTES = 32  # sha256


@dataclass(frozen=True, slots=True)
class ParamsDigest:
    """The root in hex, and the leaf digests one after another in the order of `layout.leaves`."""

    root: str
    leaves: bytes


def digest(layout: Layout, flat: Tensor, *, threads: int = 1) -> ParamsDigest:
    """The digest of the flat fp32 buffer `flat`, the same for every number of threads.

    Reads `flat` where it lies; it must not change during the call.
    """
    if threads < 1:
        raise ConfigError(f"digest threads={threads} must be at least 1")
    _check_flat(layout, flat)
    # Free of copies on a little-endian CPU; elsewhere the bytes are swapped once.
    values = flat.detach().cpu().numpy().astype("<f4", copy=False)

    def leaf(index: int) -> bytes:
        span = layout.leaves[index]
        return hashlib.sha256(values[span.start : span.stop].data).digest()

    indices = range(len(layout.leaves))
    if threads == 1:
        leaves = b"".join(map(leaf, indices))
    else:
        # hashlib releases the GIL above 2 KiB, and `map` keeps the order of the leaves.
        with ThreadPoolExecutor(threads, thread_name_prefix="digest") as pool:
            leaves = b"".join(pool.map(leaf, indices))
    return ParamsDigest(hashlib.sha256(leaves).hexdigest(), leaves)


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
