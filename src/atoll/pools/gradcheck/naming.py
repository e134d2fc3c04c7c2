"""What a wrong ratio is called: the shortest expression in sizes and counts that fits everywhere.

An expression is a product of at most three factors, each a symbol of the sizes, a term's count or
a small integer, above or below the line. At one size alone a number has many readings (at
(4, 2x2, 2) a 2 is n_per_block, n_blocks, n_ppgd or just 2), so it gets no name.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, product

from atoll.pools.gradcheck.outcome import Size

MAX_FACTORS = 3
CONSTANTS = range(2, 17)
TOLERANCE = 1e-9  # relative, of a ratio from the expression's value

Powers = tuple[tuple[int, int], ...]  # (index of a factor, +1 or -1)


@dataclass(frozen=True, slots=True)
class Reading:
    """`text` where exactly one shortest expression fits at two sizes at least, else None.

    `readings` are all shortest ones that fit, in a fixed order; where there is none, but the ratio
    is the same everywhere, that number.
    """

    text: str | None
    readings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Factor:
    """Something a ratio may contain, with its value at each size."""

    text: str
    values: tuple[int, ...]
    length: int = 1  # what it costs: less likely ones cost more
    is_constant: bool = False


def name(
    ratios: Sequence[float],
    sizes: Sequence[Size],
    *,
    counts: Sequence[Mapping[str, int]] = (),
    own: str = "",
    tolerance: float = TOLERANCE,
) -> Reading:
    """The name of `ratios`, one for each of `sizes`; `counts` are those of the terms there.

    `own` is the term whose ratios they are: the count of another one is a less likely factor.
    """
    if len(ratios) != len(sizes) or (counts and len(counts) != len(sizes)):
        raise ValueError(f"{len(ratios)} ratios, {len(counts)} counts, {len(sizes)} sizes")
    if not ratios or any(not math.isfinite(one) or one == 0 for one in ratios):
        return Reading(None, ())
    sign = -1 if ratios[0] < 0 else 1
    wanted = [sign * one for one in ratios]
    factors = _factors(sizes, counts, own)
    found = _shortest(wanted, factors, tolerance) or _constant(wanted, tolerance)
    readings = tuple(f"{'-' * (sign < 0)}{one}" for one in found)
    several = len({tuple(sorted(size.symbols.items())) for size in sizes}) > 1
    return Reading(readings[0] if several and len(readings) == 1 else None, readings)


def _factors(
    sizes: Sequence[Size], counts: Sequence[Mapping[str, int]], own: str
) -> tuple[Factor, ...]:
    def at_all(of: Sequence[Mapping[str, int]]) -> Iterator[tuple[str, tuple[int, ...]]]:
        for text in of[0] if of else ():
            values = tuple(one.get(text, 0) for one in of)
            if all(value > 0 for value in values):
                yield text, values

    symbols = [Factor(text, values) for text, values in at_all([s.symbols for s in sizes])]
    counted = [
        Factor(f"count of {term}", values, 1 if term == own else 2)
        for term, values in at_all(counts)
    ]
    of_own = {one.values for one in counted if one.length == 1}
    constants = [
        Factor(str(value), (value,) * len(sizes), is_constant=True)
        for value in CONSTANTS
        # A term's own count is the likelier reading of that number.
        if (value,) * len(sizes) not in of_own
    ]
    return tuple(one for one in (*symbols, *counted, *constants) if set(one.values) != {1})


def _shortest(wanted: Sequence[float], factors: tuple[Factor, ...], tolerance: float) -> list[str]:
    """Texts of the cheapest products that are `wanted` at every size; all of them."""
    if _fits(wanted, [1.0] * len(wanted), tolerance):
        return ["1"]
    best, length = list[str](), 0
    for cost, powers in _products(factors):
        if best and cost > length:
            break
        values = _values(factors, powers, len(wanted))
        if _fits(wanted, values, tolerance):
            best, length = [*best, _text(factors, powers)], cost
    return best


def _constant(wanted: Sequence[float], tolerance: float) -> list[str]:
    return [f"{wanted[0]:.6g}"] if _fits(wanted, [wanted[0]] * len(wanted), tolerance) else []


@lru_cache(maxsize=64)
def _products(factors: tuple[Factor, ...]) -> tuple[tuple[int, Powers], ...]:
    """Every product with what it costs, cheapest first; at most one constant in each."""
    found: list[tuple[int, Powers]] = []
    for many in range(1, MAX_FACTORS + 1):
        for chosen in combinations(range(len(factors)), many):
            if sum(factors[k].is_constant for k in chosen) > 1:
                continue
            cost = sum(factors[k].length for k in chosen)
            found += [
                (cost, tuple(zip(chosen, signs, strict=True)))
                for signs in product((1, -1), repeat=many)
            ]
    return tuple(sorted(found, key=lambda one: one[0]))


def _values(factors: tuple[Factor, ...], powers: Powers, sizes: int) -> list[float]:
    return [
        math.prod(float(factors[k].values[place]) ** power for k, power in powers)
        for place in range(sizes)
    ]


def _fits(wanted: Sequence[float], values: Sequence[float], tolerance: float) -> bool:
    return all(
        abs(one - value) <= tolerance * abs(value)
        for one, value in zip(wanted, values, strict=True)
    )


def _text(factors: tuple[Factor, ...], powers: Powers) -> str:
    above = [factors[k].text for k, power in powers if power > 0]
    below = [factors[k].text for k, power in powers if power < 0]
    top = " x ".join(above) or "1"
    if not below:
        return top
    return f"{top}/{below[0]}" if len(below) == 1 else f"{top}/({' x '.join(below)})"
