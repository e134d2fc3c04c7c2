"""What the files beside this one share: a run's settings without a run, and flat gradients."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atoll import config
from atoll.layout import Layout
from atoll.models import registry
from atoll.protocol.manifest import DataSettings, Manifest, ModelSettings


def manifest_of(layout: Layout, **settings: Any) -> Manifest:
    """The settings that a coordinator would give its islands."""
    tensors = [[spec.name, spec.dtype, list(spec.shape)] for spec in layout.tensors]
    table = {"name": "checked", "stop": {"rounds": 1}, "model": {}, "data": {}, **settings}
    return config.parse(table).manifest(
        ModelSettings(
            definition={"architecture": "custom", "tensors": tensors},
            layout_digest=layout.digest,
            initial_digest="0" * 64,
        ),
        DataSettings(definition={}, identity={"rows": 12, "block": 1, "held_out_rows": 0}),
    )


def layout_of(model: nn.Module) -> Layout:
    return registry.layout_of(model)


def flat(model: nn.Module) -> Tensor:
    """The weights in the layout's order, copied."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def leave(model: nn.Module, gradient: Tensor, layout: Layout) -> None:
    """Puts a flat gradient where a check looks for it."""
    for name, parameter in model.named_parameters():
        parameter.grad = layout.views(gradient)[name].clone()


def take(model: nn.Module, weights: Tensor, layout: Layout) -> None:
    """Takes published weights over, as islands do."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(layout.views(weights)[name])


def gathered(own: Tensor) -> list[Tensor]:
    """Every rank's tensor of this shape."""
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return found
