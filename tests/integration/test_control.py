"""The operator's hand on a run: pause, stop, kick; durable, acknowledged, admins only."""

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from atoll.coordinator.members import agreement
from atoll.coordinator.planes.access import Role
from atoll.coordinator.shown import metrics
from atoll.errors import Forbidden, ProtocolError, StorageFull, UnknownWorker
from atoll.island.conversation.asking import question
from atoll.ledger.tables.members import MemberTable
from atoll.ledger.tables.run import NamedValues
from atoll.protocol.messages import Assignment, HeartbeatRequest, Telemetry
from atoll.protocol.samples import Sample, SamplesRequest
from tests import served
from tests.clusters import Cluster, HandIsland
from tests.ledgers import alone
from tests.served import TOKENS, Served


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


def beat(island: HandIsland, *, acknowledged: int = 0) -> int:
    """A heartbeat; the number of the command that came back."""
    request = HeartbeatRequest(identity=island.identity, acknowledged=acknowledged)
    return island.coordinator.heartbeat(request).command.number


def test_pause_lets_the_round_under_way_close_and_hands_out_no_other(cluster):
    a, b = cluster.pair()
    a_work, b_work = a.assignment(), b.assignment()
    cluster.coordinator.order("pause")

    a.send(a.frame(a_work))
    b.send(b.frame(b_work))
    assert cluster.settle() == 1

    assert [i.assignment().action for i in (a, b)] == ["wait", "wait"]
    assert "paused" in a.assignment().reason
    cluster.coordinator.order("run")
    assert [i.assignment().action for i in (a, b)] == ["train", "train"]


def test_status_of_a_paused_run_names_only_islands_that_have_begun(cluster):
    a, _ = cluster.pair()
    work = a.assignment()
    before = shown(cluster)

    cluster.coordinator.order("pause")
    paused = shown(cluster)
    a.send(a.frame(work))
    held = shown(cluster)
    cluster.coordinator.order("run")

    assert before == ("training", ("a", "b"))
    assert paused == ("paused", ("a",))
    assert held == ("paused", ())
    assert shown(cluster) == ("training", ("b",))


def test_status_of_a_paused_run_knows_after_a_restart_who_trains(cluster):
    a, _ = cluster.pair()
    a.assignment()
    cluster.coordinator.order("pause")
    cluster.restart()

    telling = HeartbeatRequest(identity=a.identity, telemetry=Telemetry(round=1, step=1))
    cluster.coordinator.heartbeat(telling)

    assert shown(cluster) == ("paused", ("a",))


def shown(cluster: Cluster) -> tuple[str, tuple[str, ...]]:
    status = cluster.coordinator.status()
    return status.state, status.waiting_for


def series(cluster: Cluster) -> set[str]:
    """Workers that a scrape has a series of."""
    text = metrics.render(cluster.coordinator.status()).decode()
    return set(re.findall(r'worker_id="([^"]*)"', text))


def test_paused_run_has_the_bits_of_one_that_was_not(cluster, tmp_path):
    a, b = cluster.pair()
    cluster.rounds(1, a, b)
    cluster.coordinator.order("pause")
    cluster.coordinator.order("run")
    cluster.rounds(2, a, b)
    calm = Cluster(tmp_path / "calm")
    calm.rounds(3, *calm.pair())

    assert cluster.digests_by_round() == calm.digests_by_round()
    calm.close()


def test_stop_goes_on_after_a_restart_until_it_is_carried_out(cluster):
    a, b = cluster.pair()
    b_work = b.assignment()
    a.contribute()
    number = cluster.coordinator.order("stop").command.number

    cluster.restart()

    assert cluster.coordinator.is_stopping()
    assert beat(a) == number
    assert a.assignment().action == "stop"
    b.send(b.frame(b_work))
    assert cluster.settle() == 1
    assert b.assignment().action == "stop"


def awaiting(island: HandIsland, version: int) -> Assignment:
    """What an island is told that hands in round `version` and must merge it before it goes on."""
    current = island.coordinator.weights.current
    held = current.version, current.digests.published.root
    asked = question(island.identity, *held, awaits=version, under_way=(version,))
    return island.coordinator.assignment(asked)


def test_stop_ends_an_island_that_waits_for_a_version_nobody_publishes(cluster):
    a, _ = cluster.pair()
    before = awaiting(a, 1)

    cluster.coordinator.order("stop")

    told = awaiting(a, 1)
    assert (before.action, told.action) == ("wait", "stop")
    assert told.reason == "the operator stops the run"


def test_stop_lets_an_island_fetch_the_version_it_waits_for_once_it_is_there(cluster):
    a, b = cluster.pair()
    cluster.rounds(1, a, b)
    cluster.coordinator.order("stop")

    told = awaiting(a, 1)

    assert (told.action, told.version) == ("fetch", 1)


