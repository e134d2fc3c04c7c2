"""Asynchronous runs: who is given rows when, which round takes what, and that it all replays."""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from atoll.cli.app import app
from atoll.clock import ManualClock
from atoll.coordinator import boot
from atoll.errors import (
    ConfigError,
    LeaseLost,
    StaleContribution,
    StorageFull,
    WrongBase,
    WrongRound,
)
from atoll.ledger import engines
from atoll.ledger.records import ContributionRecord, LeaseState, RoundState
from atoll.ledger.sqlite import truncation
from atoll.ledger.tables.rounds import RoundTable
from atoll.ledger.tables.transaction import Transaction
from atoll.protocol.manifest import Difference
from atoll.protocol.messages import Assignment, EvaluationReport, HeartbeatRequest, Telemetry
from atoll.versions import manifest_change, recorded, weights
from tests import clusters, following
from tests.clusters import BLOCK, HELD_OUT_ROWS, WIDE, Cluster, Frame, HandIsland, TrackingIsland
from tests.ledgers import alone
from tests.tiny import TABLE, simulate

SETTINGS: dict[str, Any] = {
    "mode": "async",
    "max_staleness": 2,
    "outer.optimizer": "delayed_nesterov",
    "outer.delay": 2,
    "download.codec": "bf16",
    "membership.min_workers": 1,
}
ROWS = 2 * 3  # of a lease: steps times batch


def made(home: Path, **changes: Any) -> Cluster:
    return Cluster(home, {**SETTINGS, **changes})


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A round closes with its first contribution; the second island is one round late or more."""
    found = made(tmp_path)
    yield found
    found.close()


def late(cluster: Cluster, rounds: int) -> tuple[HandIsland, HandIsland, Frame]:
    """Islands a and b, and b's contribution from version 0 after so many rounds of a."""
    a, b = cluster.pair()
    sent = b.frame(b.assignment())
    for _ in range(rounds):
        step(a)
    return a, b, sent


def step(island: HandIsland) -> ContributionRecord:
    """One piece of work from the newest version, and the round that it closes."""
    found = island.contribute()
    assert island.cluster.settle() == 1
    return found


def states(cluster: Cluster) -> list[RoundState]:
    return [r.state for r in alone(cluster.ledger).rounds.all()]


def leases(cluster: Cluster) -> dict[tuple[int, str], LeaseState]:
    return {(x.round, x.worker_id): x.state for x in cluster.leases()}


# Who is given rows


def test_run_begins_with_min_workers_and_gives_rows_to_whoever_asks(tmp_path):
    cluster = made(tmp_path, **{"membership.min_workers": 2})
    a = cluster.island("a")
    assert a.assignment().action == "wait" and states(cluster) == []
    b = cluster.island("b")

    assert states(cluster) == [RoundState.OPEN, RoundState.OPEN]
    assert cluster.leases() == []
    given = b.assignment()

    assert (given.action, given.round, given.version, given.steps) == ("train", 1, 0, 2)
    assert sum(map(len, given.ranges)) == ROWS
    assert leases(cluster) == {(1, "b"): LeaseState.LEASED}


def test_island_that_asks_again_is_told_the_same_rows(cluster):
    a, _ = cluster.pair()

    assert a.assignment() == a.assignment()
    assert len(cluster.leases()) == 1


def test_base_is_leased_once_to_an_island(cluster):
    """It waits for the next version once its contribution is in."""
    a, b = cluster.pair()
    b.assignment()
    a.contribute()

    assert a.assignment().action == "wait"

    cluster.settle()
    assert a.assignment().round == 2


def test_island_waits_while_the_round_after_its_version_is_computed(cluster):
    a, b = cluster.pair()
    a.contribute()
    cluster.freeze()

    assert b.assignment().action == "wait"
    assert cluster.settle() == 1
    assert b.assignment().round == 2


def test_lease_says_how_many_tokens_were_folded_before_it(cluster):
    a, _ = cluster.pair()
    first = a.assignment()
    step(a)

    second = a.assignment()

    assert [first.global_tokens, second.global_tokens] == [0, ROWS * BLOCK]
    assert [r.tokens for r in alone(cluster.ledger).rounds.all()][:2] == [0, ROWS * BLOCK]
    assert second.num_planned == 1


