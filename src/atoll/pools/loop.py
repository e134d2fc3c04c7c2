"""A training step of one's own, declared beside the terms that it should be the gradient of.

Owns the declaration and what may stand in it. The terms are written once: called on all rows they
are the reference, whatever the step does with groups of ranks.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from atoll.errors import ConfigError
from atoll.pools.counted import Counted, Through

F = TypeVar("F", bound=Callable[..., Any])
Part = Counted | Through
TOLERANCES = {torch.float64: 1e-12, torch.float32: 4e-7}  # of ratio and error, in one step
RESERVED = "all"


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of the loss: `call(model, rows)` over whatever rows it is given."""

    name: str
    coeff: float
    call: Callable[[nn.Module, Any], Part]


@dataclass(frozen=True, slots=True)
class Parts:
    """All functions of a loop that is declared whole."""

    model: Callable[[], nn.Module]
    rows: Callable[[Tensor], Any]
    terms: Mapping[str, Term]
    step: Callable[[nn.Module, Any, dict[str, float]], Any]


class Loop:
    """`rows` are those of one step; rank k of N gets those from k*rows//N to (k+1)*rows//N.

    `step(model, rows, coeffs)` runs on every rank of the default process group (gloo), with the
    same weights: it leaves gradients in `model`, unclipped, and may return a dict of what it logs:
    `loss` (of all terms), `losses` and `counts` (by term), `clip_norm`. Terms that `coeffs` has at
    0 are computed too, not left out.
    """

    def __init__(
        self,
        *,
        rows: int,
        ranks: Sequence[int] = (2, 3),
        dtype: torch.dtype = torch.float64,
    ) -> None:
        if dtype not in TOLERANCES:
            raise ConfigError(
                f"dtype={dtype} is not one of {[*TOLERANCES]}; float64 is the default"
            )
        self.num_rows = rows
        self.dtype = dtype
        self.ranks = tuple(ranks)
        check_ranks(self.ranks, rows)
        self._terms: dict[str, Term] = {}
        self._calls: dict[str, Callable[..., Any]] = {}

    def model(self, call: F) -> F:
        """`call()` makes the model; its weights are made once and given to every rank."""
        return self._declare("model", call)

    def rows(self, call: F) -> F:
        """`call(index)` gives the rows of these global numbers, [n] int64; only they count."""
        return self._declare("rows", call)

    def step(self, call: F) -> F:
        """`call(model, rows, coeffs)` is the step to be checked."""
        return self._declare("step", call)

    def term(self, *, coeff: float = 1.0) -> Callable[[F], F]:
        """`call(model, rows)` gives a Counted, or a Through, over these rows."""
        if not math.isfinite(coeff) or coeff == 0:
            raise ConfigError(f"coeff={coeff!r} must be finite and not 0, or nothing is observed")

        def declare(call: F) -> F:
            name = call.__name__
            if name == RESERVED or name in self._terms:
                raise ConfigError(
                    f"term {name!r} is declared twice, or has the name of all terms together; "
                    f"each needs a name of its own other than {RESERVED!r}"
                )
            self._terms[name] = Term(name, coeff, call)
            return call

        return declare

    @property
    def coeffs(self) -> dict[str, float]:
        """By term."""
        return {name: term.coeff for name, term in self._terms.items()}

    @property
    def written_in(self) -> str | None:
        """The module of its step, as far as it has one."""
        step = self._calls.get("step")
        return None if step is None else getattr(step, "__module__", None)

    def whole(self) -> Parts:
        """All of its functions; ConfigError names what is not declared."""
        missing = [what for what in ("model", "rows", "step") if what not in self._calls]
        missing += [] if self._terms else ["term"]
        if missing:
            raise ConfigError(
                f"a Loop lacks {', '.join('@loop.' + what for what in missing)}; it needs a model, "
                f"rows, a step and one term at least"
            )
        calls = self._calls
        return Parts(calls["model"], calls["rows"], dict(self._terms), calls["step"])

    def _declare(self, what: str, call: F) -> F:
        if what in self._calls:
            raise ConfigError(f"@loop.{what} stands twice; a Loop has one")
        self._calls[what] = call
        return call


def check_ranks(ranks: Sequence[int], rows: int) -> None:
    """Refuses numbers of ranks that the rows cannot be given to."""
    alike = len(set(ranks)) != len(ranks) or not ranks
    if alike or any(not 1 <= one <= rows for one in ranks):
        raise ConfigError(
            f"ranks={tuple(ranks)} with rows={rows}: give different numbers of ranks, each from 1 "
            f"to the number of rows"
        )


def rows_of(rank: int, *, ranks: int, rows: int) -> Tensor:
    """The global numbers of a rank's rows; more or fewer where `ranks` does not divide `rows`."""
    return torch.arange(rank * rows // ranks, (rank + 1) * rows // ranks)
