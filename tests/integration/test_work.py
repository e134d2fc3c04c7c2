"""Dispatch: which rows go to whom, what ends a lease, and the proof that each counts once."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from atoll.blobs.directory import DirectoryBlobs
from atoll.coordinator import boot
from atoll.coordinator.members.workers import Registry
from atoll.coordinator.rounds.dispatch import Dispatch
from atoll.coordinator.rounds.rounds import Rounds
from atoll.data.base import dataset_id
from atoll.errors import (
    DatasetMismatch,
    Fenced,
    LeaseLost,
    ManifestMismatch,
    StaleContribution,
    StateDamaged,
    StorageFull,
    UnknownWorker,
)
from atoll.ledger.records import DatasetRecord, EvaluationRecord, LeaseState, QueueRecord
from atoll.proof.balance import EpochBalance
from tests import clusters
from tests.clusters import DATA_IDENTITY, Cluster, HandIsland
from tests.frames import ranges
from tests.ledgers import alone

ROWS_EACH = 6  # of an island in a round
STEPS_BY_CHANCE = 100  # by where units begin; to look at 60 more leases takes several hundred
WORDS = {**DATA_IDENTITY, "rows": 30}
ID = dataset_id(WORDS)
FIRST = f"{ID}/0/0"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Epochs of 30 rows in units of 3; two islands take 12 rows in a round."""
    made = Cluster(tmp_path, {"work.units": 10}, data=WORDS)
    yield made
    made.close()


def spans(cluster: Cluster, number: int) -> list[tuple[str, int, int, int]]:
    """Worker, start, stop and lease epoch of the leases of a round."""
    return [
        (x.worker_id, x.start, x.stop, x.lease_epoch)
        for x in alone(cluster.ledger).leases.of_round(number)
    ]


def totals(report: Any) -> list[tuple[int, int, int, int, int]]:
    return [(e.epoch, e.rows, e.done_once, e.done_twice, e.missing) for e in report.balance]


# Units and epochs


def test_rounds_take_units_in_order_and_split_them(cluster):
    a, b = cluster.pair()

    cluster.rounds(1, a, b)

    assert spans(cluster, 2) == [("a", 12, 18, 1), ("b", 18, 24, 1)]
    assert [(x.unit, x.epoch) for x in alone(cluster.ledger).leases.of_round(2)] == [(4, 0), (6, 0)]


def test_plan_spans_the_end_of_an_epoch_and_begins_a_new_queue(cluster):
    a, b = cluster.pair()

    cluster.rounds(2, a, b)

    assert spans(cluster, 3) == [("a", 24, 30, 1), ("b", 30, 36, 1)]
    assert [queue.epoch for queue in alone(cluster.ledger).queues.all().sound] == [0, 1]


def test_every_row_of_five_epochs_is_done_once(cluster):
    a, b = cluster.pair()

    cluster.rounds(13, a, b)

    report = cluster.audit(with_replay=True)
    assert report.problems == []
    assert totals(report)[:5] == [(epoch, 30, 30, 0, 0) for epoch in range(5)]
    assert [q.done.hex() for q in alone(cluster.ledger).queues.all().sound[:5]] == ["ff03"] * 5


def test_next_unit_after_a_restart_is_the_next_one(cluster):
    """The next rows are the ones that were never issued, not the first unit again."""
    a, b = cluster.pair()
    cluster.rounds(1, a, b)
    [before] = cluster.coordinator.work().datasets

    cluster.restart()

    [after] = cluster.coordinator.work().datasets
    assert (before.rows_issued, before.next_unit) == (24, 8)
    assert after == before
    cluster.rounds(1, a, b)
    assert (
        min(lease.unit for lease in alone(cluster.ledger).leases.of_round(3) if lease.epoch == 0)
        == 8
    )