def test_what_is_left_of_an_older_version_ends_when_an_island_asks_from_a_newer_one(cluster):
    a, b = cluster.pair()
    b.assignment()
    step(a)

    given = b.assignment()

    assert given.round == 2
    found = leases(cluster)
    assert (found[1, "b"], found[2, "b"]) == (LeaseState.REOPENED, LeaseState.LEASED)


def test_no_rows_are_given_while_the_run_is_paused(cluster):
    a, _ = cluster.pair()
    cluster.coordinator.order("pause")

    assert a.assignment().action == "wait" and cluster.leases() == []

    cluster.coordinator.order("run")
    assert a.assignment().action == "train"


def test_rows_that_find_no_room_are_refused_and_given_when_there_is_some(cluster, monkeypatch):
    a, _ = cluster.pair()
    before = cluster.coordinator.state_hash()

    def full(*_: object) -> None:
        raise StorageFull("no room")

    with monkeypatch.context() as patch:
        patch.setattr(RoundTable, "extend", full)
        with pytest.raises(StorageFull):
            a.assignment()

    assert cluster.coordinator.state_hash() == before
    assert cluster.coordinator.status().storage_full
    assert a.assignment().action == "train"


# Which round takes what


def test_contribution_joins_the_open_round_and_records_how_stale_it_is(cluster):
    _, b, sent = late(cluster, 2)

    found = b.send(sent)

    assert (found.round, found.first, found.applied) == (1, 1, 3)
    assert cluster.settle() == 1
    assert cluster.audit(with_replay=True).problems == []
    assert cluster.audit().staleness == 2
    assert cluster.coordinator.status().history[-1].staleness == 2


def test_base_that_is_not_the_newest_is_taken_and_another_is_refused(cluster):
    """The contribution itself is from version 0, which is two versions back."""
    _, b, sent = late(cluster, 2)
    newest = cluster.published_digest
    before = cluster.coordinator.state_hash()
    given = Assignment(
        action="train",
        version=0,
        digest=newest,
        round=1,
        ranges=tuple(x.row_range for x in cluster.leases() if x.worker_id == "b"),
    )

    with pytest.raises(WrongBase):
        b.send(b.frame(given))

    assert cluster.coordinator.state_hash() == before
    assert b.send(sent).base == cluster.manifest.model.initial_digest


def test_too_stale_is_refused_and_its_rows_reopen(cluster):
    _, b, sent = late(cluster, 3)
    before = cluster.coordinator.state_hash()

    with pytest.raises(StaleContribution):
        b.send(sent)

    assert cluster.coordinator.state_hash() == before
    assert leases(cluster)[1, "b"] is LeaseState.REOPENED
    assert cluster.audit(with_replay=True).problems == []


def test_upload_under_way_goes_on_over_a_freeze_and_ends_when_it_is_too_stale(cluster):
    a, b, sent = late(cluster, 0)
    stream = b.begin(sent, sent.data[:1000])
    step(a)
    cluster.coordinator.write_upload(stream, sent.data[1000:1100])
    step(a)
    step(a)

    with pytest.raises(StaleContribution):
        cluster.coordinator.write_upload(stream, sent.data[1100:1200])


def test_contribution_that_is_recorded_as_its_round_freezes_goes_to_the_next(cluster, monkeypatch):
    """The freeze comes between the last check and the transaction."""
    a, b, sent = late(cluster, 0)
    a.contribute()
    real, rounds = cluster.coordinator.uploads.record, cluster.coordinator.rounds

    def frozen_first(*record: Any) -> Any:
        rounds.freeze()
        return real(*record)

    monkeypatch.setattr(cluster.coordinator.uploads, "record", frozen_first)

    assert b.send(sent).applied == 2


def test_round_for_which_no_version_is_published_takes_nothing(cluster):
    a, _ = cluster.pair()
    given = a.assignment()

    with pytest.raises((WrongBase, LeaseLost, WrongRound)):
        a.send(a.frame(given, round=2))


# When a round closes, and what ends with it


def test_window_lets_the_second_island_in(tmp_path):
    cluster = made(tmp_path, **{"membership.grace_seconds": 5.0})
    a, b = cluster.pair()
    b.assignment()
    a.contribute()
    assert cluster.run_clock(seconds=4.9) == 0

    b.contribute()

    assert cluster.settle() == 1
    assert [c.worker_id for c in alone(cluster.ledger).contributions.of_round(1)] == ["a", "b"]


