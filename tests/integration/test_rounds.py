"""The life of a round on a virtual clock: who closes it, when, over which rows, to which bits."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from atoll.coordinator.rounds.dispatch import Dispatch
from atoll.coordinator.rounds.rounds import Rounds
from atoll.coordinator.rounds.under_way import UnderWay
from atoll.errors import AtollError
from atoll.layout import GROUP_ELEMENTS
from atoll.ledger.records import LeaseRecord, LeaseState, RoundState
from atoll.ledger.tables.leases import LeaseTable
from atoll.ledger.tables.queues import DatasetTable
from atoll.strategies import registry
from atoll.sums import digest as digests
from atoll.versions import sources
from tests import clusters
from tests.clusters import SMALL, WIDE, Cluster, HandIsland, TrackingIsland
from tests.ledgers import alone

EPSILON = 2.0**-24  # half a unit in the last place of fp32
HEARTBEAT_TIMEOUT = 10.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


# Quorum


def test_lone_island_gets_no_round_when_two_are_needed(cluster):
    a = cluster.island("a")

    closed = cluster.keep_alive(a, seconds=600)

    assert closed == 0
    assert a.assignment().action == "wait"
    assert alone(cluster.ledger).rounds.latest() is None


def test_lone_contribution_never_closes_a_round_that_needs_two(cluster):
    """It waits, however long the other one stays away."""
    a, b = cluster.pair()
    a.contribute()
    b.leave()

    closed = cluster.keep_alive(a, seconds=600)

    assert closed == 0
    assert cluster.version == 0


def test_round_stays_open_after_every_worker_has_gone(cluster):
    """An empty set of expected workers closes nothing."""
    a, b = cluster.pair()
    a.contribute()
    a.leave()
    b.leave()

    closed = cluster.run_clock(seconds=600, tick_seconds=5.0)

    assert closed == 0
    [waiting] = alone(cluster.ledger).rounds.unpublished()
    assert waiting.state is RoundState.OPEN


def test_silent_workers_close_nothing_either(cluster):
    """A worker's death does not count as its contribution."""
    a, _ = cluster.pair()
    a.contribute()

    closed = cluster.run_clock(seconds=600, tick_seconds=5.0)

    assert closed == 0


def test_newcomer_fills_up_a_short_round_and_it_closes(cluster):
    """What the first one sent is not lost."""
    a, b = cluster.pair()
    a.contribute()
    b.leave()
    c = cluster.island("c")

    c.contribute()
    closed = cluster.settle()

    assert closed == 1
    assert [x.worker_id for x in alone(cluster.ledger).contributions.of_round(1)] == ["a", "c"]


def test_round_becomes_short_by_a_death_and_takes_a_waiting_island(cluster):
    """The tick notices it, without a new registration."""
    a, b = cluster.pair()
    c = cluster.island("c")
    waits = c.assignment().action
    a.contribute()
    cluster.keep_alive(a, c, seconds=HEARTBEAT_TIMEOUT + 2)

    found = c.assignment()

    assert (waits, found.action, found.round) == ("wait", "train", 1)
    assert b.name in {x.worker_id for x in cluster.leases()}


def test_island_that_comes_late_waits_for_the_next_round(cluster):
    a, b = cluster.pair()
    c = cluster.island("c")

    actions = [c.assignment().action]
    cluster.rounds(1, a, b)
    actions.append(c.assignment().action)

    assert actions == ["wait", "train"]


def test_round_that_a_request_has_read_does_not_change_under_it(cluster, monkeypatch):
    """Requests read them without a lock: they are replaced, never written to."""
    a, _ = cluster.pair()
    accept = Rounds.accept
    read: list[UnderWay] = []

    def accept_while_read(self, *given):
        read.extend(self.under_way)
        accepted = accept(self, *given)
        read.extend(self.under_way)
        return accepted

    monkeypatch.setattr(Rounds, "accept", accept_while_read)
    cluster.restart()

    a.contribute()

    assert [list(found.contributions) for found in read] == [[], [(1, "a")]]


def test_all_in_closes_at_once(cluster):
    a, b = cluster.pair()
    a.contribute()
    b.contribute()

    closed = cluster.settle()

    assert (closed, cluster.version) == (1, 1)