def test_queue_keeps_its_units_when_the_setting_changes(cluster):
    """The units of a queue are those it was made with, and are told."""
    a, b = cluster.pair()
    cluster.rounds(1, a, b)
    changed = clusters.manifest_for(cluster.layout, {"work.units": 15}, data=WORDS)
    boot.record_manifest(cluster.ledger, changed)
    cluster.restart()

    cluster.rounds(1, a, b)
    for island in (a, b):
        island.adopt(cluster.coordinator.info())
    cluster.rounds(2, a, b)

    assert [queue.units for queue in cluster.coordinator.work().queues] == [10, 15]
    assert cluster.audit().problems == []


# Requests are idempotent


def test_repeated_request_returns_the_same_lease(cluster):
    """A lost reply costs no rows: the same question gets the same answer."""
    a, _ = cluster.pair()
    before = cluster.coordinator.state_hash()

    replies = [a.assignment().ranges for _ in range(3)]

    assert replies[0] == replies[1] == replies[2]
    assert cluster.coordinator.state_hash() == before


def test_repeated_completion_returns_the_same_receipt(cluster):
    a, _ = cluster.pair()
    sent = a.frame()
    first = a.send(sent)
    before = cluster.coordinator.state_hash()

    assert a.send(sent) == first

    assert cluster.coordinator.state_hash() == before


def test_unknown_worker_gets_no_rows(cluster):
    cluster.pair()
    before = cluster.coordinator.state_hash()

    with pytest.raises(UnknownWorker):
        HandIsland(cluster, "stranger").assignment()

    assert cluster.coordinator.state_hash() == before


def test_worker_that_left_gets_no_rows(cluster):
    a, _ = cluster.pair()
    a.leave()
    before = cluster.coordinator.state_hash()

    with pytest.raises(UnknownWorker):
        a.assignment()

    assert cluster.coordinator.state_hash() == before


def test_fenced_worker_gets_no_rows_and_completes_none(cluster):
    a, _ = cluster.pair()
    sent = a.frame()
    HandIsland(cluster, "a").join()
    before = cluster.coordinator.state_hash()

    with pytest.raises(Fenced):
        a.assignment()
    with pytest.raises(Fenced):
        a.send(sent)

    assert cluster.coordinator.state_hash() == before


@pytest.mark.parametrize(
    "changes",
    [
        {"ranges": ranges((0, 5), dataset_id=ID), "rows": 5, "tokens": 20},
        {"ranges": ranges((6, 12), dataset_id=ID)},
        {"ranges": ranges((0, 3), (3, 6), dataset_id=ID)},
        {"ranges": ranges((0, 6), dataset_id="0" * 16)},
    ],
    ids=["fewer", "somebody else's", "cut otherwise", "another dataset"],
)
def test_contribution_that_names_other_rows_than_its_lease_is_refused(cluster, changes):
    a, _ = cluster.pair()
    before = cluster.coordinator.state_hash()

    with pytest.raises(LeaseLost, match="ask for an assignment"):
        a.send(a.frame(**changes))

    assert cluster.coordinator.state_hash() == before


# Leases end


def test_lease_of_a_dead_worker_is_issued_again_with_the_next_epoch(cluster):
    a, b, c = cluster.trio()
    c.beat()
    a.contribute()
    b.contribute()
    cluster.keep_alive(a, b, seconds=12)

    cluster.rounds(2, a, b)

    lost = [x for x in cluster.leases() if x.worker_id == "c"]
    again = [x for x in cluster.leases() if x.lease_epoch == 2]
    assert [x.state for x in lost] == [LeaseState.TAKEN]
    assert [(x.start, x.stop) for x in again] == [(x.start, x.stop) for x in lost]
    assert cluster.audit().problems == []


def test_lease_goes_over_to_a_new_incarnation(cluster):
    a, _ = cluster.pair()
    earlier = a.assignment()
    sent = a.frame(earlier)

    a.join()

    assert a.assignment().ranges == earlier.ranges
    assert spans(cluster, 1) == [("a", 0, 6, 2), ("b", 6, 12, 1)]
    assert a.send(sent).incarnation == 2  # what the earlier life had made still counts


@pytest.fixture
def hurried(tmp_path: Path) -> Iterator[Cluster]:
    """A lease lasts 30 s; two of three close a round."""
    made = Cluster(
        tmp_path,
        {"work.units": 10, "work.lease_seconds": 30.0, "membership.min_workers": 2},
        data=WORDS,
    )
    yield made
    made.close()


