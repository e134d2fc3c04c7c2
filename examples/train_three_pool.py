"""Trains the three-pool decomposition and says what its gates are worth on held-out rows.

python -m examples.train_three_pool [--steps 50] [--json]
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from atoll.pools import Topology, made
from atoll.pools.reference import Reference
from examples.decomposition import SITES, CausalImportance, Components
from examples.reconstruction import Found, held_out_rows, reconstruct
from examples.three_pool import top

RATES = {"importance": 2.5e-3, "components": 2e-2}  # of AdamW; found by trial, in float64
HELD_OUT_ROWS = 48
ENDS = 10  # steps that are compared at both ends


class Training(Protocol):
    """Whoever makes the steps, on however many ranks."""

    def step(self) -> Mapping[str, float]:
        """Makes a step; each term's loss, with its coefficient, as it was before."""

    def weights(self) -> Mapping[str, Tensor]:
        """All parameters by name, such as `importance.first` or `components[SITE].V`."""


class OneProcess:
    """Everything here."""

    def __init__(self, top: Topology) -> None:
        self._reference = Reference(top, made.initial(top))
        self._coeffs = {term.name: term.coeff for term in top.of_kind("term")}
        self._optimizer = optimizer(self._reference.trained().items())
        self._steps = 0

    def step(self) -> Mapping[str, float]:
        terms = self._reference.step(self._steps)
        losses = {name: self._coeffs[name] * term.loss() for name, term in terms.items()}
        self._optimizer.zero_grad()
        torch.stack(list(losses.values())).sum().backward()
        self._optimizer.step()
        self._steps += 1
        return {name: loss.item() for name, loss in losses.items()}

    def weights(self) -> Mapping[str, Tensor]:
        return made.weights(self._reference.modules)


def optimizer(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """AdamW for some of the parameters, by name; a rank has those that it owns."""
    groups = [
        {"params": [one], "lr": RATES[name.replace("[", ".").split(".")[0]]}
        for name, one in parameters
    ]
    return torch.optim.AdamW(groups)


def begin() -> Training:
    """The one place that knows where the steps are made."""
    return OneProcess(top)


def modules(weights: Mapping[str, Tensor]) -> tuple[CausalImportance, dict[str, Components]]:
    """The trained modules."""

    def filled(module: nn.Module, prefix: str) -> None:
        module.load_state_dict({name: weights[f"{prefix}.{name}"] for name in module.state_dict()})

    importance, components = CausalImportance(SITES), {site: Components(site) for site in SITES}
    filled(importance, "importance")
    for site, module in components.items():
        filled(module, f"components[{site}]")
    return importance, components


def train(training: Training, *, steps: int) -> tuple[list[Mapping[str, float]], Found]:
    """The losses of every step, and what was found after the last."""
    losses = []
    for step in range(steps):
        losses.append(training.step())
        if step % ENDS == ENDS - 1:
            told = "  ".join(f"{name} {loss:.4f}" for name, loss in losses[-1].items())
            print(f"step {step + 1}: {told}", file=sys.stderr)
    importance, components = modules(training.weights())
    return losses, reconstruct(importance, components, rows=held_out_rows(HELD_OUT_ROWS))


def ends(losses: list[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Each term's mean loss over the first and the last steps."""

    def mean(term: str, some: list[Mapping[str, float]]) -> float:
        return sum(step[term] for step in some) / len(some)

    return {
        term: {"first": mean(term, losses[:ENDS]), "last": mean(term, losses[-ENDS:])}
        for term in losses[0]
    }


def tell(found: dict[str, Any]) -> None:
    """A table for people."""
    for term, loss in found["losses"].items():
        print(f"{term:10} {loss['first']:8.4f} -> {loss['last']:.4f}")
    held = found["held_out"]
    print(f"held-out divergence by the gates {held['own']:.3f}, all open {held['open']:.3f}")
    mean, best = sum(held["permuted"]) / len(held["permuted"]), min(held["permuted"])
    print(f"  permuted {mean:.3f} (best of {len(held['permuted'])}: {best:.3f})")
    print(f"mean gate {held['mean_gate']:.3f}")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=50)
    arguments.add_argument("--json", action="store_true")
    given = arguments.parse_args()
    torch.set_default_dtype(torch.float64)
    losses, held_out = train(begin(), steps=given.steps)
    found = {"steps": given.steps, "losses": ends(losses), "held_out": asdict(held_out)}
    if given.json:
        print(json.dumps(found))
    else:
        tell(found)


if __name__ == "__main__":
    main()