def test_stop_that_was_taken_back_does_not_come_again(cluster):
    cluster.coordinator.order("stop")
    cluster.coordinator.order("run")
    cluster.coordinator.end_stop()

    assert not cluster.restart().coordinator.is_stopping()


def test_second_stop_is_not_taken_for_the_first_one(cluster):
    """What says that a stop has ended names which."""
    cluster.coordinator.order("stop")
    cluster.coordinator.end_stop()
    cluster.restart()
    cluster.coordinator.order("stop")

    assert cluster.restart().coordinator.is_stopping()


def test_kick_that_a_crash_cut_in_two_is_finished_at_the_start(cluster, monkeypatch):
    """Kept out is one transaction, taken out another."""
    a, _ = cluster.pair()

    class Killed(BaseException):
        """The process ends here."""

    def killed(*_, **__):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(MemberTable, "deregister", killed)
        with pytest.raises(Killed):
            cluster.coordinator.kick("a")

    cluster.restart()

    assert cluster.coordinator.control().kicked == ("a",)
    with pytest.raises(UnknownWorker):
        a.assignment()
    assert cluster.coordinator.members() == ["b"]


def test_pause_survives_a_restart_and_a_finished_stop_does_not(cluster):
    cluster.pair()
    cluster.coordinator.order("pause")
    cluster.restart()
    assert cluster.coordinator.control().command.action == "pause"

    cluster.coordinator.order("stop")
    cluster.coordinator.end_stop()
    cluster.restart()

    command = cluster.coordinator.control().command
    assert (command.action, command.number) == ("run", 3)


def test_command_reaches_islands_on_the_heartbeat_and_is_acknowledged_there(cluster):
    a, b = cluster.pair()
    number = cluster.coordinator.order("pause").command.number

    assert cluster.coordinator.control().missing == ("a", "b")
    assert beat(a) == number
    beat(a, acknowledged=number)

    found = cluster.coordinator.control()
    assert (found.acknowledged, found.missing) == (("a",), ("b",))
    assert beat(b) == number


def test_same_command_again_changes_nothing(cluster):
    cluster.coordinator.order("pause")
    before = cluster.coordinator.state_hash()

    assert cluster.coordinator.order("pause").command.number == 1
    assert cluster.coordinator.state_hash() == before


def test_stop_ends_islands_after_their_round_and_the_round_closes(cluster):
    a, b = cluster.pair()
    b_work = b.assignment()
    a.contribute()
    cluster.coordinator.order("stop")

    assert a.assignment().action == "stop"
    a.leave()
    b.send(b.frame(b_work))
    assert cluster.settle() == 1
    assert b.assignment().action == "stop"
    b.leave()
    cluster.coordinator.end_stop()

    assert [s.version for s in alone(cluster.ledger).snapshots.all()] == [1]
    cluster.restart()
    a.join(), b.join()
    cluster.rounds(1, a, b)
    assert cluster.audit(with_replay=True).problems == []


def test_saving_twice_writes_one_snapshot(cluster):
    cluster.rounds(1, *cluster.pair())
    cluster.coordinator.snapshots.save()
    cluster.coordinator.snapshots.save()

    assert [s.version for s in alone(cluster.ledger).snapshots.all()] == [1]


def test_kicked_worker_is_out_at_once_and_stays_out(cluster):
    a, b = cluster.pair()
    a.contribute()

    cluster.coordinator.kick("b")

    with pytest.raises(UnknownWorker):
        b.beat()
    with pytest.raises(Forbidden, match=r"'b' was taken out.*atoll allow URL b"):
        b.join()
    cluster.restart()
    with pytest.raises(Forbidden):
        b.join()
    assert cluster.coordinator.control().kicked == ("b",)


def test_worker_that_is_kicked_while_it_registers_is_kept_out(cluster, monkeypatch):
    _, b = cluster.pair()
    check = agreement.check

    def kicked_meanwhile(*args, **settings) -> None:
        check(*args, **settings)
        cluster.coordinator.kick("b")

    monkeypatch.setattr(agreement, "check", kicked_meanwhile)

    with pytest.raises(Forbidden):
        b.join()

    assert [w.worker_id for w in cluster.coordinator.ready().workers] == ["a"]


def test_presence_of_a_kicked_worker_ends(cluster):
    _, b = cluster.pair()
    ended = threading.Event()
    cluster.coordinator.attend(b.identity, close=ended.set)

    cluster.coordinator.kick("b")

    assert ended.is_set()
    assert [w.presence for w in cluster.coordinator.workers().workers] == ["none", "none"]


def test_heartbeat_does_not_wait_while_a_command_is_being_written(cluster, monkeypatch):
    """It is answered on the loop that every other message waits for."""
    a, _ = cluster.pair()
    writing, may_write = threading.Event(), threading.Event()
    write = NamedValues.set

    def slow(self: NamedValues, values) -> None:
        writing.set()
        assert may_write.wait(20.0)
        write(self, values)

    monkeypatch.setattr(NamedValues, "set", slow)
    with ThreadPoolExecutor(2) as pool:
        order = pool.submit(cluster.coordinator.order, "pause")
        assert writing.wait(20.0)
        try:
            number = pool.submit(beat, a).result(20.0)
        finally:
            may_write.set()
        assert number == 0
        assert order.result().command.number == 1


