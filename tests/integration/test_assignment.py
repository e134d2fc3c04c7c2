"""What an island is told to do next, and what the coordinator takes in besides contributions."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from atoll.coordinator.rounds.rounds import Rounds
from atoll.errors import (
    AtollError,
    Evicted,
    Fenced,
    LayoutMismatch,
    ManifestMismatch,
    NotReady,
    UnknownWorker,
    WorkerTaken,
    WrongRound,
)
from atoll.protocol.messages import (
    AssignmentRequest,
    EvaluationReport,
    HeartbeatRequest,
    Identity,
    Telemetry,
)
from atoll.sums import digest as digests
from tests import clusters
from tests.clusters import SMALL, Cluster, HandIsland, TrackingIsland

OTHER = "f" * 64


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


# Settings


def test_info_is_the_whole_manifest_and_its_hash(cluster):
    """The coordinator is the only authority: an island takes every setting from here."""
    info = cluster.coordinator.info()

    assert info.manifest() == cluster.manifest
    assert info.manifest_sha256 == cluster.manifest.sha256() == info.manifest().sha256()
    assert (info.settings_authority, info.run_id) == ("server", clusters.RUN_ID)
    assert info.model_hash == SMALL.digest


def test_info_reads_back_from_its_json(cluster):
    info = cluster.coordinator.info()

    assert type(info).model_validate_json(info.model_dump_json()) == info


# Registration


def test_other_layout_is_refused_at_registration(cluster):
    """The island learns of it before it has trained anything."""
    request = HandIsland(cluster, "a").register_request(layout_digest=OTHER)
    before = cluster.coordinator.state_hash()

    with pytest.raises(LayoutMismatch, match="names, shapes and dtypes"):
        cluster.coordinator.register(request)

    assert cluster.coordinator.state_hash() == before


@pytest.mark.parametrize(
    ("changes", "field"), [({"rows": 1001}, r"data\.rows"), ({"kind": "text"}, r"data\.kind")]
)
def test_other_data_is_refused_by_the_fields_name(cluster, changes, field):
    request = HandIsland(cluster, "a").register_request(
        data_identity={**clusters.DATA_IDENTITY, **changes}
    )
    before = cluster.coordinator.state_hash()

    with pytest.raises(ManifestMismatch, match=field):
        cluster.coordinator.register(request)

    assert cluster.coordinator.state_hash() == before


def test_register_whose_reply_was_lost_is_simply_repeated(cluster):
    """The same island gets no 409, and its lease is still its own."""
    a, _ = cluster.pair()
    leased = a.assignment().ranges

    a.join()

    assert a.identity.incarnation == 2
    assert a.assignment().ranges == leased


def test_second_live_process_with_another_key_is_refused(cluster):
    cluster.island("a")

    with pytest.raises(WorkerTaken):
        cluster.island("a", key=OTHER)


@pytest.mark.parametrize("worker_id", ["", "a/b", "a b", "x" * 65, "ä", "../a", "a\n"])
def test_worker_id_outside_its_rule_is_refused(cluster, worker_id):
    with pytest.raises(ValidationError):
        HandIsland(cluster, "a").register_request(worker_id=worker_id)


def test_registration_tells_the_version(cluster):
    a, _ = cluster.pair()

    reply = cluster.coordinator.register(a.register_request())

    assert (reply.version, reply.digest) == (0, cluster.published_digest)


# What next


def test_island_without_weights_is_told_to_fetch_them(cluster):
    a, _ = cluster.pair()

    found = a.ask()

    assert (found.action, found.version, found.digest) == ("fetch", 0, cluster.published_digest)


def test_island_with_the_published_weights_is_given_its_rows(cluster):
    a, b = cluster.pair()

    found = [a.assignment(), b.assignment()]

    assert [x.action for x in found] == ["train", "train"]
    assert [[(r.start, r.stop) for r in x.ranges] for x in found] == [[(0, 6)], [(6, 12)]]
    assert [(x.round, x.num_planned, x.global_tokens) for x in found] == [(1, 2, 0)] * 2


def test_global_tokens_count_what_was_accepted_before_the_round(cluster):
    a, b = cluster.pair()
    cluster.rounds(2, a, b)

    assert a.assignment().global_tokens == 2 * 2 * 6 * clusters.BLOCK


def test_assignment_asked_twice_is_the_same(cluster):
    """A lost reply costs no rows: the same question gets the same answer."""
    a, _ = cluster.pair()
    before = cluster.coordinator.state_hash()

    assert a.assignment() == a.assignment()
    assert cluster.coordinator.state_hash() == before


def test_island_whose_weights_differ_is_named_and_sent_to_fetch(cluster, caplog):
    a, _ = cluster.pair()

    with caplog.at_level(logging.WARNING, "atoll"):
        found = a.ask(version=0, digest=OTHER)

    assert found.action == "fetch"
    assert cluster.coordinator.status().resyncs == 1
    [record] = [
        r for r in caplog.records if r.message == "worker holds other weights, sent to fetch"
    ]
    assert (record.worker, record.digest) == ("a", OTHER)


def test_island_of_an_earlier_version_fetches_without_being_counted(cluster):
    a, b = cluster.pair()
    digest = cluster.published_digest
    cluster.rounds(1, a, b)

    found = a.ask(version=0, digest=digest)

    assert (found.action, found.version) == ("fetch", 1)
    assert cluster.coordinator.status().resyncs == 0


def test_island_waits_after_its_contribution(cluster):
    a, _ = cluster.pair()
    a.contribute()

    assert a.assignment().action == "wait"


def test_island_is_told_when_the_run_is_over(tmp_path):
    cluster = Cluster(tmp_path, {"stop.rounds": 1})
    a, b = cluster.pair()
    cluster.rounds(1, a, b)

    found = a.assignment()

    assert (found.action, found.reason) == ("stop", "the run is finished")


def test_finished_run_still_sends_its_last_weights_first(tmp_path):
    cluster = Cluster(tmp_path, {"stop.rounds": 1})
    a, b = cluster.pair()
    cluster.rounds(1, a, b)

    assert a.ask(version=0, digest=OTHER).action == "fetch"


# Signs of life


def test_evicted_worker_learns_at_its_next_heartbeat(cluster):
    """It is told to register, and does not train on for nothing."""
    a, _ = cluster.pair()
    a.leave()

    with pytest.raises(UnknownWorker, match="register first"):
        a.beat()


def test_worker_taken_for_dead_is_told_and_is_live_again_once_it_registers(cluster):
    a, _ = cluster.pair()
    cluster.run_clock(seconds=60, tick_seconds=1.0)
    dead = cluster.coordinator.members()

    with pytest.raises(
        Evicted, match=r"taken for dead, since nothing was heard of it for 1\d\.\d s"
    ):
        a.beat()
    a.join()

    assert dead == []
    assert cluster.coordinator.members() == ["a"]
    assert a.assignment().action == "train"


def test_heartbeat_leaves_the_durable_state_alone(cluster):
    a, _ = cluster.pair()
    before = cluster.coordinator.state_hash()

    a.beat()

    assert cluster.coordinator.state_hash() == before


def test_status_shows_what_a_worker_told(cluster):
    a, _ = cluster.pair()
    told = Telemetry(round=1, step=2, tokens=3, tokens_per_second=4.0, loss=5.0)
    cluster.clock.advance(seconds=3)

    cluster.coordinator.heartbeat(HeartbeatRequest(identity=a.identity, telemetry=told))
    cluster.clock.advance(seconds=1)

    shown = {w.worker_id: w for w in cluster.coordinator.status().workers}
    assert (shown["a"].telemetry, shown["a"].seconds_since_heard) == (told, 1.0)
    assert (shown["b"].seconds_since_heard, shown["b"].live) == (4.0, True)


def test_upload_in_progress_is_a_sign_of_life(cluster):
    a, _ = cluster.pair()
    sent = a.frame()
    stream = cluster.coordinator.begin_upload(a.request(sent))
    cluster.clock.advance(seconds=9)
    cluster.coordinator.write_upload(stream, sent.data[:100])
    cluster.clock.advance(seconds=9)

    assert cluster.coordinator.members() == ["a"]


def test_download_in_progress_is_a_sign_of_life(cluster):
    a, _ = cluster.pair()
    cluster.clock.advance(seconds=9)
    cluster.coordinator.sent(a.identity, 1000)
    cluster.clock.advance(seconds=9)

    assert cluster.coordinator.members() == ["a"]
    assert cluster.coordinator.status().bytes_sent == 1000


@pytest.mark.parametrize(
    "message",
    [
        lambda c, i: c.coordinator.deregister(i),
        lambda c, i: c.coordinator.heartbeat(HeartbeatRequest(identity=i)),
        lambda c, i: c.coordinator.download(i, round_number=0, have_digest=""),
        lambda c, i: c.coordinator.evaluation(
            EvaluationReport(identity=i, version=0, loss_sum=1.0, tokens=1)
        ),
    ],
    ids=["deregister", "heartbeat", "download", "evaluation"],
)
@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"incarnation": 7}, "FENCED"),
        ({"island_key": OTHER}, "FENCED"),
        ({"worker_id": "nobody"}, "UNKNOWN_WORKER"),
        ({"manifest_sha256": OTHER}, "MANIFEST_MISMATCH"),
        ({"run_id": "another"}, "MANIFEST_MISMATCH"),
    ],
)
def test_message_of_somebody_else_is_refused_and_changes_nothing(cluster, message, changes, code):
    """Every message that does something proves who sends it."""
    a, _ = cluster.pair()
    before = cluster.coordinator.state_hash()
    identity: Identity = a.identity.model_copy(update=changes)

    with pytest.raises(AtollError) as refused:
        message(cluster, identity)

    assert refused.value.code == code
    assert cluster.coordinator.state_hash() == before
    assert cluster.coordinator.members() == ["a", "b"]


def test_fenced_worker_gets_no_assignment(cluster):
    a, _ = cluster.pair()
    old = a.identity
    a.join()
    identity = old.model_copy(update={"generation": cluster.coordinator.generation})

    with pytest.raises(Fenced):
        cluster.coordinator.assignment(AssignmentRequest(identity=identity))


# Downloads


def test_download_is_the_published_weights_bit_for_bit(cluster):
    a = TrackingIsland(cluster, "a").join()

    fetched = a.fetch()

    assert digests.digest(SMALL, fetched).root == cluster.published_digest


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_download_never_mixes_two_versions(tmp_path, codec):
    """The weights are ahead of the ledger for a moment; nobody is served from them then."""
    cluster = Cluster(tmp_path, {"download.codec": codec})
    a, b = cluster.pair()
    late = TrackingIsland(cluster, "late").join()
    a.contribute()
    b.contribute()
    contributions = cluster.freeze()
    cluster.coordinator.weights.compute(1, contributions)

    with pytest.raises(NotReady, match="ask again"):
        late.fetch()

    cluster.restart().settle()
    late.weights.forget()
    late.fetch()
    assert late.weights.digest == cluster.published_digest


def test_download_begun_before_a_round_closed_stays_whole(cluster):
    a, b = cluster.pair()
    before = cluster.coordinator.download(a.identity, round_number=0, have_digest="")
    digest = cluster.published_digest
    half = before.read(0, before.nbytes // 2)
    cluster.rounds(1, a, b)
    late = TrackingIsland(cluster, "late").join()
    receiver = late.weights.receive()

    receiver.feed(half + before.read(before.nbytes // 2, before.nbytes))
    receiver.finish()

    assert late.weights.digest == digest


# Evaluation


def evaluated(tmp_path: Path, **changes) -> Cluster:
    return Cluster(tmp_path, {"evaluate.every": 2, "membership.min_workers": 3, **changes})


def report(island: HandIsland, version: int, loss_sum: float, tokens: int) -> None:
    island.coordinator.evaluation(
        EvaluationReport(
            identity=island.identity, version=version, loss_sum=loss_sum, tokens=tokens
        )
    )


def test_every_held_out_row_falls_to_exactly_one_island(tmp_path):
    cluster = evaluated(tmp_path)
    islands = [cluster.island(name) for name in "cab"]

    tasks = [island.assignment().evaluation for island in islands]

    rows = sorted(row for task in tasks if task for row in range(task.start, task.stop))
    assert rows == list(range(clusters.HELD_OUT_ROWS))


def test_evaluation_is_asked_for_every_so_many_rounds_and_at_the_end(tmp_path):
    cluster = evaluated(tmp_path, **{"stop.rounds": 3})
    islands = [cluster.island(name) for name in "abc"]
    asked = [islands[0].assignment().evaluation is not None]
    report(islands[0], 0, 3.0, 4)

    for _ in range(3):
        cluster.rounds(1, *islands)
        asked.append(islands[0].assignment().evaluation is not None)

    assert asked == [True, False, True, True]


def test_reported_share_is_not_asked_for_again(tmp_path):
    cluster = evaluated(tmp_path)
    a, b, _ = (cluster.island(name) for name in "abc")

    report(a, 0, 3.0, 4)

    assert a.assignment().evaluation is None
    assert b.assignment().evaluation is not None


def test_loss_is_the_sum_over_the_tokens_that_were_evaluated(tmp_path):
    """One division, at the end, by the honest count."""
    cluster = evaluated(tmp_path)
    a, b, _ = (cluster.island(name) for name in "abc")

    report(a, 0, 12.0, 4)
    report(b, 0, 2.0, 3)

    assert cluster.coordinator.status().history[0].evaluation_loss == 2.0


def test_report_sent_again_counts_once(tmp_path):
    cluster = evaluated(tmp_path)
    a, b, _ = (cluster.island(name) for name in "abc")
    report(a, 0, 12.0, 4)

    report(a, 0, 12.0, 4)
    report(b, 0, 2.0, 3)

    assert cluster.coordinator.status().history[0].evaluation_loss == 2.0


@pytest.mark.parametrize(
    ("version", "loss_sum", "tokens", "code"),
    [
        (1, 1.0, 4, "WRONG_ROUND"),
        (2**50, 1.0, 4, "WRONG_ROUND"),
        (0, 1.0, 9, "CONTRIBUTION"),
        (0, 1e308, 8, "CONTRIBUTION"),
        (0, -1e308, 8, "CONTRIBUTION"),
    ],
)
def test_report_of_what_was_not_asked_for_is_refused(tmp_path, version, loss_sum, tokens, code):
    """Each of three evaluates 8 of 24 held-out tokens, and version 1 is not there yet."""
    cluster = evaluated(tmp_path)
    a, _, _ = (cluster.island(name) for name in "abc")
    before = cluster.coordinator.state_hash()

    with pytest.raises(AtollError) as refused:
        report(a, version, loss_sum, tokens)

    assert refused.value.code == code
    assert cluster.coordinator.state_hash() == before


def test_report_of_a_version_before_counts_when_it_was_asked_for_and_else_not(tmp_path):
    """An island that is slow to evaluate reports when the others have gone on."""
    cluster = evaluated(tmp_path, **{"evaluate.every": 1})
    a, b, c = (cluster.island(name) for name in "abc")
    a.assignment()
    cluster.rounds(1, a, b, c)
    late = cluster.island("late")

    report(a, 0, 12.0, 8)
    with pytest.raises(WrongRound, match="was last asked for nothing"):
        report(late, 0, 1.0, 1)

    assert cluster.coordinator.status().history[0].evaluation_loss == 1.5


def test_report_counts_when_the_coordinator_restarted_after_it_asked(tmp_path):
    cluster = evaluated(tmp_path)
    a, _, _ = (cluster.island(name) for name in "abc")
    assert a.assignment().evaluation is not None
    cluster.restart()

    report(a, 0, 12.0, 8)

    assert cluster.coordinator.status().history[0].evaluation_loss == 1.5


def test_no_evaluation_is_asked_for_when_it_is_off(cluster):
    a, _ = cluster.pair()

    assert a.assignment().evaluation is None


# People


def test_status_tells_the_runs_state(tmp_path):
    cluster = Cluster(tmp_path, {"stop.rounds": 1})
    states = [cluster.coordinator.status().state]
    a, b = cluster.pair()
    states.append(cluster.coordinator.status().state)
    cluster.rounds(1, a, b)
    states.append(cluster.coordinator.status().state)

    assert states == ["waiting", "training", "finished"]


def test_status_shows_each_rounds_loss_over_its_tokens(cluster):
    a, b = cluster.pair()
    cluster.rounds(2, a, b)

    history = cluster.coordinator.status().history

    assert [r.round for r in history] == [0, 1, 2]
    assert [r.train_loss for r in history] == [None, 2.0, 2.0]
    assert [r.tokens for r in history] == [0, 48, 48]
    assert history[-1].digest == cluster.digest


def test_listeners_hear_of_every_change_that_may_concern_a_waiting_island(cluster):
    heard: list[int] = []
    cluster.coordinator.on_change(lambda: heard.append(1))
    counts = []

    a, b = cluster.pair()
    counts.append(len(heard))
    a.contribute()
    b.contribute()
    counts.append(len(heard))
    cluster.settle()
    counts.append(len(heard))
    a.leave()
    counts.append(len(heard))

    assert counts == sorted(set(counts))
    assert counts[0] >= 2


def test_shares_of_a_version_stay_when_its_round_is_filled_up(tmp_path):
    """A worker that joins a short round must not cut rows anew that others have evaluated."""
    cluster = evaluated(tmp_path, **{"membership.min_workers": 2})
    a, b = cluster.island("a"), cluster.island("b")
    before = a.assignment().evaluation
    b.leave()
    c = cluster.island("c")

    shares = [island.assignment().evaluation for island in (a, c)]

    assert shares == [before, None]


def test_answer_of_another_version_is_not_given_when_a_round_closes_meanwhile(cluster, monkeypatch):
    a, b = cluster.pair()
    a.send(a.frame())
    b.send(b.frame())
    next_of = Rounds.next_of

    def close_first(self, *args, **more):
        cluster.coordinator.advance()
        return next_of(self, *args, **more)

    monkeypatch.setattr(Rounds, "next_of", close_first)

    assert a.assignment().action == "fetch"


def test_wait_tells_the_rows_of_the_next_round_while_one_is_computed(cluster):
    """They are planned when the round before it freezes, so an island reads them meanwhile."""
    a, b = cluster.pair()
    for island in (a, b):
        island.contribute()
    cluster.freeze()

    waiting = a.assignment()

    cluster.settle()
    training = a.assignment()
    assert (waiting.action, waiting.upcoming, training.action) == ("wait", 2, "train")
    assert waiting.upcoming_ranges == training.ranges
    assert (training.round, training.upcoming) == (2, 0)


def test_request_that_knows_the_next_rows_waits_on(cluster):
    a, b = cluster.pair()
    for island in (a, b):
        island.contribute()
    cluster.freeze()
    reply = a.assignment()
    request = AssignmentRequest(identity=a.identity)

    assert request.is_answered(reply)
    assert not request.model_copy(update={"upcoming": 2}).is_answered(reply)


def test_newcomer_is_told_no_rows_of_a_round_it_is_not_planned_in(cluster):
    a, b = cluster.pair()
    for island in (a, b):
        island.contribute()
    cluster.freeze()

    assert cluster.island("c").assignment().upcoming == 0
