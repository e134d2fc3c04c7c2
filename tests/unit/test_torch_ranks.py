"""Collectives on torch.distributed with a gloo that is played."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.collectives import torch_dist
from atoll.collectives.base import Key
from atoll.errors import GroupBroken


def test_what_comes_after_an_abort_is_written_nowhere(monkeypatch):
    """Who waits is sent away at once, and frees its tensors; gloo ends later."""
    is_asked, comes = threading.Event(), threading.Event()

    def all_gather(rows: list[Tensor], own: Tensor, *, group: object) -> None:
        is_asked.set()
        comes.wait(10)
        for row in rows:
            row.copy_(own)

    played = SimpleNamespace(
        get_rank=lambda _: 0, get_world_size=lambda _: 2, all_gather=all_gather, DistError=OSError
    )
    monkeypatch.setattr(torch_dist, "dist", played)
    group: Any = None
    ranks = torch_dist.TorchRanks(group)
    out = torch.zeros(8)
    begun = ranks.all_gather(Key(group=1, step=1, op="gather"), torch.ones(4), out)

    assert is_asked.wait(10)
    ranks.abort(GroupBroken("group 1 is over"))
    with pytest.raises(GroupBroken, match="group 1 is over"):
        begun.wait()
    comes.set()
    ranks.close()

    assert out.tolist() == [0.0] * 8
