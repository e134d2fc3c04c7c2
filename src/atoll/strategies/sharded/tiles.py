"""The part of a step that an owner does on its own shard, a tile at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from atoll.collectives import schedule
from atoll.layout import Span
from atoll.strategies.sharded.shard import TILE_ELEMENTS, Section, Shard

CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_
STATE: tuple[Section, ...] = ("weights", "sums", "first_moments", "second_moments")


@dataclass(frozen=True, slots=True)
class Tile:
    """Elements of the shard that are stepped at once, of trained tensors of one kind."""

    span: Span  # of a section
    decays: bool


def of(shard: Shard, trains: Callable[[str], bool]) -> list[Tile]:
    """The shard's trained elements: matrices decay, vectors do not, frozen tensors are left out."""
    kinds = [
        (span, len(tensor.shape) >= 2, trains(tensor.name))
        for unit in shard.units.units
        for tensor, span in shard.pieces(unit.number)
    ]
    tiles = []
    for (decays, does_train), group in groupby(kinds, key=lambda kind: kind[1:]):
        spans = [span for span, _, _ in group]
        if does_train:
            whole = Span(spans[0].start, spans[-1].stop)
            tiles += [Tile(s, decays) for s in schedule.chunks(whole, TILE_ELEMENTS)]
    return tiles


def to_mean(shard: Shard, tiles: Sequence[Tile], tokens: int) -> Tensor:
    """Makes the sums the mean, by the only division there is; the squares of it, [1] in float64."""
    squares = torch.zeros(1, dtype=torch.float64)
    for tile in tiles:
        mean = shard.view("sums", tile.span).div_(float(tokens))
        squares += mean.to(torch.float64, copy=True).square_().sum()
        shard.release("sums", tile.span)
    return squares


def clipping(norm: float, clip: float) -> float:
    """What the mean gradient is multiplied by."""
    return min(1.0, clip / (norm + CLIP_EPS)) if clip else 1.0


def update(
    shard: Shard,
    tiles: Sequence[Tile],
    scale: float,
    rule: Callable[[tuple[Tensor, ...], bool], None],
) -> None:
    """Steps every tile by `rule(state, decays)`, with its gradient times `scale`."""
    for tile in tiles:
        state = tuple(shard.view(section, tile.span) for section in STATE)
        if scale != 1.0:
            state[STATE.index("sums")].mul_(scale)
        rule(state, tile.decays)
        for section in STATE:
            shard.release(section, tile.span)
