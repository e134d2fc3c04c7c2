"""Gather with a peer that does not come: right for the rows that arrived.

Each rank is a peer, and the last one's contribution is missing. Its rows count for nothing in the
term, so the reference is the mean over the tokens of the others. Displacements have as many values
as the sparse codec keeps, all of one size, so that it loses nothing and nobody is clipped.
"""

import hashlib

import torch
from torch import Tensor, nn

from atoll.pools.counted import Counted
from atoll.pools.loop import Loop
from atoll.strategies import outer, registry
from atoll.strategies.gather.local import Fetched
from examples.gradcheck.strategies import run

ROWS, PEERS = 12, 3
EACH = ROWS // PEERS
ARRIVED = ROWS - EACH
VALUES, KEPT = 512, 8  # one of 64 is sent
RATE = 0.5
loop = Loop(rows=ROWS, ranks=(PEERS,), dtype=torch.float32)


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(VALUES))


loop.model(Weights)


@loop.rows
def batch(index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which peer's rows they are, how many tokens each has, and whether it arrives."""
    return index // EACH, 1 + index**2 % 5, index < ARRIVED


def summed(model: nn.Module, rows: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Each token pulls the kept places up or down, as its peer would have them."""
    peer, tokens, _ = rows
    signs = 1.0 - 2.0 * ((torch.arange(KEPT) // (1 + peer[:, None])) % 2)
    values = model.get_parameter("values")[:: VALUES // KEPT]
    return (tokens[:, None] * signs * values).sum(-1)


@loop.term()
def pull(model: nn.Module, rows: tuple[Tensor, Tensor, Tensor]) -> Counted:
    _, tokens, arrives = rows
    return Counted(summed(model, rows)[arrives].sum(), int(tokens[arrives].sum()), "tokens")


@loop.step
def step(
    model: nn.Module, rows: tuple[Tensor, Tensor, Tensor], coeffs: dict[str, float]
) -> dict[str, object]:
    layout = run.layout_of(model)
    manifest = run.manifest_of(
        layout,
        strategy="gather",
        sync_every=1,
        weighting="tokens",
        outer={"optimizer": "sgd", "lr": 1.0},
        upload={"codec": "topk"},
        download={"codec": "fp32"},
        gather={"buckets": {"main": {"url": "memory:"}}},
    )
    strategy, codec = registry.of(manifest), manifest.upload.build()
    base, tokens = run.flat(model), int(rows[1].sum())
    (coeffs["pull"] * summed(model, rows).sum() / tokens).backward()
    moved = model.get_parameter("values").grad
    assert moved is not None
    payloads = run.gathered(codec.encode(RATE * moved, noise=None, first_group=0))
    weights = [int(one) for one in run.gathered(torch.tensor(strategy.weight(tokens=tokens)))]
    arrived = list(zip(payloads, weights, strict=True))[: PEERS - 1]
    sources = [_fetched(payload, weight) for payload, weight in arrived]
    made = strategy.outer(1, 0).prepared(layout, sources)
    download = manifest.download.build()
    state = outer.fresh_state(layout, base.clone(), optimizer=made.optimizer, download=download)
    made.apply(state, sources, None)
    run.take(model, state.master, layout)
    run.leave(model, (base - state.master) / RATE, layout)
    return {"counts": {"pull": sum(weight for _, weight in arrived)}}


def _fetched(payload: Tensor, weight: int) -> Fetched:
    data = payload.numpy().tobytes()
    name = hashlib.sha256(data).hexdigest()
    return Fetched(name, weight, 0, lambda start, nbytes: data[start : start + nbytes])