def test_quorum_closes_without_a_slow_island_after_the_grace_period(tmp_path):
    cluster = Cluster(tmp_path, {"membership.quorum": 2, "membership.grace_seconds": 5.0})
    a, b = cluster.pair()
    slow = cluster.island("slow")
    a.contribute()
    b.contribute()
    cluster.settle()
    a.contribute()
    cluster.keep_alive(a, b, slow, seconds=8)
    b.contribute()
    cluster.settle()

    early = cluster.run_clock(seconds=5.0 - 2 * clusters.TICK_SECONDS)
    late = cluster.run_clock(seconds=3 * clusters.TICK_SECONDS)

    assert (early, late) == (0, 1)
    assert [x.worker_id for x in alone(cluster.ledger).contributions.of_round(2)] == ["a", "b"]


def test_grace_period_starts_anew_with_every_round(tmp_path):
    """Also when the next quorum is in before the next tick."""
    cluster = Cluster(tmp_path, {"membership.quorum": 2, "membership.grace_seconds": 5.0})
    a, b = cluster.pair()
    cluster.island("slow")
    cluster.rounds(1, a, b)
    for island in (a, b):
        island.contribute()
    cluster.coordinator.advance()
    cluster.clock.advance(seconds=5.0)

    closed = [cluster.coordinator.advance()]
    for island in (a, b):
        island.contribute()
    closed.append(cluster.coordinator.advance())

    assert closed == [True, False]


def test_slow_island_that_makes_it_in_time_counts(tmp_path):
    cluster = Cluster(tmp_path, {"membership.quorum": 2, "membership.grace_seconds": 5.0})
    a, b, slow = cluster.trio("slow")
    a.contribute()
    b.contribute()
    cluster.run_clock(seconds=4)
    slow.contribute()

    closed = cluster.settle()

    assert closed == 1
    assert len(alone(cluster.ledger).contributions.of_round(2)) == 3


def test_round_without_quorum_setting_waits_for_a_slow_live_island(cluster):
    a, b, slow = cluster.trio("slow")
    a.contribute()
    b.contribute()

    closed = cluster.keep_alive(a, b, slow, seconds=300)

    assert closed == 0
    assert cluster.coordinator.status().waiting_for == ("slow",)


def test_dead_worker_lets_the_round_close_within_the_timeout_and_a_tick(cluster):
    a, b, dies = cluster.trio("dies")
    dies.beat()
    a.contribute()
    b.contribute()

    early = cluster.run_clock(seconds=HEARTBEAT_TIMEOUT - clusters.TICK_SECONDS)
    late = cluster.run_clock(seconds=2 * clusters.TICK_SECONDS)

    assert (early, late) == (0, 1)


def test_rows_of_a_dead_worker_are_planned_again_exactly_once(cluster):
    a, b, dies = cluster.trio("dies")
    dies.beat()
    a.contribute()
    b.contribute()
    cluster.keep_alive(a, b, seconds=HEARTBEAT_TIMEOUT + 2)
    [lost] = [x for x in cluster.leases() if x.worker_id == "dies"]

    cluster.rounds(3, a, b)

    again = [
        x
        for x in cluster.leases()
        if x.state is LeaseState.DONE and x.start < lost.stop and lost.start < x.stop
    ]
    assert sum(x.stop - x.start for x in again) == lost.stop - lost.start
    assert cluster.audit().problems == []


def test_rest_of_a_reopened_range_stays_reopened(cluster, monkeypatch):
    """A newcomer needs six rows and is offered four and six."""
    dispatch = Dispatch(cluster.ledger, cluster.manifest)
    [part] = dispatch.parts
    lost = [
        LeaseRecord(number, "c", start, stop, LeaseState.REOPENED, part.dataset_id, lease_epoch=2)
        for number, start, stop in ((1, 0, 4), (2, 10, 16))
    ]
    monkeypatch.setattr(LeaseTable, "reopened", lambda _: lost)
    monkeypatch.setattr(DatasetTable, "cursors", lambda _: {part.dataset_id: 100})

    recorded = cluster.coordinator.manifests.of_round(3)
    with cluster.ledger.reading() as t:
        plan = dispatch.plan(t, 3, {"z": 6}, recorded, cursor=100, tokens=5)

    assert [(x.start, x.stop) for x in plan.leases] == [(0, 4), (10, 12)]
    assert [x.lease_epoch for x in plan.leases] == [3, 3]
    assert plan.left == (replace(lost[1], start=12, unit=12),)
    assert plan.taken == tuple(lost)
    assert plan.tokens == 5


def test_rows_do_not_depend_on_the_order_of_registration(tmp_path):
    one = Cluster(tmp_path / "one", {"membership.min_workers": 3})
    other = Cluster(tmp_path / "other", {"membership.min_workers": 3})

    for name in "abc":
        one.island(name)
    for name in "cab":
        other.island(name)

    assert one.leases() == other.leases()
    assert [x.worker_id for x in one.leases()] == ["a", "b", "c"]