def test_worker_that_beats_and_does_not_contribute_loses_its_lease(hurried):
    a, b, c = hurried.trio()
    late = c.frame()
    a.contribute()
    b.contribute()

    before = hurried.keep_alive(a, b, c, seconds=28)
    after = hurried.keep_alive(a, b, c, seconds=8)

    assert (before, after, hurried.version) == (0, 1, 2)
    assert hurried.coordinator.work().expired_leases == 1
    with pytest.raises(StaleContribution):
        c.send(late)
    assert [x for x in spans(hurried, 3) if x[3] == 2] == [("a", 24, 30, 2)]
    assert hurried.audit().problems == []


def test_late_contribution_is_lost_while_its_round_is_open(hurried):
    """All three are late; two of them are enough to lease the rows to again."""
    a, b, c = hurried.trio()
    late = c.frame()
    hurried.keep_alive(a, b, c, seconds=32)
    before = hurried.coordinator.state_hash()

    with pytest.raises(LeaseLost):
        c.send(late)

    assert hurried.coordinator.state_hash() == before


def test_restart_gives_a_lease_its_full_time_again(hurried):
    a, b, c = hurried.trio()
    a.contribute()
    b.contribute()
    hurried.keep_alive(a, b, c, seconds=28)

    hurried.restart()
    for island in (a, b, c):
        island.beat()

    assert hurried.keep_alive(a, b, c, seconds=28) == 0
    assert hurried.keep_alive(a, b, c, seconds=8) == 1


def test_round_that_would_be_short_leases_the_rows_again_to_who_is_there(hurried):
    """A lease that ends never leaves a round that cannot close."""
    a, b = hurried.pair()
    a.contribute()
    hurried.keep_alive(a, b, seconds=32)

    assert spans(hurried, 1) == [("a", 0, 6, 1), ("b", 6, 12, 1), ("b", 6, 12, 2)]
    b.contribute()
    assert hurried.settle() == 1
    assert hurried.audit().problems == []


@pytest.mark.parametrize("policy", ["exactly_once", "at_most_once"])
def test_pause_longer_than_a_lease_costs_nobody_its_rows(tmp_path, policy):
    """Who is kept from training is not late; afterwards a lease has its full time again."""
    cluster = Cluster(tmp_path, {"work.lease_seconds": 30.0, "work.policy": policy}, data=WORDS)
    a, b = cluster.pair()
    cluster.keep_alive(a, b, seconds=20)
    cluster.coordinator.order("pause")
    cluster.keep_alive(a, b, seconds=100)
    cluster.coordinator.order("run")

    cluster.keep_alive(a, b, seconds=28)
    assert cluster.coordinator.work().expired_leases == 0
    assert spans(cluster, 1) == [("a", 0, 6, 1), ("b", 6, 12, 1)]
    cluster.keep_alive(a, b, seconds=8)
    assert cluster.coordinator.work().expired_leases == 2
    cluster.close()


@pytest.mark.parametrize("policy", ["exactly_once", "at_most_once"])
def test_full_disk_for_longer_than_a_lease_costs_nobody_its_rows(tmp_path, monkeypatch, policy):
    """What cannot be handed in is not late; once there is room a lease has its full time again."""
    cluster = Cluster(tmp_path, {"work.lease_seconds": 30.0, "work.policy": policy}, data=WORDS)
    a, b = cluster.pair()
    cluster.keep_alive(a, b, seconds=20)

    def full(*_, **__):
        raise StorageFull("no room in this test")

    with monkeypatch.context() as patch:
        patch.setattr(DirectoryBlobs, "writer", full)
        with pytest.raises(StorageFull):
            a.contribute()
        cluster.keep_alive(a, b, seconds=100)

    cluster.keep_alive(a, b, seconds=28)
    assert cluster.coordinator.work().expired_leases == 0
    assert spans(cluster, 1) == [("a", 0, 6, 1), ("b", 6, 12, 1)]
    cluster.keep_alive(a, b, seconds=8)
    assert cluster.coordinator.work().expired_leases == 2
    cluster.close()


