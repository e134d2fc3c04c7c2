"""Losses of a parameter decomposition: sites as sums of rank-one components, gated by position.

Every function takes the rows it is given and returns sums over their kept positions, so what comes
of several slices of rows adds up to what comes of all of them. None knows how many slices there
are. What is frozen is `examples.frozen_target`'s.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.frozen_target import (
    SITES,
    Instead,
    Rows,
    T,
    V,
    inputs,
    run,
    table,
    target,
    weight,
    width_in,
)

__all__ = [
    "SITES",
    "C",
    "CausalImportance",
    "Components",
    "T",
    "V",
    "ascend",
    "first_sources",
    "inputs",
    "kl",
    "lower",
    "masked",
    "masks",
    "mixed",
    "positions",
    "target",
    "upper",
    "weight",
]

C = 12  # components of a site
LEAK = 0.01  # of a gate's gradient beyond the end it is hard at
POWER, SMOOTH = 0.9, 1e-3  # of the importance: (gate + SMOOTH) ** POWER
HIDDEN = 32
REACH = 0.625  # of the part of a site that its components begin with
WARM_UP = 2
RATE, BETAS, EPSILON = 0.1, (0.5, 0.99), 1e-8  # of the adversary's Adam


def parameter(values: np.ndarray) -> nn.Parameter:
    return nn.Parameter(torch.from_numpy(values.astype(np.float32)).to(torch.get_default_dtype()))


class Components(nn.Module):
    """A site as V [in, C] times U [C, out]; a component is a column of V with its row of U."""

    def __init__(self, site: str) -> None:
        super().__init__()
        # Exact in float64, in any order: the target's weights have few bits, the table 24.
        whole = weight(site).double().numpy()  # [in, out]
        wide, out = whole.shape
        if wide <= out:
            reads = table(f"{site} reads", wide, C) * REACH
            self.V, self.U = parameter(reads), parameter(reads.T @ whole)
        else:
            writes = table(f"{site} writes", C, out) * REACH
            self.V, self.U = parameter(whole @ writes.T), parameter(writes)


class Fixed(NamedTuple):
    """The same without a gradient."""

    V: Tensor
    U: Tensor


class CausalImportance(nn.Module):
    """Gates of all sites, {site: [n, T, C]}, from what all sites read at a position."""

    def __init__(self, sites: Sequence[str]) -> None:
        super().__init__()
        self.sites = tuple(sites)
        wide = sum(width_in(site) for site in sites)
        self.first = parameter(table("first", HIDDEN, wide) * 2 / wide**0.5)
        self.second = parameter(table("second", len(sites) * C, HIDDEN) * 2 / HIDDEN**0.5)
        self.level = parameter(np.full(len(sites) * C, 0.5))

    def forward(self, read: Mapping[str, Tensor]) -> dict[str, Tensor]:
        scaled = [F.rms_norm(read[site], read[site].shape[-1:]) for site in self.sites]
        hidden = F.gelu(F.linear(torch.cat(scaled, -1), self.first))
        gates = F.linear(hidden, self.second, self.level).split(C, -1)
        return dict(zip(self.sites, gates, strict=True))


def lower(gates: Tensor) -> Tensor:
    """Gates cut to [0, 1], with a small gradient below 0 so that none is closed for good."""
    leak = LEAK * gates.clamp(max=0)
    return gates.clamp(0, 1) + (leak - leak.detach())


def upper(gates: Mapping[str, Tensor], rows: Rows) -> Tensor:
    """How much each component is used, [sites, C]: powers of its gates over the kept positions.

    The gates are cut at 0 and leak above 1, so that an open one is still drawn down.
    """
    stacked = torch.stack([gates[site] for site in SITES])  # [sites, n, T, C]
    used = stacked.clamp(0, 1) + LEAK * (stacked - 1).clamp(min=0)
    kept = rows[1][:, :, None].to(used.dtype)
    powers: Tensor = (used + SMOOTH) ** POWER - SMOOTH**POWER
    return (powers * kept).sum((1, 2))


def mixed(gates: Tensor, noise: Tensor) -> Tensor:
    """Masks [n, T, C + 1] anywhere between gate and 1; the last is of what no component has."""
    gate = lower(gates)
    return torch.cat([gate + (1 - gate) * noise[..., :C], noise[..., C:]], -1)


def masked(rows: Rows, replaced: Mapping[str, tuple[Components | Fixed, Tensor]]) -> Tensor:
    """Logits of the target with masked components in the place of some sites."""

    def standing(site: str) -> Instead:
        components, mask = replaced[site]
        share, rest = mask[..., :C], mask[..., C:]

        def apply(x: Tensor) -> Tensor:
            # (x V * share) U + rest * x (W - V U), with one way to V and U, where two would cancel.
            parts = ((x @ components.V) * (share - rest)) @ components.U
            return parts + rest * (x @ weight(site))

        return apply

    return run(rows, {site: standing(site) for site in replaced})


def kl(wanted: Tensor, logits: Tensor, rows: Rows) -> Tensor:
    """Divergence of the logits from the wanted log-probabilities, summed over kept positions."""
    apart = (wanted.exp() * (wanted - logits.log_softmax(-1))).sum(-1)  # [n, T]
    return (apart * rows[1].to(apart.dtype)).sum()


def positions(rows: Rows) -> int:
    """The kept positions."""
    return int(rows[1].sum())


def first_sources(uniform: Tensor) -> Tensor:
    """An adversary's state by row, [n, 4, sites, T, C + 1], that begins at these sources.

    Four planes: the sources, Adam's two moments, and its steps so far. All of it is a row's own.
    """
    nothing = torch.zeros_like(uniform)
    return torch.stack([uniform, nothing, nothing, nothing], 1)


def masks(gates: Mapping[str, Tensor], state: Tensor) -> dict[str, Tensor]:
    """The adversary's masks of every site."""
    return {site: mixed(gates[site], state[:, 0, place]) for place, site in enumerate(SITES)}


def ascend(
    state: Tensor, components: Mapping[str, Components], gates: Mapping[str, Tensor], rows: Rows
) -> Tensor:
    """The adversary's state after it has climbed, row by row, towards the worst masks in [0, 1].

    It steps on the gradient of the sum. A mean over the rows at hand would let Adam's epsilon see
    how many there are, and so how the rows are shared out.
    """
    fixed = {
        site: Fixed(components[site].V.detach(), components[site].U.detach()) for site in SITES
    }
    gates = {site: gate.detach() for site, gate in gates.items()}
    wanted = target(rows)
    state = state.detach()
    for _ in range(WARM_UP + 1):
        with torch.enable_grad():
            state.requires_grad_()
            found = masks(gates, state)
            logits = masked(rows, {site: (fixed[site], found[site]) for site in SITES})
            (gradient,) = torch.autograd.grad(kl(wanted, logits, rows), state)
        state = _climbed(state.detach(), gradient[:, 0])
    return state


def _climbed(state: Tensor, gradient: Tensor) -> Tensor:
    """One step of Adam upwards, cut to [0, 1]."""
    source, mean, square, steps = state.unbind(1)
    steps = steps + 1
    mean = BETAS[0] * mean + (1 - BETAS[0]) * gradient
    square = BETAS[1] * square + (1 - BETAS[1]) * gradient.square()
    size = (square / (1 - BETAS[1] ** steps)).sqrt() + EPSILON
    source = source + RATE * mean / (1 - BETAS[0] ** steps) / size
    return torch.stack([source.clamp(0, 1), mean, square, steps], 1)