def test_round_closes_when_its_window_is_over(tmp_path):
    cluster = made(tmp_path, **{"membership.grace_seconds": 5.0})
    a, b = cluster.pair()
    b.assignment()
    a.contribute()

    assert cluster.run_clock(seconds=5.1) == 1
    assert leases(cluster)[1, "b"] is LeaseState.LEASED


def test_window_runs_while_the_round_before_is_computed(tmp_path):
    """It begins with the first contribution, not when the closing thread next looks."""
    cluster = made(tmp_path, **{"membership.grace_seconds": 5.0})
    islands = [cluster.island(name) for name in "abc"]
    a, b, c = islands
    sent = [island.frame(island.assignment()) for island in islands]
    a.send(sent[0])
    assert cluster.settle() == 0
    cluster.clock.advance(seconds=5.1)
    cluster.freeze()
    b.send(sent[1])

    cluster.clock.advance(seconds=5.1)
    c.beat()

    assert cluster.settle() == 2


def test_round_does_not_close_below_min_workers(tmp_path):
    cluster = made(tmp_path, **{"membership.min_workers": 2})
    a, b = cluster.pair()
    a.contribute()
    b.leave()

    assert cluster.settle() == 0

    b.join()
    assert cluster.settle() == 1


def test_freeze_ends_the_lease_of_the_dead_and_keeps_those_of_the_slow(cluster):
    a, b = cluster.pair()
    c = cluster.island("c")
    b.assignment()
    c.assignment()
    c.leave()

    step(a)

    found = leases(cluster)
    assert (found[1, "b"], found[1, "c"]) == (LeaseState.LEASED, LeaseState.REOPENED)


def test_last_round_ends_every_lease(tmp_path):
    cluster = made(tmp_path, **{"stop.rounds": 1})
    a, b = cluster.pair()
    b.assignment()
    step(a)

    assert leases(cluster)[1, "b"] is LeaseState.REOPENED
    assert a.assignment().action == "stop"
    assert cluster.audit(with_replay=True).problems == []


def test_lease_of_a_published_round_expires_in_time(tmp_path):
    cluster = made(tmp_path, **{"work.lease_seconds": 30.0, "heartbeat_timeout": 1000.0})
    a, b = cluster.pair()
    b.assignment()
    step(a)

    cluster.run_clock(seconds=29, tick_seconds=1.0)
    assert leases(cluster)[1, "b"] is LeaseState.LEASED
    cluster.run_clock(seconds=2, tick_seconds=1.0)

    assert leases(cluster)[1, "b"] is LeaseState.REOPENED


# What survives


def test_restart_keeps_leases_of_published_rounds_and_their_contributions(cluster):
    a, b, sent = late(cluster, 2)
    digests = cluster.digest, cluster.published_digest

    cluster.restart()
    a.join()
    b.join()

    assert (cluster.digest, cluster.published_digest) == digests
    assert b.send(sent).applied == 3
    assert cluster.settle() == 1
    assert cluster.audit(with_replay=True).problems == []


def test_ticks_are_counted_on_after_a_restart(tmp_path):
    """With a delay of 2 and rounds of one contribution every other one moves the momentum."""
    calm, disturbed = (made(tmp_path / name, **{"outer.delay": 2}) for name in ("calm", "other"))
    for cluster in (calm, disturbed):
        a = cluster.island("a")
        for number in range(5):
            step(a)
            if cluster is disturbed and number in (0, 2):
                cluster.restart()
                a.join()

    assert disturbed.digests_by_round() == calm.digests_by_round()


def test_repair_reopens_what_dropped_contributions_had_done(cluster):
    """A contribution made for a round that stays, folded by one that goes, leaves its rows open."""
    a, b, sent = late(cluster, 2)
    b.send(sent)
    cluster.settle()
    step(a)

    with cluster.ledger.reading() as t:
        dropped = t.contributions.blobs(first=3)
    with cluster.ledger.writing() as t:
        truncation.truncate(t, last_round=2)
        truncation.disband(t)
    for sha256 in dropped:  # as a repair does: they would tell of records that were lost
        cluster.blobs.delete(sha256)
    cluster.restart()

    assert leases(cluster)[1, "b"] is LeaseState.REOPENED
    assert cluster.audit(with_replay=True).problems == []
    again = a.join().assignment()
    assert {x.row_range for x in cluster.leases() if (x.round, x.worker_id) == (1, "b")} == {
        *again.ranges
    }