def test_tick_costs_no_more_for_islands_that_wait_for_the_next_round(cluster, monkeypatch):
    asked: list[None] = []
    live = Registry.live

    def counted(self):
        asked.append(None)
        return live(self)

    monkeypatch.setattr(Registry, "live", counted)

    def looks() -> int:
        asked.clear()
        cluster.settle()
        return len(asked)

    cluster.pair()
    cluster.island("c")
    before = looks()
    for name in "defghij":
        cluster.island(name)

    assert looks() == before


def test_message_costs_no_more_after_many_rounds(tmp_path, monkeypatch):
    """Counted in the steps of SQLite's machine: what looks at every lease or round grows."""
    monkeypatch.setattr("atoll.coordinator.shown.status.HISTORY_ROUNDS", 5)
    settings = {"storage.snapshot_every": 10**6}
    cluster = Cluster(tmp_path, settings, data={**WORDS, "rows": 100_000})
    a, b = cluster.pair()
    with cluster.ledger.reading() as t:
        driver = t.connection.driver

    def steps(work: Callable[[], object]) -> int:
        made: list[None] = []
        driver.set_progress_handler(lambda: made.append(None), 1)
        work()
        driver.set_progress_handler(None, 1)
        return len(made)

    def round_steps() -> dict[str, int]:
        evaluation = EvaluationRecord(cluster.version, "a", 3.5, 7)
        alone(cluster.ledger).evaluations.add(evaluation)
        return {
            "join": steps(a.join),
            "contribute": steps(a.contribute),
            "contribute too": steps(b.contribute),
            "close": steps(cluster.settle),
            "ask": steps(a.assignment),
            "beat": steps(b.beat),
            "status": steps(cluster.coordinator.status),
        }

    first = [round_steps() for _ in range(9)]
    last = [round_steps() for _ in range(39)][-9:]

    early, late = ({name: max(r[name] for r in of) for name in of[0]} for of in (first, last))
    assert {name: n for name, n in late.items() if n > early[name] + STEPS_BY_CHANCE} == {}
    assert [name for name, n in early.items() if not n] == ["ask", "beat"]
    cluster.close()


def test_at_most_once_gives_lost_rows_up_and_says_so(tmp_path):
    cluster = Cluster(tmp_path, {"work.units": 10, "work.policy": "at_most_once"}, data=WORDS)
    a, b, c = cluster.trio()
    a.contribute()
    b.contribute()
    c.leave()
    cluster.settle()

    cluster.rounds(6, a, b)

    report = cluster.audit(with_replay=True)
    assert report.problems == []
    assert {x.lease_epoch for x in cluster.leases()} == {1}
    [first, second] = report.balance[:2]
    assert (first.done_once, first.given_up, first.missing) == (24, 6, 6)
    assert (second.done_once, second.missing) == (30, 0)
    assert cluster.coordinator.work().queues[0].rows_given_up == 6
    cluster.close()


# Several datasets, streams


def mixed(*parts: tuple[str, int, int]) -> dict[str, Any]:
    """An identity of datasets by name, rows and weight."""
    return {
        "kind": "mixture",
        "block": clusters.BLOCK,
        "held_out_rows": clusters.HELD_OUT_ROWS,
        "datasets": [
            {"name": name, "weight": weight, "identity": {"kind": name, "rows": rows}}
            for name, rows, weight in parts
        ],
    }


def test_rows_of_several_datasets_follow_their_weights(tmp_path):
    cluster = Cluster(tmp_path, data=mixed(("words", 20, 3), ("code", 1000, 1), ("flood", 0, 2)))
    a, b = cluster.pair()

    cluster.rounds(10, a, b)

    issued = {d.name: (d.weight, d.rows_issued) for d in cluster.coordinator.work().datasets}
    total = sum(rows for _, rows in issued.values())
    assert total == 11 * 2 * ROWS_EACH
    assert issued == {"words": (3, 66), "code": (1, 22), "flood": (2, 44)}
    assert cluster.audit(with_replay=True).problems == []
    cluster.close()


