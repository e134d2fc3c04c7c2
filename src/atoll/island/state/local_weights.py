"""Where the weights that an island trains live: views of one flat buffer, or shards over ranks."""

from typing import Protocol

import torch
from torch import Tensor, nn

from atoll.island.ranks import buffers, combine
from atoll.island.ranks.group import Group
from atoll.layout import Layout, Span

_PIECE_BYTES = 16 << 20


class LocalWeights(Protocol):
    """The local weights of one rank."""

    def write(self, span: Span, published: Tensor) -> None:
        """The leader takes a tile of new weights; the other ranks get it by `share`."""
        ...

    def share(self, published: Tensor | None, span: Span) -> None:
        """Collective: within `span`, which cuts no tensor, every rank's weights are the leader's.

        `published` are the leader's, whole; None on other ranks. Buffers are shared too.
        """
        ...

    def gather(self) -> None:
        """Collective: from now on the leader can `read`."""
        ...

    def read(self, span: Span) -> Tensor:
        """A tile of the local weights, fp32 on the CPU; the leader's alone."""
        ...


def of(model: nn.Module, layout: Layout, group: Group) -> LocalWeights:
    """The local weights of `model` as it is placed."""
    plain = combine.unwrapped(model)
    if combine.is_fsdp2(plain):
        from atoll.island.ranks import fsdp2

        return fsdp2.ShardedWeights(plain, layout, group)
    return FlatWeights(plain, layout, group)


class FlatWeights:
    """Every rank has all weights; the parameters are views of one flat buffer."""

    def __init__(self, model: nn.Module, layout: Layout, group: Group) -> None:
        self._model = model
        self._layout = layout
        self._group = group
        device = next(model.parameters()).device
        self._local = torch.empty(layout.size, dtype=torch.float32, device=device)
        views = layout.views(self._local)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                views[name].copy_(parameter)
                parameter.data = views[name]

    def write(self, span: Span, published: Tensor) -> None:
        """Copies the tile."""
        with torch.no_grad():
            span.of(self._local).copy_(published)

    def share(self, published: Tensor | None, span: Span) -> None:
        """The leader's flat buffer, piece by piece."""
        if self._group.size == 1:
            return
        for tile in self._layout.tiles(_PIECE_BYTES, span):
            piece = tile.room() if published is None else tile.of(published)
            self._group.broadcast(piece)
            if published is None:
                self.write(tile, piece)
        buffers.share(self._model, self._group)

    def gather(self) -> None:
        """The leader has them all."""

    def read(self, span: Span) -> Tensor:
        """A view where the model is on the CPU."""
        return span.of(self._local).to("cpu")