def test_stale_contribution_is_decoded_by_the_codec_it_was_made_with(cluster):
    a, b, sent = late(cluster, 1)

    def with_int8(recorded: Any) -> Any:
        changed = clusters.manifest_for(cluster.layout, {**SETTINGS, "upload.codec": "int8"})
        return manifest_change.next_version(recorded, changed)

    changed = cluster.coordinator.rounds.add_manifest(with_int8)
    a.adopt(cluster.coordinator.info(changed.sha256))
    for island in (a, b):
        island.session.standing.heard_of(cluster.coordinator.info())
    b.send(sent)

    assert cluster.settle() == 1
    assert cluster.audit(with_replay=True).problems == []


def test_delay_of_the_momentum_is_fixed():
    assert Difference("outer.delay", 2, 3).is_fixed


# Speed


def tell(island: HandIsland, speed: float) -> int:
    """A heartbeat with this speed; how many steps it is told."""
    told = Telemetry(tokens_per_second=speed)
    beat = HeartbeatRequest(identity=island.identity, telemetry=told)
    return island.coordinator.heartbeat(beat).steps


def test_steps_follow_the_speed_and_are_fixed_by_the_lease(tmp_path):
    cluster = made(tmp_path, dylu=True, sync_every=10)
    a, b = cluster.pair()

    told = [tell(a, 100.0), tell(b, 25.0)]
    given = b.assignment()
    slower = tell(b, 10.0)

    assert told == [10, 2]
    assert (given.steps, sum(map(len, given.ranges))) == (2, 2 * 3)
    assert slower == 1
    assert b.assignment() == given
    assert a.assignment().steps == 10


def test_speed_of_an_island_that_is_gone_does_not_count(tmp_path):
    cluster = made(tmp_path, dylu=True, sync_every=10)
    a, b = cluster.pair()
    tell(a, 100.0)
    assert tell(b, 25.0) == 2

    a.leave()

    assert b.assignment().steps == 10


def test_heartbeat_that_tells_steps_by_speed_waits_for_no_registration(tmp_path, monkeypatch):
    """It is answered in the server's event loop, and a registration takes a transaction."""
    cluster = made(tmp_path, dylu=True, sync_every=10)
    a, b = cluster.pair()
    tell(a, 100.0)
    told: list[int] = []
    told_meanwhile: list[int] = []
    beating = Thread(target=lambda: told.append(tell(b, 25.0)), daemon=True)
    real = cluster.ledger.writing

    def writing() -> AbstractContextManager[Transaction]:
        monkeypatch.undo()
        beating.start()
        beating.join(timeout=5.0)
        told_meanwhile.extend(told)
        return real()

    monkeypatch.setattr(cluster.ledger, "writing", writing)

    cluster.island("c")

    assert told_meanwhile == [2]


def test_heartbeat_of_a_synchronous_run_tells_its_steps(tmp_path):
    a, _ = Cluster(tmp_path).pair()

    assert tell(a, 3.0) == 2


# Downloads


@pytest.mark.parametrize(("behind", "kinds"), [(3, ["update"] * 3), (6, ["weights"])])
def test_island_follows_the_updates_while_they_are_smaller_than_the_whole(tmp_path, behind, kinds):
    settings = {**SETTINGS, "download.codec": "int8"}
    cluster = Cluster(tmp_path, settings, layout=WIDE)
    a = cluster.island("a")
    tracking = TrackingIsland(cluster, "b").join()
    tracking.fetch()
    for _ in range(behind):
        step(a)

    while tracking.weights.version != cluster.version:
        tracking.fetch()

    assert tracking.kinds == ["weights", *kinds]
    assert tracking.weights.digest == cluster.published_digest


def test_updates_that_are_kept_are_smaller_than_the_whole_together(tmp_path):
    cluster = Cluster(tmp_path, {**SETTINGS, "download.codec": "int8"}, layout=WIDE)
    a = cluster.island("a")
    for _ in range(8):
        step(a)

    sizes = [path.stat().st_size for path in (tmp_path / "spool").glob("update-*")]

    assert len(sizes) == 3 and sum(sizes) < 4 * WIDE.size


