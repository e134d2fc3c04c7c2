"""What the ranks of an island do together, seen from one of them; the others are played by hand."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from atoll.clock import ManualClock
from atoll.codecs.fp32.codec import Fp32
from atoll.errors import ConfigError, StoreError
from atoll.island import collective
from atoll.island.conversation.rounds import Rounds
from atoll.island.conversation.session import Session
from atoll.island.driver import Driver
from atoll.island.ranks import combine, parallel
from atoll.island.ranks.batch_slice import BatchSlice
from atoll.island.ranks.group import SoloGroup
from atoll.island.state.continuity import WHOLE, Continuity, Part
from atoll.island.state.store import IslandIdentity, IslandStore
from atoll.island.state.weights import IslandWeights
from atoll.launch import placement
from atoll.models import registry as models
from atoll.protocol.messages import Info
from atoll.strategies.diloco.sync import Sync
from tests import links
from tests.clusters import SMALL, info_of, manifest_for

FOLLOWER = Part(1, 2)
COURSE = {"began": 2, "trained": 4, "newest": 4, "merged": 3, "tokens": [[4, 8]]}
NO_LOCAL, LOCAL = False, True  # whether the leader has saved local weights
NOTHING = ((), False)  # no receipt is here, and no refusal
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


class ToldAll(Exception):
    """The leader has nothing more to tell."""


class FollowerGroup(SoloGroup):
    """Rank 1 of 2; what the leader tells is given."""

    rank = 1
    size = 2
    is_leader = False

    def __init__(self, *told: Any) -> None:
        self._told = list(told)

    def lead(self, work: Callable[[], Any]) -> Any:
        if not self._told:
            raise ToldAll
        return self._told.pop(0)

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        return [[1.0 for _ in values], list(values)]


def info(tmp_path: Path) -> Info:
    return Info.model_construct(
        run_id="r", seed=1, upload=type("Upload", (), {"keeps_residual": False})()
    )


@pytest.fixture
def store(tmp_path):
    made = IslandStore(tmp_path / "rank-1", has_frames=False)
    yield made
    made.close()


def continuity(store: IslandStore, part: Part = FOLLOWER) -> tuple[Continuity, torch.optim.SGD]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    made = Continuity(store, info(store.directory), worker_id="w", elements=3, part=part)
    made.start(optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return made, optimizer


def resumed(group: FollowerGroup, made: Continuity) -> IslandWeights:
    """The rank takes up what an earlier life left, as its leader tells; what weights it has."""
    link: Any = links.Answering()
    manifest, model = manifest_for(SMALL), nn.Linear(2, 1)
    session = Session(IslandIdentity("w", "0" * 64), info_of(manifest), Random(0), group=group)
    weights = IslandWeights(
        model, models.layout_of(model), strategy=Sync(manifest), download=Fp32(), group=group
    )
    with suppress(ToldAll):
        Driver(link, ManualClock(), group).run(Rounds(session, weights, made).take_part())
    return weights


def resume(store: IslandStore, part: Part, *told: Any) -> torch.optim.SGD:
    """The optimizer of the next life, after the leader told its rounds and what became of them."""
    made, optimizer = continuity(store, part)
    optimizer.state.clear()
    resumed(FollowerGroup(*told), made)
    return optimizer


@given(rows=st.integers(1, 40), size=st.integers(1, 9))
def test_slices_are_the_batch_and_counts_are_honest(rows, size):
    batch = torch.arange(rows)
    shares = [BatchSlice(rank, size) for rank in range(size)]

    slices = [share.slice(batch) for share in shares]

    counted = [part for part, share in zip(slices, shares, strict=True) if share.rows]
    assert torch.equal(torch.cat(counted), batch)
    assert [len(part) for part in slices] == [max(1, share.rows) for share in shares]
    assert sum(share.rows for share in shares) == rows


def test_gradient_of_a_rank_without_rows_counts_as_zero_even_if_it_overflowed():
    share = BatchSlice(0, 2)
    share.slice(torch.zeros(1, 3))
    gradient = torch.tensor([float("inf"), float("nan"), 1.0])

    share.scale(gradient)

    assert gradient.tolist() == [0.0, 0.0, 0.0]


def test_step_of_a_rank_without_rows_adds_no_loss():
    share = BatchSlice(0, 2)
    share.slice(torch.zeros(1, 9))

    step = collective.step(SoloGroup(), share, loss=float("nan"), row_tokens=8)

    assert (step.rows, step.tokens, step.loss_sum) == (0, 0, 0.0)


def test_interrupted_rank_ends_the_step_of_all():
    class Interrupted(SoloGroup):
        is_interrupted = True

    with pytest.raises(KeyboardInterrupt):
        collective.step(Interrupted(), BatchSlice(0, 1), loss=1.0, row_tokens=8)


def saved(store: IslandStore, *rounds: int) -> None:
    """An earlier life saved these rounds; the first one has its receipt."""
    for number in rounds:
        continuity(store)[0].save_part(number, COURSE)
    store.promote(rounds[0])


def test_follower_takes_up_the_round_that_the_leader_has(store):
    saved(store, 4)

    assert resume(store, FOLLOWER, (4, ()), NO_LOCAL, NOTHING).state
    assert store.rounds() == (4, ())


def test_follower_that_was_killed_before_its_promotion_is_one_name_behind(store):
    continuity(store)[0].save_part(4, COURSE)

    assert resume(store, FOLLOWER, (4, ()), NO_LOCAL, NOTHING).state
    assert store.rounds() == (4, ())


def test_follower_drops_a_pending_round_that_the_leader_never_sent(store):
    saved(store, 4, 5)

    assert resume(store, FOLLOWER, (4, ()), NO_LOCAL, NOTHING).state
    assert store.rounds() == (4, ())


@pytest.mark.parametrize(
    ("became", "rounds"), [(((5,), False), (5, ())), (((), True), (4, ()))], ids=["in", "refused"]
)
def test_follower_does_with_a_resent_round_as_the_leader_did(store, became, rounds):
    saved(store, 4, 5)

    assert resume(store, FOLLOWER, (4, (5,)), NO_LOCAL, became).state
    assert store.rounds() == rounds


@pytest.mark.parametrize(
    ("became", "rounds"),
    [
        (((), False), (4, (5, 6))),
        (((5,), False), (5, (6,))),
        (((5, 6), False), (6, ())),
        (((5,), True), (5, ())),
    ],
    ids=["both wait", "first is in", "both are in", "second is refused"],
)
def test_follower_does_with_several_resent_rounds_as_the_leader_did(store, became, rounds):
    saved(store, 4, 5, 6)

    assert resume(store, FOLLOWER, (4, (5, 6)), NO_LOCAL, became).state
    assert store.rounds() == rounds


@pytest.mark.parametrize(("is_kept", "merged"), [(LOCAL, COURSE["merged"]), (NO_LOCAL, 0)])
def test_follower_goes_on_from_the_local_weights_that_the_leader_has_saved(store, is_kept, merged):
    saved(store, 4)
    made, _ = continuity(store)

    weights = resumed(FollowerGroup((4, ()), is_kept, NOTHING), made)

    assert weights.merged == merged


@pytest.mark.parametrize(
    ("part", "told"),
    [
        (FOLLOWER, (3, ())),  # the leader is at another round
        (FOLLOWER, (None, ())),  # the leader has nothing
        (FOLLOWER, (4, (5,))),  # the leader has one more
        (Part(1, 4), (4, ())),  # more ranks than before
        (Part(1, 2, is_fsdp2=True), (4, ())),  # copies before, shards now
    ],
)
def test_follower_whose_state_does_not_fit_starts_anew(store, part, told):
    saved(store, 4)

    assert not resume(store, part, told).state
    assert store.rounds() == (None, ())


@pytest.mark.parametrize(
    ("told", "step"),
    [
        (((4, (5,)),), "fall_in"),
        (((3, ()),), "drop"),
        (((4, (5,)), NO_LOCAL, ((5,), False)), "promote"),
        (((4, (5,)), NO_LOCAL, ((), True)), "roll_back"),
    ],
)
def test_failure_of_one_rank_to_resume_is_told_to_all(store, monkeypatch, told, step):
    saved(store, 4, 5)
    shared: list[Exception] = []

    class Telling(FollowerGroup):
        def together(self, work: Callable[[], Any]) -> Any:
            try:
                return work()
            except StoreError as error:
                shared.append(error)
                raise

    def broken(*_: Any, **__: Any) -> None:
        raise StoreError(step)

    made, _ = continuity(store)
    monkeypatch.setattr(made, step, broken)

    with pytest.raises(StoreError):
        resumed(Telling(*told), made)

    assert [str(error) for error in shared] == [step]


def test_follower_goes_back_to_its_checkpoint_after_a_new_manifest_version(store):
    """What rounding lost is the leader's alone, also when the version came during the run."""
    made, optimizer = continuity(store)
    made.save_part(4, COURSE)
    store.promote(4)
    newer = Info.model_construct(
        run_id="r", seed=1, upload=type("Upload", (), {"keeps_residual": True})()
    )

    made.adopt(newer)
    optimizer.state.clear()
    made.roll_back()

    assert optimizer.state


def test_state_from_before_there_were_ranks_is_that_of_one_process():
    assert WHOLE.described() == [0, 1, 0]


def test_follower_draws_from_a_random_stream_of_its_own(store):
    continuity(store)
    own = torch.rand(3)
    continuity(store, WHOLE)

    assert not torch.equal(torch.rand(3), own)


def test_model_by_itself_on_several_ranks_is_refused():
    with pytest.raises(ConfigError, match="DistributedDataParallel"):
        combine.install(nn.Linear(2, 2), BatchSlice(0, 2), ranks=2)


def test_unknown_way_to_spread_a_model_lists_the_known_ones():
    with pytest.raises(ConfigError, match="ddp, fsdp2"):
        parallel.check("fsdp1")


def test_placement_is_what_torchrun_says():
    assert placement.local_rank(TORCHRUN) == 1


@pytest.mark.parametrize("name", TORCHRUN)
def test_process_without_one_of_torchruns_variables_is_by_itself(name):
    assert placement.local_rank({k: v for k, v in TORCHRUN.items() if k != name}) is None


def test_placement_that_is_no_number_is_named():
    with pytest.raises(ConfigError, match="WORLD_SIZE='two'"):
        placement.local_rank({**TORCHRUN, "WORLD_SIZE": "two"})
