"""Squared norms of a contribution, one for each parameter, added up as its tiles pass.

With a median clip norms decide bits of the model, so their sums have one order: see
`TopK.add_squares`. They are the same at every tile size, on every machine, with loops and without.
"""

import math
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from atoll.compiled.arrays import Integers
from atoll.layout import Layout, Span

if TYPE_CHECKING:  # its loops are compiled where it is used, not where it is named
    from atoll.codecs.topk.codec import TopK


class Norms:
    """The sums so far. Tiles come in their order; one thread at a time."""

    def __init__(self, layout: Layout, codec: "TopK") -> None:
        self._codec = codec
        self._ends: Integers = np.array([t.span.stop for t in layout.tensors], np.int64)
        self._squares = np.zeros(len(layout.tensors))  # fp64, [parameters]
        self._complete = 0  # parameters that have ended
        self._square_sum = 0.0  # of those

    def add(self, span: Span, payload: Tensor) -> None:
        """Adds the next tile; FrameError, and nothing added, when it is no payload of the codec."""
        self._codec.add_squares(
            payload, len(span), first=span.start, ends=self._ends, squares=self._squares
        )
        while self._complete < len(self._ends) and self._ends[self._complete] <= span.stop:
            self._square_sum += float(self._squares[self._complete])
            self._complete += 1

    def squares(self) -> tuple[float, ...]:
        """norm^2 of every parameter, in the layout's order; NaN where a value is not finite."""
        return tuple(self._squares.tolist())

    def norm(self) -> float:
        """The norm of all that was added: squares added up in the layout's order, then the root.

        It never falls from tile to tile, so what is above a bound stays above it.
        """
        rest = self._squares[self._complete : self._complete + 1].sum()  # of the one that goes on
        return math.sqrt(self._square_sum + float(rest))
