"""Several sets of coefficients in one pass: all terms, and each alone with the others at zero.

A gradient has a leading dimension of lanes everywhere: [lanes, *shape]. Training has one lane.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALL = "all"


@dataclass(frozen=True, slots=True)
class Lanes:
    """Coefficients of each term in each lane; a term that is not named has 0."""

    coeffs: Mapping[str, Mapping[str, float]]  # lane -> term -> coefficient

    @classmethod
    def training(cls, terms: Mapping[str, float]) -> "Lanes":
        """One lane, with every term at its coefficient."""
        return cls({ALL: dict(terms)})

    @classmethod
    def each_alone(cls, terms: Mapping[str, float]) -> "Lanes":
        """All terms, then each by itself, the others at coefficient 0 and not left out."""
        return cls({ALL: dict(terms), **{term: {term: coeff} for term, coeff in terms.items()}})

    @property
    def names(self) -> Sequence[str]:
        return list(self.coeffs)

    def __len__(self) -> int:
        return len(self.coeffs)

    def of(self, term: str) -> Tensor:
        """A term's coefficient in each lane, [lanes], in float64."""
        found = [lane.get(term, 0.0) for lane in self.coeffs.values()]
        return torch.tensor(found, dtype=torch.float64)


def spread(scales: Tensor, gradient: Tensor) -> Tensor:
    """`scales[l] * gradient` for every lane, [lanes, *shape]; one rounding."""
    shape = (-1, *[1] * gradient.dim())
    return scales.to(gradient.dtype).view(shape) * gradient
