"""Gradients and logged numbers of the ranks against those of the reference, pair by pair.

With g of the ranks and r of the reference: ratio <g,r>/<r,r>, error |g-r|/|r|, cosine, and the
residual |g - ratio r|/|r|, which is 0 where g is r times a scale. All in float64.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from atoll.errors import ConfigError
from atoll.pools.gradcheck.outcome import ALL, Outcome

UNOBSERVED = 1e-8  # of the tensor's whole gradient: below it a wrong scale would not be seen

State = Literal["right", "wrong", "unobserved", "apart", "leak"]
Kind = Literal["loss", "count", "clip norm"]
FAILS: frozenset[State] = frozenset({"wrong", "unobserved", "leak"})


@dataclass(frozen=True, slots=True)
class Pair:
    """One term on one tensor.

    `apart`: not connected in the reference and exactly 0 in the ranks; `leak`: not connected, but
    not 0; `unobserved`: the reference's gradient is too small beside the tensor's whole one to
    tell. These have no ratio and no cosine, nor has a gradient with NaN or infinity.
    """

    term: str  # the lane; `outcome.ALL` for all terms together
    tensor: str
    ratio: float | None
    error: float
    cosine: float | None
    state: State
    residual: float = 0.0

    @property
    def is_wrong(self) -> bool:
        return self.state in FAILS


@dataclass(frozen=True, slots=True)
class Logged:
    """A number that the ranks logged, beside the reference's."""

    kind: Kind
    term: str  # empty for the clip norm
    wanted: float
    found: float
    is_wrong: bool

    @property
    def ratio(self) -> float | None:
        """`found / wanted`; None where that says nothing."""
        usable = self.wanted != 0 and math.isfinite(self.found)
        return self.found / self.wanted if usable else None


def compare(reference: Outcome, found: Outcome, *, tolerance: float) -> list[Pair]:
    """Every lane and tensor that either side has, in the order of the reference.

    A pair is right where ratio and error are within `tolerance` of 1 and 0.
    """
    missing = sorted(reference.grads.keys() ^ found.grads.keys())
    if missing:
        raise ConfigError(
            f"lanes {missing} have gradients on one side only; the ranks run every lane of the "
            f"reference and no other"
        )
    whole = {name: _norm(one) for name, one in reference.grads.get(ALL, {}).items()}
    return [
        _pair(lane, name, wanted.get(name), found.grads[lane].get(name), whole, tolerance)
        for lane, wanted in reference.grads.items()
        for name in _names(reference, found)
    ]


def compare_logged(reference: Outcome, found: Outcome, *, tolerance: float) -> list[Logged]:
    """Losses, counts and the clip norm, as far as the ranks logged them."""
    return [
        *_numbers("loss", reference.losses, found.losses, tolerance),
        *_numbers("count", reference.counts, found.counts, 0.0),
        *_numbers("clip norm", _of(reference.clip_norm), _of(found.clip_norm), tolerance),
    ]


def _names(reference: Outcome, found: Outcome) -> list[str]:
    lanes = [*reference.grads.values(), *found.grads.values()]
    return list(dict.fromkeys(name for lane in lanes for name in lane))


def _pair(
    lane: str,
    name: str,
    wanted: Tensor | None,
    found: Tensor | None,
    whole: Mapping[str, float],
    tolerance: float,
) -> Pair:
    if wanted is None:
        size = 0.0 if found is None else _norm(found)
        return Pair(lane, name, None, size, None, "apart" if size == 0 else "leak")
    found = torch.zeros_like(wanted) if found is None else found
    if found.shape != wanted.shape:
        raise ConfigError(
            f"gradient of {name!r} has shape {tuple(found.shape)} in the ranks and "
            f"{tuple(wanted.shape)} in the reference; make sharded ones whole before comparing"
        )
    size = _norm(wanted)
    if not math.isfinite(size):
        raise ConfigError(
            f"gradient of {name!r} in lane {lane!r} of the reference has norm {size}; the check "
            f"needs rows and weights at which it is finite"
        )
    if size == 0 or size < UNOBSERVED * whole.get(name, 0.0):
        return Pair(lane, name, None, 0.0, None, "unobserved")
    return _measured(lane, name, wanted, found, tolerance)


def _measured(lane: str, name: str, wanted: Tensor, found: Tensor, tolerance: float) -> Pair:
    scale = wanted.double().abs().max()  # so that squares of tiny gradients do not vanish
    r = (wanted.double() / scale).flatten()
    g = (found.double() / scale).flatten()
    if not torch.isfinite(g).all():
        return Pair(lane, name, None, math.inf, None, "wrong", math.inf)
    rr, gg = float(r.dot(r)), float(g.dot(g))
    ratio = float(g.dot(r)) / rr
    error = float((g - r).norm()) / math.sqrt(rr)
    residual = float((g - ratio * r).norm()) / math.sqrt(rr)
    cosine = ratio * math.sqrt(rr / gg) if gg > 0 else 0.0
    is_right = abs(ratio - 1) <= tolerance and error <= tolerance
    return Pair(lane, name, ratio, error, cosine, "right" if is_right else "wrong", residual)


def _norm(values: Tensor) -> float:
    """The 2-norm in float64, also of values whose squares would vanish."""
    flat = values.double().flatten()
    largest = float(flat.abs().max()) if len(flat) else 0.0
    if largest == 0 or not math.isfinite(largest):
        return largest
    return largest * float((flat / largest).norm())


def _of(clip_norm: float | None) -> dict[str, float]:
    return {} if clip_norm is None else {"": clip_norm}


def _numbers(
    kind: Kind, wanted: Mapping[str, float], found: Mapping[str, float], tolerance: float
) -> Iterator[Logged]:
    unknown = sorted(found.keys() - wanted.keys())
    if unknown:
        raise ConfigError(
            f"the ranks logged the {kind} of {unknown}, which the reference does not have; it has "
            f"{sorted(wanted)}"
        )
    for term, value in found.items():
        bound = tolerance * abs(wanted[term])
        # Written so that NaN is wrong.
        yield Logged(kind, term, wanted[term], value, not abs(value - wanted[term]) <= bound)
