"""Weights that moved while the group broke are never taken for those before the window."""

from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.collectives.base import Collectives
from atoll.errors import MissingRanks, StateDamaged
from atoll.gather.replica import Replica
from atoll.gather.window import Window
from tests import gather_windows as windows
from tests import gathers, rank_groups
from tests.gather_windows import World


class Breaking:
    """A group whose other ranks are gone as soon as a weight of this one has moved."""

    def __init__(self, ranks: Collectives, replica: Replica) -> None:
        self._ranks, self._replica = ranks, replica
        self._before = replica.master.clone()

    def __getattr__(self, name: str) -> Any:
        if not torch.equal(self._replica.master, self._before):
            raise MissingRanks("gone", ranks=(1,))
        return getattr(self._ranks, name)


@pytest.mark.parametrize("has_record", [False, True])
def test_window_that_breaks_after_its_weights_moved_is_torn(tmp_path: Path, has_record):
    world = World(tmp_path)
    world.publish("10", "8", "9")
    if has_record:
        world.run(1)

    def work(ranks: Collectives) -> Replica:
        start = gathers.start()
        replica = Replica(master=start, window=0, digest=windows.root(start))
        window = Window(
            ranks=Breaking(ranks, replica),
            buckets={"main": world.bucket},
            clock=windows.CLOCK,
            directory=tmp_path / "broken",
            terms=windows.terms(),
            replica=replica,
            archive=windows.archive(world.bucket),
            key=windows.EMITTER,
        )
        with pytest.raises(MissingRanks):
            window.run(0)
        return replica

    [replica] = rank_groups.threads(1, "direct", work, chunk_bytes=1 << 16)

    assert not torch.equal(replica.master, gathers.start())
    with pytest.raises(StateDamaged, match="load the weights anew"):
        replica.check(0)