def test_island_whose_weights_are_others_fetches_whole(tmp_path):
    cluster = Cluster(tmp_path, {**SETTINGS, "download.codec": "int8"}, layout=WIDE)
    a = cluster.island("a")
    step(a)
    step(a)

    frame = cluster.coordinator.download(a.identity, round_number=1, have_digest="f" * 64)

    assert frame.header.kind == "weights" and frame.header.round == 2


# Evaluation


def test_first_holder_evaluates_a_version_and_all_share_the_last(tmp_path):
    cluster = made(tmp_path, **{"evaluate.every": 1, "stop.rounds": 1})
    a, b = cluster.pair()

    first, second = a.assignment(), b.assignment()

    assert first.evaluation is not None and second.evaluation is None
    assert (first.evaluation.start, first.evaluation.stop) == (0, HELD_OUT_ROWS)
    ahead = EvaluationReport(identity=a.identity, version=1, loss_sum=1.0, tokens=1)
    with pytest.raises(WrongRound, match="version=1 of the evaluation is not published"):
        cluster.coordinator.evaluation(ahead)
    report = EvaluationReport(
        identity=a.identity, version=0, loss_sum=1.0, tokens=HELD_OUT_ROWS * BLOCK
    )
    cluster.coordinator.evaluation(report)
    step(a)
    shares = [island.assignment().evaluation for island in (a, b)]
    assert [(s.start, s.stop) for s in shares if s] == [(0, 3), (3, HELD_OUT_ROWS)]


# Weights


def test_two_in_one_window_give_the_weights_of_two_rounds(tmp_path):
    """The same two contributions from version 0, folded together and one after the other."""
    together = made(tmp_path / "together", **{"membership.grace_seconds": 5.0})
    apart = made(tmp_path / "apart")
    a, b = together.pair()
    b.assignment()
    a.contribute()
    b.contribute()
    assert together.settle() == 1
    a, b, sent = late(apart, 1)
    b.send(sent)
    assert apart.settle() == 1

    assert torch.equal(together.buffer("master"), apart.buffer("master"))
    assert (together.version, apart.version) == (1, 2)


def test_audit_finds_a_contribution_that_was_folded_too_late(tmp_path):
    """By the records alone: the bound is a setting, and what was folded when is in the chain."""
    cluster = made(tmp_path, max_staleness=1)
    _, b, sent = late(cluster, 1)
    b.send(sent)
    cluster.settle()
    clusters.tamper(cluster.ledger, "contributions", {"round": 1, "worker_id": "b"}, applied=3)

    assert "applied of b" in {problem.what for problem in cluster.audit().problems}


# Whole runs on the virtual clock

