"""Where the weights that an island trains live: views of one flat buffer, or shards over ranks."""

from typing import Protocol

import torch
from torch import Tensor, nn

from atoll.island.ranks import buffers
from atoll.island.ranks.group import Group
from atoll.layout import Layout, Span
from atoll.pools.adapters.base import is_fsdp2, unwrapped
from atoll.strategies import outer

_PIECE_BYTES = 16 << 20


class LocalWeights(Protocol):
    """The local weights of one rank."""

    def merge(self, published: Tensor | None, span: Span, *, own: float) -> None:
        """Collective: within `span`, which cuts no tensor, takes the leader's `published` in.

        local = own*local + (1-own)*published, where own = 0 is a copy. `published` is the leader's,
        whole; None on other ranks. Buffers are shared too.
        """
        ...

    def write(self, span: Span, published: Tensor) -> None:
        """Takes a tile over, in an island of one process."""
        ...

    def copy(self) -> list[Tensor]:
        """This rank's weights as they are now."""
        ...

    def put_back(self, own: list[Tensor]) -> None:
        """Makes this rank's weights what `copy` gave."""
        ...

    def gather(self) -> None:
        """Collective: from now on the leader can `read`."""
        ...

    def read(self, span: Span) -> Tensor:
        """A tile of the local weights, fp32 on the CPU; the leader's alone."""
        ...


def of(model: nn.Module, layout: Layout, group: Group) -> LocalWeights:
    """The local weights of `model` as it is placed."""
    plain = unwrapped(model)
    if is_fsdp2(plain):
        from atoll.island.ranks import fsdp2

        return fsdp2.ShardedWeights(plain, layout, group)
    return FlatWeights(plain, layout, group)


class FlatWeights:
    """Every rank has all weights; the parameters are views of one flat buffer.

    For the thread that trains.
    """

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

    def merge(self, published: Tensor | None, span: Span, *, own: float) -> None:
        """From the leader's flat buffer, piece by piece."""
        with torch.no_grad():
            for tile in self._layout.tiles(_PIECE_BYTES, span):
                piece = tile.room() if published is None else tile.of(published)
                if self._group.size > 1:
                    self._group.broadcast(piece)
                outer.mix(tile.of(self._local), piece, own=own)
        buffers.share(self._model, self._group)

    def write(self, span: Span, published: Tensor) -> None:
        """Copies the tile."""
        with torch.no_grad():
            span.of(self._local).copy_(published)

    def copy(self) -> list[Tensor]:
        """One flat buffer."""
        return [self._local.clone()]

    def put_back(self, own: list[Tensor]) -> None:
        """The same."""
        with torch.no_grad():
            self._local.copy_(own[0])

    def gather(self) -> None:
        """The leader has them all."""

    def read(self, span: Span) -> Tensor:
        """A view where the model is on the CPU."""
        return span.of(self._local).to("cpu")
