"""How much of each peer's parameters counts: none weighs more than the median of them all.

Per parameter the lower median over the norms of the final set, then for each peer

    factor = min(1, median / (norm + 1e-8))         fp64, rounded once to fp32

A median does not decompose, so the set must be final before: reserves, conflicts and copies that
are left out come first. Of two peers the lower median is the smaller norm, so that one peer of
zeros stands still whatever the other sends; three or more peers are advised.
"""

from collections.abc import Sequence

import numpy as np

from atoll.compiled.arrays import Doubles, Floats
from atoll.errors import ConfigError

EPSILON = 1e-8  # templar's; keeps a norm of 0 from dividing


def medians(squares: Sequence[Sequence[float]]) -> Doubles:
    """The lower median [parameters] of the norms; `squares` are a row for each peer, fp64.

    Norms are the square roots of what validation summed. Without a peer there are no parameters.
    """
    norms = np.sort(_norms(squares), axis=0)
    lower: Doubles = norms[(len(norms) - 1) // 2] if len(norms) else np.empty(0)
    return lower


def factors(squares: Sequence[Sequence[float]]) -> Floats:
    """fp32 [peers, parameters]: what each peer's values of a parameter are multiplied by."""
    shares: Doubles = medians(squares) / (_norms(squares) + EPSILON)
    return np.minimum(1.0, shares).astype(np.float32)


def _norms(squares: Sequence[Sequence[float]]) -> Doubles:
    """fp64 [peers, parameters]; a square root is rounded once on every machine."""
    lengths = {len(row) for row in squares}
    if len(lengths) > 1:
        raise ConfigError(
            f"norms of {sorted(lengths)} parameters cannot be compared; every peer has those of "
            f"the run's layout"
        )
    made: Doubles = np.array([list(row) for row in squares], np.float64)
    return np.sqrt(made.reshape(len(squares), -1) if len(squares) else np.empty((0, 0)))
