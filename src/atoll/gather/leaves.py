"""The params digest of weights that lie with their owners, tile by tile.

Leaves and tiles share no edges: a leaf over an edge is hashed by the owner of its first element,
whom the next ranks send their pieces of it. At most one leaf of each rank is, so at most 4 MiB.
"""

from collections.abc import Sequence

import torch
from blake3 import blake3
from torch import Tensor

from atoll.collectives.base import Collectives
from atoll.gather.turns import Turns
from atoll.layout import ELEMENT_BYTES, Layout, Span, byte_view
from atoll.sums import digest
from atoll.sums.digest import LEAF_DIGEST_BYTES, ParamsDigest


def params_digest(
    ranks: Collectives, turns: Turns, layout: Layout, *, owners: Sequence[Span], own: Tensor
) -> ParamsDigest:
    """The digest of all ranks' weights, on each of them; `own` are those of this one's span."""
    mine = owners[ranks.rank]
    firsts = [_leaves(layout, span) for span in owners]
    sent = [_bytes_of(own, mine, _over(leaves, span)) for leaves, span in _pairs(firsts, owners)]
    over = _over(firsts[ranks.rank], mine)
    sizes = [ELEMENT_BYTES * len(_common(over, span)) for span in owners]
    came = ranks.exchange(turns.next("gather"), sent, sizes)
    leaves = b"".join(
        _hash(own, mine, leaf, came if leaf.stop > mine.stop else ()) for leaf in firsts[ranks.rank]
    )
    limit = max(LEAF_DIGEST_BYTES * len(leaves) for leaves in firsts)
    whole = b"".join(ranks.all_gather_bytes(turns.next("gather"), leaves, limit=limit))
    return ParamsDigest(digest.root_of(whole), whole)


def _pairs(
    firsts: Sequence[Sequence[Span]], owners: Sequence[Span]
) -> list[tuple[Sequence[Span], Span]]:
    return list(zip(firsts, owners, strict=True))


def _leaves(layout: Layout, span: Span) -> list[Span]:
    """Those whose first element lies in a rank's span."""
    return [leaf for leaf in layout.leaves if span.start <= leaf.start < span.stop]


def _over(leaves: Sequence[Span], span: Span) -> Span:
    """What a rank's last leaf has beyond its own span; nothing for most."""
    stop = leaves[-1].stop if leaves else span.stop
    return Span(span.stop, max(span.stop, stop))


def _common(one: Span, other: Span) -> Span:
    start, stop = max(one.start, other.start), min(one.stop, other.stop)
    return Span(start, max(start, stop))


def _bytes_of(own: Tensor, mine: Span, wanted: Span) -> Tensor:
    """The bytes of what this rank has of a span."""
    common = _common(wanted, mine)
    if not len(common):
        return torch.empty(0, dtype=torch.uint8)
    return own[common.start - mine.start : common.stop - mine.start].view(torch.uint8)


def _hash(own: Tensor, mine: Span, leaf: Span, came: Sequence[Tensor]) -> bytes:
    """A leaf's hash; its pieces came in the order of ranks, which is that of elements."""
    made = blake3(byte_view(_bytes_of(own, mine, leaf)))
    for piece in came:
        made.update(byte_view(piece))
    return made.digest()