def test_round_does_not_wait_for_a_kicked_worker(tmp_path):
    cluster = Cluster(tmp_path, {"membership.min_workers": 1})
    a, _ = cluster.pair()
    cluster.rounds(1, a)  # b joined after round 1 was planned
    a.contribute()
    assert cluster.settle() == 0, "the control: it waits for b"

    cluster.coordinator.kick("b")

    assert cluster.settle() == 1
    cluster.close()


def test_allowed_worker_may_join_again(cluster):
    _, b = cluster.pair()
    cluster.coordinator.kick("b")

    cluster.coordinator.allow("b")

    assert b.join().identity.incarnation > 1


def test_kick_of_an_unknown_worker_is_refused_by_name(cluster):
    with pytest.raises(UnknownWorker, match="'nobody'"):
        cluster.coordinator.kick("nobody")

    assert cluster.coordinator.control().kicked == ()


def test_samples_of_an_unknown_worker_are_refused_and_not_kept(cluster):
    a, _ = cluster.pair()
    given = (Sample(sequence=1, wall=1.0, round=1, step=1),)
    stranger = a.identity.model_copy(update={"worker_id": "stranger"})

    with pytest.raises(UnknownWorker):
        cluster.coordinator.keep_samples(SamplesRequest(identity=stranger, life=1, samples=given))
    cluster.coordinator.keep_samples(SamplesRequest(identity=a.identity, life=1, samples=given))

    assert [s.worker_id for s in cluster.coordinator.samples.history().samples] == ["a"]


def test_samples_of_a_life_to_come_are_refused(cluster):
    a, _ = cluster.pair()
    given = (Sample(sequence=1, wall=1.0, round=1, step=1),)

    with pytest.raises(ProtocolError, match="life=2 of the samples is after incarnation=1"):
        cluster.coordinator.keep_samples(SamplesRequest(identity=a.identity, life=2, samples=given))


def test_worker_is_heard_when_there_is_no_room_for_its_samples(cluster, monkeypatch):
    a, _ = cluster.pair()
    given = (Sample(sequence=1, wall=1.0, round=1, step=1),)

    def full(*_: object) -> None:
        raise StorageFull

    monkeypatch.setattr(cluster.coordinator.samples, "add", full)
    cluster.clock.advance(seconds=9.0)
    with pytest.raises(StorageFull):
        cluster.coordinator.keep_samples(SamplesRequest(identity=a.identity, life=1, samples=given))
    cluster.run_clock(seconds=2.0)

    assert cluster.coordinator.members() == ["a"]
    assert cluster.coordinator.status().refusals == {"STORAGE_FULL": 1}


# Over HTTP


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served.serving(tmp_path_factory.mktemp("control") / "state") as running:
        yield running


@pytest.fixture
def admin(serving: Served) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {TOKENS[Role.ADMIN]}"}
    with httpx.Client(base_url=serving.url, headers=headers, trust_env=False) as client:
        yield client


def test_metrics_are_prometheus_text(serving, admin):
    serving.worker("metric")

    reply = admin.get("/metrics")

    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = reply.text.splitlines()
    assert "atoll_version 0.0" in lines
    assert 'atoll_worker_live{worker_id="metric"} 1.0' in lines
    assert any(line.startswith("atoll_cpu_seconds_total ") for line in lines)


def test_series_of_a_worker_end_when_it_leaves_or_dies(cluster):
    a, b = cluster.pair()
    cluster.island("c")
    before = series(cluster)
    a.leave()
    cluster.clock.advance(seconds=9.0)
    b.beat()
    cluster.run_clock(seconds=2.0)

    assert (before, series(cluster)) == ({"a", "b", "c"}, {"b"})
    assert [w.worker_id for w in cluster.coordinator.status().workers] == ["a", "b", "c"]


def test_refusals_are_counted_by_code_in_the_metrics(serving, admin):
    httpx.get(f"{serving.url}/status", trust_env=False)

    assert 'atoll_refusals_total{code="UNAUTHENTICATED"}' in admin.get("/metrics").text


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "after=-1", "worker_id=" + "x" * 65])
def test_history_refuses_what_has_no_bound(admin, query):
    assert admin.get(f"/metrics/history?{query}").status_code == 422


def test_order_over_http_and_its_refusal(admin):
    assert admin.post("/control", json={"action": "pause"}).json()["command"]["action"] == "pause"
    assert admin.post("/control", json={"action": "run"}).json()["command"]["action"] == "run"
    assert admin.post("/control", json={"action": "explode"}).status_code == 422
    assert admin.get("/control").json()["command"]["action"] == "run"