def test_losses_of_several_datasets_are_done_once(tmp_path):
    data = mixed(("words", 20, 3), ("flood", 0, 2))
    cluster = Cluster(tmp_path, {"work.stream_unit_rows": 5}, data=data)
    a, b, c = cluster.trio()
    a.contribute()
    b.contribute()
    c.leave()
    cluster.settle()

    cluster.rounds(6, a, b)

    report = cluster.audit(with_replay=True)
    assert report.problems == []
    assert all(epoch.done_twice == 0 and epoch.reopened == 0 for epoch in report.balance)
    assert sum(epoch.leased for epoch in report.balance) == 2 * ROWS_EACH
    cluster.close()


def test_stream_has_one_queue_without_an_end(tmp_path):
    data = {**DATA_IDENTITY, "rows": 0}
    cluster = Cluster(tmp_path, {"work.stream_unit_rows": 5}, data=data)
    a, b = cluster.pair()

    cluster.rounds(5, a, b)

    [queue] = cluster.coordinator.work().queues
    assert (queue.epoch, queue.length, queue.unit_rows, queue.units) == (0, 0, 5, 15)
    assert (queue.units_issued, queue.units_done, queue.rows_done) == (15, 12, 60)
    [balance] = cluster.audit().balance
    assert (balance.rows, balance.done_once, balance.leased, balance.holds) == (72, 60, 12, True)
    cluster.close()


# Persistence


def test_data_of_another_length_is_refused_at_registration_by_both(cluster):
    stranger = HandIsland(cluster, "stranger")
    before = cluster.coordinator.state_hash()

    with pytest.raises(DatasetMismatch, match=r"data.rows .* is 31, the run's is 30"):
        cluster.coordinator.register(stranger.register_request(data_identity={**WORDS, "rows": 31}))

    assert cluster.coordinator.state_hash() == before


def test_one_of_several_datasets_with_another_length_is_refused_by_both(tmp_path):
    cluster = Cluster(tmp_path, data=mixed(("words", 20, 3), ("code", 50, 1)))
    stranger = HandIsland(cluster, "stranger")
    other = mixed(("words", 20, 3), ("code", 51, 1))

    with pytest.raises(DatasetMismatch, match=r"data.rows .* is 51, the run's is 50 of 'code'"):
        cluster.coordinator.register(stranger.register_request(data_identity=other))

    cluster.close()


@pytest.mark.parametrize(
    "theirs",
    [
        mixed(("words", 21, 2), ("code", 50, 1)),
        mixed(("words", 20, 3)),
        {**mixed(), "datasets": [None, {"identity": 7}, {}]},
        {**mixed(), "datasets": "words"},
        {**WORDS, "extra": float("nan")},
    ],
    ids=["other weight too", "fewer", "no datasets", "no list", "one"],
)
def test_other_data_than_several_datasets_is_refused(tmp_path, theirs):
    cluster = Cluster(tmp_path, data=mixed(("words", 20, 3), ("code", 50, 1)))
    stranger = HandIsland(cluster, "stranger")

    with pytest.raises(ManifestMismatch, match="data"):
        cluster.coordinator.register(stranger.register_request(data_identity=theirs))

    cluster.close()


def test_data_of_another_length_is_not_dispatched(cluster):
    clusters.tamper(cluster.ledger, "datasets", {"dataset_id": ID}, length=31)

    with pytest.raises(DatasetMismatch, match="has 30 rows here and 31 in the ledger"):
        Dispatch(cluster.ledger, cluster.manifest)


def test_queues_of_a_dataset_that_is_gone_harm_nothing(cluster):
    a, b = cluster.pair()
    cluster.rounds(1, a, b)
    alone(cluster.ledger).datasets.add([DatasetRecord("0" * 16, "gone", 9, 1)])
    alone(cluster.ledger).queues.open([QueueRecord("0" * 16, 0, 0, 9, 3)])

    cluster.restart()
    cluster.rounds(2, a, b)

    found = cluster.coordinator.work()
    assert [(d.name, d.current) for d in found.datasets] == [("gone", False), ("by hand", True)]
    assert cluster.audit().problems == []