WHOLE: dict[str, Any] = {
    "mode": "async",
    "outer.optimizer": "delayed_nesterov",
    "outer.delay": 2,
    "sync_every": 4,
    "dylu": True,
    "staleness_weighting": "inverse_sqrt",
    "weighting": "tokens",
    "download.codec": "int8",
    "download.block": 32,
    "heartbeat_interval": 0.2,
    "heartbeat_timeout": 1.0,
    "inner.schedule.kind": "cosine",
    "inner.schedule.total_tokens": 600,
    "stop.rounds": 8,
    "membership.min_workers": 2,
    "membership.grace_seconds": 0.15,
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("whole")
    simulate(directory=made, speeds=(4, 1), **WHOLE)
    return made


def test_simulated_run_at_two_speeds_passes_its_audit(home):
    report, _ = clusters.audited(home)

    assert report.clean and report.rounds == 8
    assert report.staleness >= 1


def test_slow_island_trained_fewer_steps_at_a_time(home):
    ledger = engines.open_ledger(home / "ledger.sqlite")
    found = {c.rows for c in alone(ledger).contributions.every() if c.worker_id == "island-1"}
    ledger.close()

    assert found == {4 * 2, 1 * 2}  # before its speed was known, and after


def test_training_what_the_records_say_gives_the_runs_weights(home, tmp_path):
    found = following.followed(home, tmp_path)

    assert found.agrees and found.rounds == 8
    assert found.contributions > 8


def test_training_from_another_base_does_not(home, tmp_path, monkeypatch):
    """The control: the digest depends on what is followed."""
    following.tell_other_tokens(monkeypatch)

    assert not following.followed(home, tmp_path).agrees


def test_synchronous_run_is_followed_too(tmp_path):
    simulate(directory=tmp_path / "run")

    assert following.followed(tmp_path / "run", tmp_path / "again").agrees


def test_run_file_in_which_settings_do_not_go_together_creates_nothing(tmp_path):
    stores = clusters.stores_in(tmp_path)

    with pytest.raises(ConfigError, match="num_fragments=2 needs mode 'streaming'"):
        boot.create_or_check(
            stores,
            clusters.run_file({**TABLE, **WHOLE, "num_fragments": 2}),
            ManualClock(),
            new_run_id="x",
        )

    assert alone(stores.ledger).run.get() is None


# The commands


@pytest.fixture(scope="module")
def run_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("commands") / "run.toml"
    path.write_text(
        """
name = "commands"
sync_every = 2
mode = "async"
[model]
architecture = "gpt"
vocab = 16
block = 8
layers = 1
heads = 2
width = 8
[data]
kind = "synthetic"
seed = 1
rows = 500
held_out_rows = 4
block = 8
vocab = 16
[inner]
batch = 2
[outer]
optimizer = "delayed_nesterov"
[stop]
rounds = 5
"""
    )
    return path


def command(*words: object) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of `atoll WORDS --json`."""
    result = CliRunner().invoke(app, [*map(str, words), "--json"], catch_exceptions=False)
    return result.exit_code, json.loads(result.stdout)


def test_command_simulates_at_speeds_and_follows_what_it_kept(run_toml, tmp_path):
    code, found = command("simulate", run_toml, "--speeds", "4,1", "--dir", tmp_path / "state")
    again, followed = command("simulate", run_toml, "--follow", tmp_path / "state")

    assert (code, again, followed["agrees"]) == (0, 0, True)
    assert found["islands"] == 2
    assert followed["digest"] == found["digest"]
    shares = [r["contributions"] for r in found["status"]["history"]]
    assert sum(shares) == followed["contributions"]


def test_command_tells_that_a_run_trains_to_other_weights(run_toml, tmp_path):
    """The control: with another recorded count of tokens its learning rates were others."""
    text = run_toml.read_text().replace("[outer]", '[inner.schedule]\nkind = "linear"\n[outer]')
    other = tmp_path / "other.toml"
    other.write_text(text.replace('"linear"', '"linear"\ntotal_tokens = 300'))
    command("simulate", other, "--dir", tmp_path / "state")
    stores = clusters.stores_in(tmp_path / "state")
    clusters.tamper(stores.ledger, "rounds", {"round": 2}, tokens=250)
    stores.ledger.close()

    code, followed = command("simulate", other, "--follow", tmp_path / "state")

    assert (code, followed["agrees"]) == (1, False)


@pytest.mark.parametrize("speeds", ["4,x", "4,,1", "0", "-1,2", "nan", ""])
def test_command_refuses_speeds_that_are_none(run_toml, speeds):
    result = CliRunner().invoke(app, ["simulate", str(run_toml), "--speeds", speeds])

    assert isinstance(result.exception, ConfigError)
    assert "is no list of positive numbers" in str(result.exception)


# Against sync


def master(home: Path) -> torch.Tensor:
    """The weights that a finished run saved."""
    stores = clusters.stores_in(home)
    manifest = recorded.manifest_of(stores.ledger)
    assert manifest is not None
    saved = alone(stores.ledger).snapshots.all()[-1]
    found = weights.load(stores.blobs, saved.master_sha256, recorded.layout_of(manifest))
    stores.ledger.close()
    return found


def test_run_with_nothing_stale_is_a_synchronous_one_up_to_rounding(tmp_path):
    """Two equal islands and a window for both: the same rows from the same bases.

    The outer steps part by a few roundings, 1e-7 of the weights, and three short rounds of
    training do not carry that far.
    """
    same: dict[str, Any] = {"upload.codec": "fp32", "inner.optimizer": "sgd", "inner.lr": 0.1}
    window = {**same, "mode": "async", "membership.grace_seconds": 60.0, "max_staleness": 0}
    delayed = {**window, "outer.optimizer": "delayed_nesterov", "outer.delay": 2}
    simulate(directory=tmp_path / "sync", **same)
    simulate(directory=tmp_path / "async", **delayed)
    simulate(directory=tmp_path / "other", **window)

    sync, ours, other = (master(tmp_path / name) for name in ("sync", "async", "other"))

    assert torch.allclose(ours, sync, rtol=0, atol=1e-6)
    # The control: Nesterov for each contribution moves the model about twice as far.
    assert not torch.allclose(other, sync, rtol=0, atol=1e-3)
