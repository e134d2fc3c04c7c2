"""Whether a decomposition found anything: the target with every site masked by its gates alone.

Gates that say which components matter do better than the same gates given to other components.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from examples.decomposition import (
    SITES,
    C,
    CausalImportance,
    Components,
    inputs,
    kl,
    lower,
    masked,
    positions,
    target,
)
from examples.frozen_target import Rows, T, V, table

PERMUTATIONS = 20


@dataclass(frozen=True, slots=True)
class Found:
    """Divergences from the target, nats per position, of rows that nobody trained on."""

    own: float
    permuted: tuple[float, ...]  # the same gates, each site's over its components in another order
    open: float  # all gates at 1
    mean_gate: float


def held_out_rows(count: int) -> Rows:
    """Rows of full length; every draw of training is of another stream."""
    tokens = torch.from_numpy((table("held-out", count, T) + 0.5) * V).long()
    return tokens, torch.ones(count, T, dtype=torch.bool)


@torch.no_grad()
def reconstruct(
    importance: CausalImportance, components: Mapping[str, Components], *, rows: Rows
) -> Found:
    """How near the masked sites, all at once, come to the target."""
    gates = {site: lower(gate) for site, gate in importance(inputs(rows)).items()}

    def apart(masks: Mapping[str, Tensor]) -> float:
        nothing = torch.zeros(*rows[0].shape, 1)  # of what no component has
        pairs = {s: (components[s], torch.cat([masks[s], nothing], -1)) for s in SITES}
        return float(kl(target(rows), masked(rows, pairs), rows)) / positions(rows)

    def permuted(number: int) -> dict[str, Tensor]:
        return {site: gate[..., _order(f"{number} {site}")] for site, gate in gates.items()}

    return Found(
        own=apart(gates),
        permuted=tuple(apart(permuted(number)) for number in range(PERMUTATIONS)),
        open=apart({site: torch.ones_like(gate) for site, gate in gates.items()}),
        mean_gate=float(torch.stack([gate[rows[1]].mean() for gate in gates.values()]).mean()),
    )


def _order(name: str) -> Tensor:
    return torch.from_numpy(table(f"order {name}", C).argsort())
