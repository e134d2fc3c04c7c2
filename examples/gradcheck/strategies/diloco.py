"""DiLoCo with one inner step of SGD and token weights: displacement / rate is the gradient.

Each rank is an island: it steps on the mean of its own tokens and hands its displacement in; the
outer step weighs them by their tokens. All numbers are small multiples of powers of two, so that
fp32, in which displacements travel, rounds the last division alone.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atoll.codecs.base import Codec
from atoll.island import inner_optimizer
from atoll.layout import Span
from atoll.pools.counted import Counted
from atoll.pools.loop import Loop
from atoll.strategies import outer, registry
from examples.gradcheck.strategies import run

TOKENS = (1, 2, 4, 1, 5, 3, 6, 2, 1, 1, 1, 5)  # of each row: 8, 16 and 8 on three ranks
RATE = 0.5
loop = Loop(rows=len(TOKENS), ranks=(2, 3), dtype=torch.float32)


@loop.model
def model() -> nn.Module:
    made = nn.Linear(5, 3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_((torch.arange(parameter.numel()) % 7 - 3).view_as(parameter) / 4)
    return made


@loop.rows
def batch(index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    place = torch.arange(6)
    x = (index[:, None, None] * 3 + place[:, None] * 5 + torch.arange(5)) % 7 - 3
    y = (index[:, None, None] + place[:, None] * 2 + torch.arange(3)) % 5 - 2
    return x.float(), y.float(), place < torch.tensor(TOKENS)[index][:, None]


def squares(model: nn.Module, rows: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, int]:
    x, y, kept = rows
    return (model(x) - y)[kept].square().sum() / 2, int(kept.sum())


@loop.term()
def fit(model: nn.Module, rows: tuple[Tensor, Tensor, Tensor]) -> Counted:
    return Counted(*squares(model, rows), "tokens")


@dataclass(frozen=True)
class Contribution:
    """What an island hands in, as the outer step reads it."""

    payload: Tensor
    weight: int
    codec: Codec
    factor: float = 1.0

    def raw(self, span: Span) -> Tensor:
        start, stop = (self.codec.encoded_bytes(place) for place in (span.start, span.stop))
        return self.payload[start:stop]

    def tile(self, span: Span) -> Tensor:
        return self.codec.decode(self.raw(span), len(span))


@loop.step
def step(
    model: nn.Module, rows: tuple[Tensor, Tensor, Tensor], coeffs: dict[str, float]
) -> dict[str, object]:
    layout = run.layout_of(model)
    manifest = run.manifest_of(
        layout,
        sync_every=1,
        weighting="tokens",
        inner={"optimizer": "sgd", "lr": RATE, "weight_decay": 0.0, "clip": 0.0},
        outer={"optimizer": "sgd", "lr": 1.0},
        upload={"codec": "fp32"},
    )
    strategy, codec = registry.of(manifest), manifest.upload.build()
    base = run.flat(model)
    total, count = squares(model, rows)
    (coeffs["fit"] * total / count).backward()
    inner_optimizer.build_optimizer(model, manifest.inner).step()
    own = codec.encode(outer.displacement(base, run.flat(model)), noise=None, first_group=0)
    weights = [int(one) for one in run.gathered(torch.tensor(strategy.weight(tokens=count)))]
    sources = [
        Contribution(payload, weight, codec)
        for payload, weight in zip(run.gathered(own), weights, strict=True)
    ]
    made = strategy.outer(1, 0).prepared(layout, sources)
    download = manifest.download.build()
    state = outer.fresh_state(layout, base.clone(), optimizer=made.optimizer, download=download)
    made.apply(state, sources, None)
    run.take(model, state.master, layout)
    run.leave(model, (base - state.master) / RATE, layout)
    return {"counts": {"fit": sum(weights)}}
