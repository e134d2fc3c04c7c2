"""A world over a group of ranks: one makes the weights, all have them; afterwards all have all."""

import itertools

import pytest
import torch
from torch import nn

from atoll.errors import ConfigError
from atoll.pools import Counted, Topology, World, threads
from atoll.pools.placement import WORLD, Placement

RANKS = 2 + 2 * 2


class Head(nn.Module):
    """With a number that no other one has, and a buffer that is not a float."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 2), float(number)).T)  # not contiguous
        self.register_buffer("steps", torch.tensor(number))


def topology(*, rows: int = 4, heads: int = 2) -> Topology:
    """Six ranks; every module that is made is another one, whatever the seed."""
    top = Topology(rows=rows)
    encoder = top.pool("encoder", ranks=2)
    readers = top.pool("readers", ranks=heads, blocks=2)
    top.axis("head", ["a", "a.b", "c"], over=readers)
    numbers = itertools.count(1)

    @top.rows
    def batch(index):
        return index[:, None].to(torch.get_default_dtype()).expand(-1, 3)

    @top.parameters(owner=encoder)
    def weights():
        return nn.Linear(3, 3)

    @top.parameters(owner=readers)
    def reader(head):
        return Head(next(numbers))

    @top.value(on=encoder)
    def code(weights, rows):
        return torch.tanh(weights(rows))

    @top.term(on=readers)
    def fit(code, reader, head):
        return Counted((code @ reader.weight.T).square().sum(), len(code), "rows x heads")

    return top


def on_each(tops, work):
    """What `work(rank, top, group)` returns, each rank with a topology of its own."""
    return threads.on_threads(
        Placement(tops[0]), lambda rank, groups: work(tops[rank], groups[WORLD])
    )


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_all_ranks_have_the_weights_that_the_first_one_made():
    worlds = on_each([topology() for _ in range(RANKS)], World.over)

    assert all(same(world.weights, worlds[0].weights) for world in worlds)
    assert {world.trace.to_json().__repr__() for world in worlds} == {
        worlds[0].trace.to_json().__repr__()
    }
    assert worlds[5].weights["reader[c].steps"].dtype == torch.int64


def test_modules_that_each_place_makes_itself_differ():
    """The control: without being handed out, they would."""
    top = topology()

    assert not same(World(top).weights, World(top).weights)


def test_other_sizes_on_one_rank_are_refused_on_all():
    tops = [topology() for _ in range(RANKS)]
    tops[3] = topology(heads=4)

    def refused(top, group):
        with pytest.raises(ConfigError) as error:
            World.over(top, group)
        return str(error.value)

    (said,) = set(on_each(tops, refused))

    assert said.startswith("rank 3 declares pools [['encoder', 1, 2], ['readers', 2, 4]], rank 0")
    assert said.endswith("start all ranks with the same file and sizes")


def test_group_of_another_size_is_refused():
    world = World(topology(heads=4))

    def refused(top, group):
        with pytest.raises(ConfigError) as error:
            world.engine(group)
        return str(error.value)

    (said,) = set(on_each([topology()] * RANKS, refused))

    assert said.startswith("the group has 6 ranks and the topology's pools {'encoder': 2,")
    assert said.endswith("take 10; start as many")


def test_weights_that_cannot_be_made_are_refused_on_all():
    top = topology()

    @top.parameters(owner=top.pools["encoder"])
    def nothing():
        return None

    def refused(top, group):
        with pytest.raises(ConfigError) as error:
            World.over(top, group)
        return str(error.value)

    (said,) = set(on_each([top] * RANKS, refused))

    assert said.startswith("rank 0: parameters 'nothing' returned NoneType")


def test_trained_weights_come_from_their_owners():
    def trained(top, group):
        world = World.over(top, group)
        engine = world.engine(group)
        engine.step(0)
        for parameter in engine.owned().values():
            parameter.data += engine.seat.rank  # the replicas of a block differ, on purpose
        return world.trained(engine)

    first, *others = on_each([topology() for _ in range(RANKS)], trained)

    given = World(topology()).weights
    moved = {name: first[name].flatten()[0] - given[name].flatten()[0] for name in first}
    assert all(same(one, first) for one in others)
    assert {name: float(by) for name, by in moved.items() if "reader" in name} == {
        "reader[a].weight": 2.0,
        "reader[a].steps": 0.0,
        "reader[a.b].weight": 4.0,
        "reader[a.b].steps": 0.0,
        "reader[c].weight": 4.0,
        "reader[c].steps": 0.0,
    }
