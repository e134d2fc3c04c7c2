"""The probe passes what adds, and finds what averages, loses or misplaces."""

from collections.abc import Callable
from functools import partial

import pytest
from torch import Tensor

from atoll.collectives import probe
from atoll.collectives.base import Collectives, Handle, Key
from atoll.collectives.local import LocalGroup, LocalMember
from atoll.collectives.runners import Inline
from atoll.errors import ProtocolError
from atoll.simulate.fibers import Scheduler

SIZE = 3


def probed(wrapped: Callable[[LocalMember], Collectives]) -> None:
    """All ranks probe at once."""
    scheduler = Scheduler()
    group = LocalGroup(SIZE, clock=scheduler, group=7)
    done: list[int] = []

    def run(rank: int) -> None:
        probe.check_sums(wrapped(group.rank(rank, Inline())), group=7)
        done.append(rank)

    for rank in range(SIZE):
        scheduler.spawn(f"rank-{rank}", partial(run, rank))
    scheduler.run_until(lambda: len(done) == SIZE, limit_seconds=1e6)


class _Then:
    """A handle after which the result is spoilt."""

    def __init__(self, handle: Handle, spoil: Callable[[], object]) -> None:
        self._handle = handle
        self._spoil = spoil

    def wait(self) -> None:
        self._handle.wait()
        self._spoil()


class Spoilt:
    """Collectives whose reductions or gathers give something else."""

    def __init__(self, inner: LocalMember, which: str, spoil: Callable[[Tensor], object]) -> None:
        self._inner = inner
        self._which = which
        self._spoil = spoil
        self.rank, self.size = inner.rank, inner.size

    def all_reduce(self, key: Key, values: Tensor) -> Handle:
        return self._then("all_reduce", self._inner.all_reduce(key, values), values)

    def reduce_scatter(self, key: Key, values: Tensor, out: Tensor) -> Handle:
        return self._then("reduce_scatter", self._inner.reduce_scatter(key, values, out), out)

    def all_gather(self, key: Key, shard: Tensor, out: Tensor) -> Handle:
        return self._then("all_gather", self._inner.all_gather(key, shard, out), out)

    def _then(self, name: str, handle: Handle, values: Tensor) -> Handle:
        return _Then(handle, lambda: self._spoil(values)) if name == self._which else handle


def averages(values: Tensor) -> None:
    values.div_(SIZE)


def loses_one(values: Tensor) -> None:
    values[-1:] -= 1


def turns(values: Tensor) -> None:
    values.copy_(values.flip(0))


def test_transport_that_adds_passes():
    probed(lambda ranks: ranks)


@pytest.mark.parametrize(
    ("which", "spoil", "said"),
    [
        ("all_reduce", averages, "all-reduce is 1, not 3: this transport averages"),
        ("reduce_scatter", averages, "reduce-scatter is 1, not 3: this transport averages"),
        ("all_reduce", loses_one, "all-reduce is 2, not 3: this transport loses"),
        ("reduce_scatter", loses_one, "reduce-scatter is 2, not 3: this transport loses"),
        ("all_gather", turns, "all-gather is 6, not 0: this transport .* misplaces"),
    ],
)
def test_transport_that_does_not_is_found(which, spoil, said):
    with pytest.raises(ProtocolError, match=said):
        probed(lambda ranks: Spoilt(ranks, which, spoil))  # type: ignore[arg-type,return-value]
