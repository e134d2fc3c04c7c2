"""The canonical fold: float addition is not associative, so the order of terms is fixed here.

Owns the order and the kernels that apply it. Every kernel rounds once: a multiply, then an add.
`add(alpha=)`, `addcmul`, `lerp` and `_foreach_*` fuse the two on some CPUs and not on others, so
they give other bits under another instruction set and are not used.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from atoll.errors import EmptySum, ProtocolError
from atoll.sums import partial
from atoll.sums.partial import PartialSum


def fold_tile(terms: Iterable[tuple[Tensor, int]], *, unit: str) -> PartialSum:
    """The sum of `weight * delta` over one tile, with the sum of the weights as its count.

    `terms` are (delta, weight) with fp32 deltas of one shape, already in canonical order:

        total = (...((w1*d1 + w2*d2) + w3*d3) ...)

    The count is exact; a weight above 2^24 enters its product rounded to fp32.
    Every element is summed on its own, so any tile size gives the same bits.
    They are taken one at a time: memory is the total and one scratch tile, however many come.

    Aliasing: no delta is written to and the total never shares memory with one. The first delta is
    read when the second arrives, so an iterator that decodes into one buffer must not reuse it for
    the second term; from then on a delta is read before the next is taken.
    """
    total: Tensor | None = None
    is_owned = False  # whether the total is this call's memory and may be added to in place
    scratch: Tensor | None = None
    count = 0
    for delta, weight in terms:
        partial.check_count("weight", weight)
        if delta.dtype != torch.float32:
            raise ProtocolError(f"a term is {delta.dtype}; tiles are folded in torch.float32")
        if total is not None:
            partial.check_alike(total, delta)
        count += weight
        term = delta
        if weight != 1:  # 1 * x is x: that multiply would only cost time
            term = scratch = torch.mul(delta, float(weight), out=scratch)
        if total is None:
            # A scaled first term is this call's own memory: it becomes the total, uncopied.
            total, is_owned, scratch = term, term is not delta, None
        elif is_owned:
            total.add_(term)
        else:
            total, is_owned = total + term, True  # the first delta is the caller's: never written
    if total is None:
        raise EmptySum("no contribution was accepted for this tile; the model is unchanged")
    return PartialSum(total if is_owned else total.clone(), count, unit)
