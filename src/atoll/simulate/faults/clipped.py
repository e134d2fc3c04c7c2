"""The clipped mean of a gather run once more, in plain numpy from `docs/gather.md`.

Shares nothing with `atoll.gather`. For the stand-in alone, whose payloads are one chunk each.
"""

import math
from collections.abc import Sequence

import numpy as np

from atoll.layout import Layout
from atoll.simulate.faults import payloads
from atoll.simulate.faults.payloads import Floats, Integers, Sent

F = np.float32


def mean(raw: Sequence[bytes], weights: Sequence[int], layout: Layout) -> Floats:
    """Per element over those who sent it; 0 where nobody did. `raw` are payloads by worker_id."""
    told = [payloads.sent(payload, layout.size) for payload in raw]
    owner = np.repeat(np.arange(len(layout.tensors)), [len(t.span) for t in layout.tensors])
    norms = [_norms(one, owner, len(layout.tensors)) for one in told]
    medians = [sorted(column)[(len(told) - 1) // 2] for column in zip(*norms, strict=True)]
    total, count = np.zeros(layout.size, F), np.zeros(layout.size, np.int64)
    for one, weight, norm in zip(told, weights, norms, strict=True):
        factors = [min(1.0, m / (n + 1e-8)) for m, n in zip(medians, norm, strict=True)]
        factor: Floats = np.array(factors).astype(F)[owner[one.places]]
        total[one.places] += (one.values() * factor) * F(weight)
        count[one.places] += weight
    divisor: Floats = np.maximum(count, 1).astype(F)
    found: Floats = np.divide(total, divisor)
    return found


def _norms(one: Sent, owner: Integers, parameters: int) -> list[float]:
    """The norm of each parameter: count times the square, the first magnitude before the second."""
    found = []
    for parameter in range(parameters):
        mine = one.larger[owner[one.places] == parameter]
        counts = (int((mine == 0).sum()), int((mine == 1).sum()))
        squares = 0.0
        for many, size in zip(counts, one.magnitudes, strict=True):
            squares = squares + many * (size * size)
        found.append(math.sqrt(squares))
    return found
