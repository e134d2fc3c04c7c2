"""Sums whose bits matter: a tree of adds with a fixed shape, in fp64.

    [a b c d] -> [a+c b+d] -> [(a+c)+(b+d)]

A library's sum takes the order that suits the processor, and its last bits with it. Here the upper
half is added to the lower until one value is left; zeros fill up to a power of two and change
nothing.
"""

from torch import Tensor

from atoll.compiled.arrays import Doubles
from atoll.compiled.jit import loop


def total(terms: Tensor) -> Tensor:
    """The sums [rows] of `terms` (fp64, [rows, a power of two]), which stay as they are."""
    while (width := terms.shape[1]) > 1:
        half = width // 2
        terms = terms[:, :half] + terms[:, half:]
    return terms[:, 0]


@loop()
def halve(terms: Doubles) -> float:
    """The same sum of one row, whose memory is used for it."""
    width = terms.size
    while width > 1:
        width //= 2
        for i in range(width):
            terms[i] += terms[width + i]
    found: float = terms[0]
    return found
