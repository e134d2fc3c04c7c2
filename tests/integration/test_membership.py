"""Generations, readiness, presence and eviction, on a manual clock through the coordinator."""

import pytest

from atoll.coordinator.members.presence import GRACE_SECONDS, Presence
from atoll.errors import AddressUnreachable, Evicted, Fenced, StaleGeneration
from atoll.ledger.records import ContributionRecord, RoundState
from atoll.protocol.messages import AssignmentRequest, BarrierRequest, HeartbeatRequest
from atoll.strategies.diloco.sync import Sync
from tests.clusters import TICK_SECONDS, Cluster, HandIsland
from tests.ledgers import alone

TIMEOUT_SECONDS = 10.0  # the default


@pytest.fixture
def cluster(tmp_path):
    made = Cluster(tmp_path, {"membership.min_workers": 1})
    yield made
    made.close()


def ranks(cluster: Cluster) -> list[tuple[int, str]]:
    return [(w.rank, w.worker_id) for w in cluster.coordinator.ready(1).workers]


def states(cluster: Cluster) -> dict[str, tuple[str, str]]:
    return {w.worker_id: (w.state, w.presence) for w in cluster.coordinator.workers().workers}


class Attending:
    """An island's presence stream, held by hand."""

    def __init__(self, island: HandIsland) -> None:
        self.ended = False
        self.coordinator = island.coordinator
        self.stream = island.coordinator.attend(island.identity, close=self._end)

    def _end(self) -> None:
        self.ended = True

    def drop(self) -> None:
        self.coordinator.absent(self.stream)


def beating(cluster: Cluster, *islands: HandIsland, seconds: float) -> None:
    """Time passes with every island's heartbeats and the closer's ticks."""
    for _ in range(round(seconds / TICK_SECONDS)):
        for island in islands:
            island.beat()
        cluster.run_clock(seconds=TICK_SECONDS)


# Generations


def test_join_leave_takeover_and_eviction_each_make_a_generation(cluster):
    numbers = [cluster.coordinator.generation]
    a = cluster.island("a")
    numbers.append(cluster.coordinator.generation)
    b = cluster.island("b")
    numbers.append(cluster.coordinator.generation)
    a.join()
    numbers.append(cluster.coordinator.generation)
    b.leave()
    numbers.append(cluster.coordinator.generation)
    cluster.run_clock(seconds=TIMEOUT_SECONDS + 1)
    numbers.append(cluster.coordinator.generation)

    assert numbers == [0, 1, 2, 3, 4, 5]


def test_ranks_are_frozen_within_a_generation_and_follow_worker_id(cluster):
    for name in ("b", "a", "c"):
        cluster.island(name)
    before = ranks(cluster)
    beating(cluster, HandIsland(cluster, "d").join(), seconds=1)

    assert before == [(0, "a"), (1, "b"), (2, "c")]
    assert ranks(cluster) == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]


def test_generation_survives_a_restart(cluster):
    cluster.pair()

    cluster.restart()

    assert cluster.coordinator.generation == 2
    assert ranks(cluster) == [(0, "a"), (1, "b")]


def test_message_of_an_old_generation_is_refused_with_both_numbers_and_changes_nothing(cluster):
    a = cluster.island("a")
    old = a.identity
    cluster.island("b")
    before = cluster.coordinator.state_hash()

    with pytest.raises(StaleGeneration, match=r"generation=1 is not .* which is 2") as refused:
        cluster.coordinator.heartbeat(HeartbeatRequest(identity=old))

    assert refused.value.present == 2
    assert cluster.coordinator.state_hash() == before
    assert cluster.coordinator.counters.refusals["STALE_GENERATION"] == 1


def test_upload_that_began_before_somebody_joined_is_accepted(cluster):
    """The join does not cost the round's work: a message is of the generation it began in."""
    a = cluster.island("a")
    sent = a.frame()
    upload = cluster.coordinator.begin_upload(a.request(sent))
    cluster.island("b")

    cluster.coordinator.write_upload(upload, sent.data)
    record = cluster.coordinator.commit_upload(upload)

    assert isinstance(record, ContributionRecord)


def test_broken_upload_resumes_where_it_was_after_somebody_joined(cluster):
    a = cluster.island("a")
    sent = a.frame()
    upload = cluster.coordinator.begin_upload(a.request(sent))
    cluster.coordinator.write_upload(upload, sent.data[:100])
    cluster.island("b")

    assert cluster.coordinator.upload_offset(a.request(sent)) == 100


def test_upload_of_an_old_generation_is_refused_before_its_body_and_then_accepted(cluster):
    a = cluster.island("a")
    sent, old = a.frame(), a.identity
    cluster.island("b")

    with pytest.raises(StaleGeneration):
        a.send(sent, identity=old)
    written = cluster.drafts()
    record = a.send(sent)

    assert (written, record.worker_id) == ([], "a")