DAMAGES: Mapping[str, dict[str, object]] = {
    "unreadable key": {"name": "?"},
    "missing field": {"units": None},
    "bitmap length": {"issued": b"\x00" * 7},
}


@pytest.mark.parametrize("changes", DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_queue_is_named_everywhere_and_its_rows_go_on(cluster, changes, caplog):
    a, b = cluster.pair()
    cluster.rounds(1, a, b)
    clusters.tamper(cluster.ledger, "queues", {"name": FIRST}, **changes)
    name = changes.get("name", FIRST)

    cluster.restart()
    cluster.rounds(4, a, b)

    assert [r.__dict__["queue"] for r in caplog.records if "queue" in r.__dict__] == [name]
    assert cluster.coordinator.status().refused_queues == (name,)
    assert [entry.name for entry in cluster.coordinator.work().damaged] == [name]
    report = cluster.audit(with_replay=True)
    assert [problem.what for problem in report.problems] == [f"queue {name}"]
    assert totals(report)[0] == (0, 30, 30, 0, 0)


# The audit bites


def test_audit_names_what_is_open_of_a_run_under_way(cluster):
    a, b = cluster.pair()
    cluster.rounds(1, a, b)
    a.contribute()

    [epoch] = cluster.audit().balance

    assert epoch == EpochBalance(
        dataset_id=ID,
        name="by hand",
        epoch=0,
        rows=30,
        done_once=18,
        done_twice=0,
        missing=12,
        open=12,
        leased=6,
        reopened=0,
        unissued=6,
        given_up=0,
    )


def test_report_is_plain_json(cluster):
    a, b = cluster.pair()
    cluster.rounds(1, a, b)

    shown = json.loads(json.dumps(cluster.audit().as_json()))

    assert shown["balance"][0]["done_once"] == 12
    assert shown["clean"] is True


def _twice(cluster: Cluster) -> None:
    """Round 2 of `b` says it was trained on the rows of round 1 of `b`."""
    clusters.tamper(cluster.ledger, "leases", {"round": 2, "worker_id": "b"}, start=6, stop=12)


def _missing(cluster: Cluster) -> None:
    clusters.remove(cluster.ledger, "leases", round=2, worker_id="b")


BALANCES = {
    "done twice": (_twice, "6 rows are done twice; 6 are missing, of which 0 are open"),
    "missing": (_missing, "0 rows are done twice; 6 are missing, of which 0 are open"),
}


@pytest.mark.parametrize(("damage", "says"), BALANCES.values(), ids=BALANCES.keys())
def test_row_balance_that_does_not_hold_fails_the_audit(cluster, damage, says):
    a, b = cluster.pair()
    cluster.rounds(3, a, b)

    damage(cluster)

    report = cluster.audit()
    found = [p.detail for p in report.problems if p.what == f"row balance of {ID} epoch 0"]
    assert [detail.startswith(says) for detail in found] == [True]
    assert not report.clean


def test_frame_that_names_other_rows_than_its_leases_fails_the_audit(cluster):
    """Leases swapped between two islands: every count and every row balance holds."""
    a, b = cluster.pair()
    cluster.rounds(2, a, b)
    clusters.tamper(cluster.ledger, "leases", {"round": 2, "worker_id": "a"}, start=100, stop=106)
    clusters.tamper(cluster.ledger, "leases", {"round": 2, "worker_id": "b"}, start=12, stop=18)
    clusters.tamper(cluster.ledger, "leases", {"round": 2, "worker_id": "a"}, start=18, stop=24)

    problems = [(p.round, p.what) for p in cluster.audit().problems]

    assert problems == [(2, "ranges of a"), (2, "ranges of b")]


def test_bitmap_that_disagrees_with_the_leases_fails_the_audit(cluster):
    a, b = cluster.pair()
    cluster.rounds(1, a, b)
    clusters.tamper(cluster.ledger, "queues", {"name": FIRST}, done=b"\x07\x00")

    [problem] = cluster.audit().problems

    assert (problem.what, problem.detail) == (
        f"queue {FIRST}",
        "its bitmap 'done' and the leases disagree from unit 3 on",
    )


def test_queue_that_is_gone_fails_the_audit(cluster):
    a, b = cluster.pair()
    cluster.rounds(1, a, b)
    clusters.remove(cluster.ledger, "queues", name=FIRST)

    [problem] = cluster.audit().problems

    assert problem.detail == "leases lie in it and it has no entry"


def test_cursor_that_the_leases_do_not_reach_stops_the_plan(cluster):
    """Rows would be issued twice, or never."""
    a, b = cluster.pair()
    cluster.rounds(1, a, b)
    clusters.tamper(cluster.ledger, "rounds", {"round": 2}, cursor=12)
    cluster.coordinator.rounds.refresh()
    a.contribute()
    b.contribute()

    with pytest.raises(StateDamaged, match=r"leases reach row 24 .* cursor=12"):
        cluster.settle()


# What an operator sees


def test_work_tells_the_queues_as_json(cluster):
    a, b = cluster.pair()
    cluster.rounds(1, a, b)
    a.contribute()

    shown = json.loads(cluster.coordinator.work().model_dump_json())

    assert (shown["policy"], shown["left_off"], shown["damaged"]) == ("exactly_once", 0, [])
    [queue] = shown["queues"]
    assert (queue["issued"], queue["done"]) == ("ff00", "3f00")
    assert (queue["units"], queue["units_issued"], queue["units_done"]) == (10, 8, 6)
    assert (queue["rows_done"], queue["rows_leased"], queue["rows_open"]) == (18, 6, 0)
    empty = {"reopened": 0, "given_up": 0}
    assert queue["workers"] == [
        {"worker_id": "a", "done": 12, "leased": 0, **empty},
        {"worker_id": "b", "done": 6, "leased": 6, **empty},
    ]


def test_work_shows_the_newest_queue_of_every_dataset(tmp_path, monkeypatch):
    """A short one has many more epochs, and a stream only ever one."""
    monkeypatch.setattr("atoll.coordinator.shown.queues.MAX_QUEUES", 4)
    data = mixed(("words", 3, 1), ("code", 500, 1), ("flood", 0, 1))
    cluster = Cluster(tmp_path, data=data)
    cluster.rounds(6, *cluster.pair())

    found = cluster.coordinator.work()

    names = {d.dataset_id: d.name for d in found.datasets}
    shown = sorted((names[queue.dataset_id], queue.epoch) for queue in found.queues)
    assert shown == [("code", 0), ("flood", 0), ("words", 8), ("words", 9)]
    assert found.left_off == 8
    cluster.close()


def test_work_is_told_for_every_seed_that_a_run_may_have(tmp_path):
    cluster = Cluster(tmp_path, {"seed": 2**63 - 1}, data=WORDS)
    cluster.pair()

    [queue] = cluster.coordinator.work().queues

    assert queue.shuffle_seed == 2**63 - 1
    cluster.close()


def test_work_shows_the_newest_queues_and_says_how_many_it_left_off(cluster, monkeypatch):
    monkeypatch.setattr("atoll.coordinator.shown.queues.MAX_QUEUES", 2)
    a, b = cluster.pair()
    cluster.rounds(8, a, b)

    found = cluster.coordinator.work()

    assert ([queue.epoch for queue in found.queues], found.left_off) == ([2, 3], 2)


def test_lease_that_ends_between_check_and_record_is_lost(hurried, monkeypatch):
    """The lease ends while the last bytes are synced: the record is refused."""
    a, b, c = hurried.trio()
    a.contribute()
    b.contribute()
    accept = Rounds.accept

    def ending(self, *given):
        alone(hurried.ledger).rounds.expire(2, ["c"])
        self.refresh()
        return accept(self, *given)

    monkeypatch.setattr(Rounds, "accept", ending)
    hurried.restart()

    with pytest.raises(LeaseLost):
        c.contribute()

    assert [x.worker_id for x in alone(hurried.ledger).contributions.of_round(2)] == ["a", "b"]
