"""Some steps of a topology, on one process and on ranks, so that they can be compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atoll.collectives.base import Collectives
from atoll.pools import clip
from atoll.pools.engine import Engine, Told
from atoll.pools.gradcheck.outcome import ALL, Outcome
from atoll.pools.lanes import Lanes
from atoll.pools.placement import Placement
from atoll.pools.plan import Plan
from atoll.pools.reference import Reference
from atoll.pools.topology import Topology

LEARNING_RATE = 1e-2  # of the AdamW between two steps, so that the second sees moved weights


@dataclass(frozen=True, slots=True)
class Left:
    """What one rank has after a step: gradients of its own parameters, [lanes, ...], by name."""

    grads: Mapping[str, Tensor]
    told: Told
    norm: float


def optimizer(parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """The same on both sides."""
    return torch.optim.AdamW(parameters.values(), lr=LEARNING_RATE)


def reference(top: Topology, weights: Mapping[str, Tensor], *, steps: int) -> list[Outcome]:
    """What one process leaves after each step: all terms, and each alone."""
    found: list[Outcome] = []
    one = Reference(top, weights)
    trained = one.trained()
    stepping = optimizer(trained)
    coeffs = {term.name: term.coeff for term in top.of_kind("term")}
    for step in range(steps):
        terms = one.step(step)
        losses = {name: coeffs[name] * term.loss() for name, term in terms.items()}
        lanes = {ALL: torch.stack(list(losses.values())).sum(), **losses}
        grads = {lane: one.grads(loss) for lane, loss in lanes.items()}
        for name, parameter in trained.items():
            parameter.grad = grads[ALL].get(name, torch.zeros_like(parameter)).clone()
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in trained.values() if p.grad is not None]
        )
        found.append(
            Outcome(
                grads=grads,
                losses={name: float(loss.detach()) for name, loss in losses.items()},
                counts={name: term.count for name, term in terms.items()},
                clip_norm=float(norm),
            )
        )
        stepping.step()
    return found


def on_rank(
    plan: Plan,
    groups: Mapping[str, Collectives],
    weights: Mapping[str, Tensor],
    *,
    rank: int,
    steps: int,
) -> list[Left]:
    """What one rank leaves after each step; called by all ranks of the world."""
    engine = Engine(plan, groups, weights, rank=rank)
    own = engine.owned()
    stepping = optimizer(own) if own else None
    lanes = Lanes.each_alone({term.name: term.coeff for term in plan.top.of_kind("term")})
    found: list[Left] = []
    for step in range(steps):
        told = engine.step(step, lanes)
        grads = {name: engine.desk.param_grads[name].clone() for name in own}
        found.append(Left(grads, told, clip.grad_norm(engine)))
        if stepping is not None:
            stepping.step()
    return found


def joined(placement: Placement, left: Sequence[Sequence[Left]]) -> list[Outcome]:
    """The outcome of each step, from what every rank has; of replicas the first one's gradients."""
    lanes = [ALL, *(term.name for term in placement.top.of_kind("term"))]
    found: list[Outcome] = []
    for step in range(len(left[0])):
        whole: dict[str, Tensor] = {}
        differing: dict[str, None] = {}
        for ranks in left:
            for name, grads in ranks[step].grads.items():
                if name in whole and not _same(whole[name], grads):
                    differing[name] = None
                whole.setdefault(name, grads)
        first = left[0][step]
        found.append(
            Outcome(
                grads={
                    lane: {name: grads[at] for name, grads in whole.items()}
                    for at, lane in enumerate(lanes)
                },
                losses=first.told.losses,
                counts=first.told.counts,
                clip_norm=first.norm,
                differing=tuple(differing),
            )
        )
    return found


def _same(one: Tensor, other: Tensor) -> bool:
    """To the bit, NaN and the sign of zero too."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