def test_waiting_for_an_assignment_goes_on_when_somebody_joins(tmp_path):
    cluster = Cluster(tmp_path, {"membership.min_workers": 2})
    a = cluster.island("a")
    current = cluster.coordinator.weights.current
    request = AssignmentRequest(
        identity=a.identity, version=0, digest=current.digests.published.root
    )
    first = cluster.coordinator.assignment(request)
    cluster.island("b")

    again = cluster.coordinator.assignment(request, begun=True)

    assert (first.action, first.generation) == ("wait", 1)
    assert (again.action, again.generation) == ("train", 2)
    with pytest.raises(StaleGeneration):
        cluster.coordinator.assignment(request)
    cluster.close()


# Readiness


def test_ready_counts_the_members_of_one_generation(cluster):
    cluster.pair()

    answers = {n: cluster.coordinator.ready(n) for n in (1, 2, 3)}

    assert {n: r.ready for n, r in answers.items()} == {1: True, 2: True, 3: False}
    assert {(r.active_workers, r.generation) for r in answers.values()} == {(2, 2)}


def test_ready_asks_for_the_manifests_minimum_unless_told(cluster):
    assert cluster.coordinator.ready().min_workers == 1
    assert not cluster.coordinator.ready().ready


def test_address_is_the_advertised_one_or_where_the_worker_speaks_from(cluster):
    a, b = HandIsland(cluster, "a"), HandIsland(cluster, "b")
    cluster.coordinator.register(
        a.register_request(ip_address="ring-1.example", port=9000), peer="10.0.0.1"
    )
    cluster.coordinator.register(b.register_request(), peer="10.0.0.2")

    found = [(w.ip_address, w.port) for w in cluster.coordinator.ready(1).workers]

    assert found == [("ring-1.example", 9000), ("10.0.0.2", 0)]


def test_workers_are_listed_with_how_they_fare(cluster):
    fine, late, lost, left, dead = (cluster.island(n) for n in ("a", "b", "c", "d", "e"))
    Attending(fine)
    dropped = Attending(lost)
    left.leave()
    Attending(dead).drop()
    beating(cluster, fine, lost, late, seconds=GRACE_SECONDS + 1)
    beating(cluster, fine, lost, seconds=5)
    dropped.drop()

    assert states(cluster) == {
        "a": ("live", "open"),
        "b": ("late", "none"),
        "c": ("late", "lost"),
        "d": ("left", "none"),
        "e": ("evicted", "none"),
    }
    [evicted] = [w for w in cluster.coordinator.workers().workers if w.state == "evicted"]
    assert "presence stream ended" in evicted.reason
    assert evicted.rank is None


# Heartbeats: silent deaths


def test_silent_worker_is_evicted_within_the_timeout_and_one_scan(cluster):
    cluster.island("a")

    cluster.run_clock(seconds=TIMEOUT_SECONDS, tick_seconds=0.25)  # the longest tick a closer has
    at_timeout = ranks(cluster)
    cluster.run_clock(seconds=0.25, tick_seconds=0.25)

    assert at_timeout == [(0, "a")]
    assert ranks(cluster) == []


@pytest.mark.parametrize("sign", ["upload", "download"])
def test_progress_of_a_transfer_is_a_sign_of_life(cluster, sign):
    a, _ = cluster.pair()
    sent = a.frame()
    upload = cluster.coordinator.begin_upload(a.request(sent))
    moves = {
        "upload": lambda i: cluster.coordinator.write_upload(upload, sent.data[i : i + 1]),
        "download": lambda _: cluster.coordinator.sent(a.identity, 1),
    }

    for second in range(3 * round(TIMEOUT_SECONDS)):
        moves[sign](second)
        cluster.run_clock(seconds=1.0, tick_seconds=0.25)

    assert ranks(cluster) == [(0, "a")]  # the control, b, sent nothing


def test_round_closes_as_soon_as_a_silent_worker_is_evicted(cluster):
    a = cluster.island("a")
    a.contribute()
    cluster.settle()
    b = cluster.island("b")
    cluster.rounds(1, a)  # b is planned from the next round on
    a.contribute()

    beating(cluster, a, seconds=TIMEOUT_SECONDS - TICK_SECONDS)
    waiting = cluster.coordinator.status().waiting_for
    beating(cluster, a, seconds=3 * TICK_SECONDS)

    assert waiting == (b.name,)
    assert cluster.version == 3


# Presence: killed processes and resets


def test_lost_presence_evicts_after_the_grace_period_though_heartbeats_are_fresh(cluster):
    a, b = cluster.pair()
    Attending(a).drop()

    beating(cluster, a, b, seconds=GRACE_SECONDS - TICK_SECONDS)
    in_grace = ranks(cluster)
    cluster.run_clock(seconds=3 * TICK_SECONDS)

    assert in_grace == [(0, "a"), (1, "b")]
    assert ranks(cluster) == [(0, "b")]


