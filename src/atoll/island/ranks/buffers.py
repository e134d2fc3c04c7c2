"""A model's buffers (running statistics, say): on all ranks of an island they are the leader's."""

import torch
from torch import nn

from atoll.island.ranks.group import Group


def share(model: nn.Module, group: Group) -> None:
    """Collective: every rank's buffers (running statistics, say) are the leader's."""
    with torch.no_grad():
        for _, buffer in model.named_buffers():
            piece = buffer.detach().to("cpu", copy=True).contiguous()
            group.broadcast(piece.view(-1).view(torch.uint8))  # any dtype
            buffer.copy_(piece)
