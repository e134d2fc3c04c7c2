"""FSDP2 inside an island: shards to and from the flat weights.

Loaded only for a model that `fully_shard` was applied to: importing FSDP2 takes most of a second.
"""

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from atoll.island.ranks import buffers
from atoll.island.ranks.group import Group
from atoll.layout import Layout, Span, TensorSpec
from atoll.strategies import outer


def placed(value: Tensor, parameter: Tensor) -> Tensor:
    """Makes a shard of an optimizer's state a DTensor like its parameter, if that is one."""
    if not isinstance(parameter, DTensor):
        return value
    return DTensor.from_local(
        value.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


class ShardedWeights:
    """Each rank has its shards (FSDP2); the leader gathers the whole for a contribution.

    One tensor at a time: a follower never holds more than the largest tensor beside its shards.
    For the thread that trains.
    """

    def __init__(self, model: nn.Module, layout: Layout, group: Group) -> None:
        self._model = model
        self._layout = layout
        self._group = group
        self._gathered = layout.zeros() if group.is_leader else None

    def merge(self, published: Tensor | None, span: Span, *, own: float) -> None:
        """Each rank takes its shards of the leader's tensors in."""
        with torch.no_grad():
            for spec, parameter in self._sharded():
                if not span.start <= spec.offset < span.stop:
                    continue
                place = spec.span
                whole = place.room() if published is None else place.of(published)
                self._group.broadcast(whole)
                mesh, placements = parameter.device_mesh, parameter.placements
                placed = whole.view(spec.shape).to(parameter.device)
                # Without a source rank nothing is sent: every rank has the whole tensor here.
                shards = distribute_tensor(placed, mesh, placements, src_data_rank=None)
                outer.mix(parameter.to_local(), shards.to_local(), own=own)
        buffers.share(self._model, self._group)

    def write(self, span: Span, published: Tensor) -> None:
        """Never: shards are of several processes."""
        raise AssertionError(f"{span} of {len(published)} is not written by one rank alone")

    def copy(self) -> list[Tensor]:
        """One tensor for each shard."""
        return [parameter.to_local().clone() for _, parameter in self._sharded()]

    def put_back(self, own: list[Tensor]) -> None:
        """The same."""
        with torch.no_grad():
            for (_, parameter), kept in zip(self._sharded(), own, strict=True):
                parameter.to_local().copy_(kept)

    def gather(self) -> None:
        """All shards of a tensor at a time; only the leader keeps it."""
        with torch.no_grad():
            for spec, parameter in self._sharded():
                whole = parameter.full_tensor()
                if self._gathered is not None:
                    spec.span.of(self._gathered).copy_(whole.flatten())

    def read(self, span: Span) -> Tensor:
        """A tile of what was gathered."""
        assert self._gathered is not None, "only the leader reads"
        return span.of(self._gathered)

    def _sharded(self) -> Iterator[tuple[TensorSpec, DTensor]]:
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward pass without backward leaves the root whole
        parameters = dict(self._model.named_parameters())
        for spec in self._layout.tensors:
            yield spec, cast(DTensor, parameters[spec.name])