def test_presence_that_comes_back_in_time_changes_nothing(cluster):
    a, b = cluster.pair()
    Attending(a).drop()
    beating(cluster, a, b, seconds=GRACE_SECONDS - TICK_SECONDS)

    Attending(a)
    beating(cluster, a, b, seconds=5)

    assert cluster.coordinator.generation == 2


def test_lost_presence_wakes_the_closer(cluster):
    a = cluster.island("a")
    attending = Attending(a)
    woken = []
    cluster.coordinator.on_change(lambda: woken.append(True))

    attending.drop()

    assert woken == [True]


def test_round_and_leases_react_to_a_lost_presence(tmp_path):
    """The round is short without the lost one, and a worker without a lease is added to it."""
    cluster = Cluster(tmp_path, {"membership.min_workers": 2})
    a, b = cluster.pair()
    c = cluster.island("c")
    before = c.assignment().action
    Attending(b).drop()

    beating(cluster, a, c, seconds=GRACE_SECONDS + 2 * TICK_SECONDS)

    assert (before, c.assignment().action) == ("wait", "train")
    cluster.close()


def test_new_life_ends_the_stream_of_the_earlier_one(cluster):
    a = cluster.island("a")
    earlier = Attending(a)

    a.join()

    assert earlier.ended
    earlier.drop()
    beating(cluster, a, seconds=2 * GRACE_SECONDS)
    assert ranks(cluster) == [(0, "a")]


def test_presence_of_an_earlier_life_is_fenced(cluster):
    a = cluster.island("a")
    old = a.identity
    a.join()
    identity = old.model_copy(update={"generation": cluster.coordinator.generation})

    with pytest.raises(Fenced):
        cluster.coordinator.attend(identity, close=lambda: None)


def test_coordinator_that_stops_evicts_nobody(cluster):
    a = cluster.island("a")
    attending = Attending(a)

    cluster.coordinator.presence.stop()
    attending.drop()

    beating(cluster, a, seconds=2 * GRACE_SECONDS)
    assert attending.ended
    assert cluster.coordinator.generation == 1


# An evicted worker


def test_evicted_worker_learns_it_at_its_next_message_and_keeps_its_work(cluster):
    a = cluster.island("a")
    sent = a.frame()
    Attending(a).drop()
    cluster.run_clock(seconds=GRACE_SECONDS + 2 * TICK_SECONDS)

    with pytest.raises(Evicted, match="register again and repeat the message"):
        a.send(sent)
    record = a.join().send(sent)

    assert (record.worker_id, record.incarnation) == ("a", 2)
    assert cluster.settle() == 1
    [first, *_] = alone(cluster.ledger).rounds.all()
    assert first.state is RoundState.PUBLISHED


def test_zombie_of_an_evicted_worker_is_fenced_not_invited_back(cluster):
    a = cluster.island("a")
    zombie = a.identity
    a.join()
    cluster.run_clock(seconds=TIMEOUT_SECONDS + 1)

    with pytest.raises(Fenced):
        cluster.coordinator.heartbeat(HeartbeatRequest(identity=zombie))


# Barriers


def test_barrier_is_of_the_generation_and_its_members(cluster):
    a, b = cluster.pair()

    first = cluster.coordinator.barrier(BarrierRequest(name="round-1", identity=a.identity))
    last = cluster.coordinator.barrier(BarrierRequest(name="round-1", identity=b.identity))

    assert (first.complete, first.missing) == (False, ("b",))
    assert last.complete


def test_barrier_ends_when_the_generation_does(cluster):
    a, b = cluster.pair()
    request = BarrierRequest(name="round-1", identity=a.identity)
    cluster.coordinator.barrier(request)

    b.leave()

    with pytest.raises(StaleGeneration):
        cluster.coordinator.barrier(request)


# Where ranks dial each other


def test_unreachable_worker_is_refused_where_ranks_dial_each_other(cluster, monkeypatch):
    monkeypatch.setattr(Sync, "dials", True)
    before = cluster.coordinator.state_hash()

    with pytest.raises(AddressUnreachable, match="advertises no port"):
        cluster.island("a")

    assert cluster.coordinator.state_hash() == before


def test_nobody_is_dialled_in_a_run_whose_islands_only_dial_out(cluster):
    cluster.island("a")

    assert [w.ping_ms for w in cluster.coordinator.workers().workers] == [None]


def test_stream_of_a_life_that_ends_while_it_opens_does_not_hide_the_end_of_the_next(
    cluster, monkeypatch
):
    a = cluster.island("a")
    earlier = a.identity
    opening = Presence.open

    def taken_over_meanwhile(*args):
        monkeypatch.undo()
        a.join()
        return opening(*args)

    monkeypatch.setattr(Presence, "open", taken_over_meanwhile)

    with pytest.raises(Fenced):
        cluster.coordinator.attend(earlier, close=lambda: None)

    assert states(cluster) == {"a": ("live", "none")}