def test_run_ends_after_its_rounds(tmp_path):
    cluster = Cluster(tmp_path, {"stop.rounds": 2})
    a, b = cluster.pair()

    cluster.rounds(2, a, b)

    assert cluster.coordinator.is_finished()
    assert [r.round for r in alone(cluster.ledger).rounds.all()] == [1, 2]
    assert a.assignment().action == "stop"


def test_run_ends_after_its_tokens(tmp_path):
    """48 tokens a round: the third brings the run to 144, past 100."""
    cluster = Cluster(tmp_path, {"stop": {"tokens": 100}})
    a, b = cluster.pair()

    cluster.rounds(3, a, b)

    assert cluster.coordinator.is_finished()
    assert cluster.coordinator.status().tokens == 144


# Every row once, whatever happens


class Storm:
    """A seeded history of joins, leaves, deaths, returns, contributions and restarts."""

    def __init__(self, home: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.cluster = Cluster(home, {"membership.quorum": 2, "membership.grace_seconds": 3.0})
        self.islands: dict[str, HandIsland] = {}
        self.silent: set[str] = set()
        self.events: Counter[str] = Counter()
        for name in ("w0", "w1", "w2"):
            self.islands[name] = self.cluster.island(name)

    def step(self) -> None:
        move = self.random.choice(
            [self.contribute] * 8
            + [self.join] * 4
            + [self.pass_time] * 2
            + [self.leave, self.die, self.come_back, self.come_back, self.restart]
        )
        self.events[move.__name__] += 1
        move()
        for name in sorted(self.islands.keys() - self.silent):
            self.present(self.islands[name]).beat()
        self.cluster.settle()

    def any_of(self, names) -> HandIsland | None:
        ordered = sorted(names)
        return self.islands[self.random.choice(ordered)] if ordered else None

    def join(self) -> None:
        if len(self.islands) < 5:
            name = f"w{self.random.randrange(8)}"
            if name not in self.islands:
                self.islands[name] = self.cluster.island(name)

    def present(self, island: HandIsland) -> HandIsland:
        """The island; one that was evicted while nobody beat has registered again."""
        return island if island.name in self.cluster.coordinator.members() else island.join()

    def contribute(self) -> None:
        island = self.any_of(self.islands.keys() - self.silent)
        if island is not None and self.present(island).assignment().action == "train":
            island.contribute()

    def pass_time(self) -> None:
        seconds = self.random.choice([0.5, 4.0, 11.0])
        self.cluster.run_clock(seconds=seconds, tick_seconds=0.5)

    def leave(self) -> None:
        island = self.any_of(self.islands.keys() - self.silent)
        if island is not None:
            self.present(island).leave()
            del self.islands[island.name]

    def die(self) -> None:
        island = self.any_of(self.islands.keys() - self.silent)
        if island is not None:
            self.silent.add(island.name)

    def come_back(self) -> None:
        island = self.any_of(self.silent)
        if island is not None:
            self.silent.discard(island.name)
            island.join()

    def restart(self) -> None:
        self.cluster.restart()


def assert_every_row_has_one_place(cluster: Cluster) -> None:
    """Done, leased or reopened: the three are a partition of the rows before the cursor."""
    latest = alone(cluster.ledger).rounds.latest()
    cursor = 0 if latest is None else latest.cursor
    spans = sorted((x.start, x.stop) for x in cluster.leases() if x.state is not LeaseState.TAKEN)
    borders = [(0, 0), *spans, (cursor, cursor)]
    assert all(before[1] == after[0] for before, after in pairwise(borders)), spans


@pytest.mark.parametrize("seed", range(4))
def test_no_row_is_lost_or_given_out_twice_in_any_history(tmp_path, seed):
    """The balance of rows is checked after every step."""
    storm = Storm(tmp_path, seed)

    for _ in range(90):
        storm.step()
        assert_every_row_has_one_place(storm.cluster)

    published = [
        r.round for r in alone(storm.cluster.ledger).rounds.all() if r.state is RoundState.PUBLISHED
    ]
    assert all(
        len(alone(storm.cluster.ledger).contributions.of_round(number)) >= 2 for number in published
    )
    assert storm.cluster.audit(with_replay=True).problems == []
    assert storm.cluster.version == len(published) >= 3
    storm.cluster.close()


# The outer step


def reference(layout, contributions: list[list[tuple[torch.Tensor, int]]], **sgd) -> torch.Tensor:
    """Weights after these rounds by torch.optim.SGD on the weighted mean, in plain fp32 numpy."""
    parameter = torch.nn.Parameter(clusters.values(layout, "initial", scale=1.0))
    optimizer = torch.optim.SGD([parameter], **sgd)
    for terms in contributions:
        total = sum(
            (delta.numpy() * weight for delta, weight in terms[1:]),
            start=(terms[0][0].numpy() * terms[0][1]),
        )
        parameter.grad = torch.from_numpy(total / sum(weight for _, weight in terms))
        optimizer.step()
    return parameter.detach()


def by_hand(layout, names: str, rounds: int, *, weight: int = 1):
    return [
        [(clusters.displacement(layout, name, number), weight) for name in names]
        for number in range(1, rounds + 1)
    ]


def master_of(cluster: Cluster) -> torch.Tensor:
    return cluster.buffer("master")


@pytest.mark.parametrize(
    ("outer", "sgd"),
    [
        ({"optimizer": "sgd", "lr": 1.0}, {"lr": 1.0}),
        (
            {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.9},
            {"lr": 0.7, "momentum": 0.9, "nesterov": True},
        ),
    ],
    ids=["sgd", "nesterov"],
)
@pytest.mark.parametrize("weighting", ["equal", "tokens"])
def test_weights_are_those_of_torch_on_the_weighted_mean(tmp_path, outer, sgd, weighting):
    """Both round every operation to fp32; 8 of them a round, on values below 8."""
    cluster = Cluster(tmp_path, {"outer": outer, "weighting": weighting})
    a, b = cluster.pair()
    weight = 24 if weighting == "tokens" else 1

    cluster.rounds(5, a, b)

    expected = reference(SMALL, by_hand(SMALL, "ab", 5, weight=weight), **sgd)
    tolerance = 5 * 8 * EPSILON * 8
    assert torch.allclose(master_of(cluster), expected, rtol=0, atol=tolerance)
    assert not torch.equal(expected, clusters.values(SMALL, "initial", scale=1.0))


def test_weight_of_a_contribution_is_its_share_of_the_mean(tmp_path):
    """Unequal weights, through the replay that also closes rounds."""
    cluster = Cluster(tmp_path, {"outer": {"optimizer": "sgd", "lr": 1.0}})
    a, b = cluster.pair()
    cluster.rounds(1, a, b)
    heavy, light = alone(cluster.ledger).contributions.of_round(1)
    replay = cluster.replay()
    version = replay.restore(None)

    replay.apply(version, 1, [replace(heavy, weight=3), replace(light, weight=1)])

    terms = [
        (clusters.displacement(SMALL, "a", 1), 3),
        (clusters.displacement(SMALL, "b", 1), 1),
    ]
    expected = reference(SMALL, [terms], lr=1.0)
    assert torch.allclose(version.state.master, expected, rtol=0, atol=8 * EPSILON * 8)
    assert not torch.allclose(version.state.master, master_of(cluster), rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three rounds over a layout of several tiles, in int8 up and down."""
    cluster = Cluster(
        tmp_path_factory.mktemp("wide"),
        {"upload.codec": "int8", "download.codec": "int8"},
        layout=WIDE,
    )
    cluster.rounds(3, *cluster.pair())
    yield cluster
    cluster.close()


@pytest.fixture
def torch_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("groups", [1, 64])
@pytest.mark.parametrize("threads", [1, 2])
def test_bits_do_not_depend_on_tiles_or_threads(wide, groups, threads, torch_threads):
    torch_threads(threads)
    state = wide.replay().restore(None).state

    for number in (1, 2, 3):
        step = replace(
            registry.of(wide.manifest).outer(number, 0),
            tile_bytes=groups * GROUP_ELEMENTS * 4,
        )
        codec = wide.manifest.upload.build()
        with sources.opened(
            wide.blobs,
            alone(wide.ledger).contributions.of_round(number),
            codec_of={number: codec}.__getitem__,
            factor_of=lambda _: 1.0,
        ) as opened:
            step.apply(state, opened, None)

    assert digests.digest(WIDE, state.master).root == wide.digest
    assert digests.digest(WIDE, state.published).root == wide.published_digest


@pytest.mark.parametrize("order", ["ab", "ba"])
@pytest.mark.parametrize("threads", [1, 2])
def test_bits_do_not_depend_on_the_order_of_arrival(tmp_path, wide, order, threads):
    cluster = Cluster(
        tmp_path,
        {"upload.codec": "int8", "download.codec": "int8"},
        layout=WIDE,
        threads=threads,
    )
    islands = {island.name: island for island in cluster.pair()}

    cluster.rounds(3, *(islands[name] for name in order))

    assert cluster.digests_by_round() == wide.digests_by_round()
    assert cluster.published_digest == wide.published_digest


def test_bits_depend_on_who_said_what(tmp_path, wide):
    """The control of the claims above: the same two displacements under swapped names differ."""
    cluster = Cluster(tmp_path, {"upload.codec": "int8", "download.codec": "int8"}, layout=WIDE)
    a, b = cluster.pair()

    for number in (1, 2, 3):
        a.contribute(clusters.displacement(WIDE, "b", number))
        b.contribute(clusters.displacement(WIDE, "a", number) * 1.0001)
        cluster.settle()

    assert cluster.digest != wide.digest


# What islands hold


LOSSY = {"bf16": 2.0**-8, "int8": 1 / 254}  # largest error, as a share of what is encoded


@pytest.fixture(scope="module", params=sorted(LOSSY))
def lossy(request, tmp_path_factory):
    """Five rounds with a lossy download, followed by two islands that apply every update."""
    cluster = Cluster(
        tmp_path_factory.mktemp(request.param),
        {"download.codec": request.param, "upload.codec": "bf16"},
        layout=WIDE,
    )
    islands = [TrackingIsland(cluster, name).join() for name in "ab"]
    for island in islands:
        island.fetch()
    errors, steps = [], []
    before = master_of(cluster)
    for _ in range(5):
        cluster.rounds(1, *islands)
        for island in islands:
            island.fetch()
        master, published = master_of(cluster), cluster.buffer("published")
        errors.append((master - published).abs().max().item())
        steps.append((master - before).abs().max().item())
        before = master
    yield request.param, cluster, islands, errors, steps
    cluster.close()


def test_islands_hold_the_coordinators_published_weights_bit_for_bit(lossy):
    _, cluster, islands, _, _ = lossy

    published = cluster.buffer("published")

    assert all(torch.equal(island.published(), published) for island in islands)
    assert {island.weights.digest for island in islands} == {cluster.published_digest}


def test_islands_were_sent_updates_after_their_first_download(lossy):
    _, _, islands, _, _ = lossy

    assert [island.kinds for island in islands] == [["weights", *["update"] * 5]] * 2


def test_published_weights_differ_from_the_master(lossy):
    _, cluster, _, errors, _ = lossy

    assert cluster.published_digest != cluster.digest
    assert min(errors) > 0


def test_what_the_download_loses_is_carried_and_stays_bounded(lossy):
    """e' <= share * (step + e): one round's loss, never a sum of them. Plus fp32 rounding of θ̂."""
    codec, _, _, errors, steps = lossy
    share = LOSSY[codec]

    bounds = [
        share * (step + carried) for step, carried in zip(steps, [0.0, *errors], strict=False)
    ]

    assert all(e <= b + 8 * 2 * EPSILON for e, b in zip(errors, bounds, strict=True))


def test_late_joiner_holds_the_same_digest_as_those_who_applied_every_update(lossy):
    _, cluster, islands, _, _ = lossy
    late = TrackingIsland(cluster, "late").join()

    late.fetch()

    assert late.kinds == ["weights"]
    assert late.weights.digest == islands[0].weights.digest == cluster.published_digest


def test_island_that_missed_an_update_is_sent_the_whole_weights(tmp_path):
    cluster = Cluster(tmp_path, {"download.codec": "bf16"})
    a, b = cluster.pair()
    slow = TrackingIsland(cluster, "slow").join()
    slow.fetch()
    cluster.coordinator.deregister(slow.identity)
    cluster.rounds(2, a, b)
    slow.join()

    slow.fetch()

    assert slow.kinds == ["weights", "weights"]
    assert slow.weights.digest == cluster.published_digest


def test_island_that_holds_other_weights_is_refused_the_update(tmp_path):
    """A differing digest is never averaged in: it is told to fetch, and gets the whole."""
    cluster = Cluster(tmp_path, {"download.codec": "bf16"})
    a, b = cluster.pair()
    cluster.rounds(1, a, b)

    frame = cluster.coordinator.download(a.identity, round_number=0, have_digest="f" * 64)

    assert frame.header.kind == "weights"


def test_wrong_codec_of_an_island_would_be_seen(lossy):
    """The control: an island that drops an update ends with another digest."""
    _, cluster, islands, _, _ = lossy
    torn = islands[0].published()
    torn[GROUP_ELEMENTS] += 1e-3

    assert digests.digest(WIDE, torn).root != cluster.published_digest


def test_refused_contribution_does_not_count_towards_the_quorum(cluster):
    a, b = cluster.pair()
    a.contribute()
    with pytest.raises(AtollError):
        b.contribute(torch.full((SMALL.size,), torch.nan))

    closed = cluster.settle()

    assert closed == 0
