"""A run whose settings change: every round under its own manifest version, and proven so."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.clock import ManualClock
from atoll.coordinator import boot
from atoll.errors import ConfigError, ManifestMismatch, StaleContribution, WrongRound
from atoll.protocol.manifest import FIXED
from atoll.versions.manifests import Manifests
from tests import clusters, distributions
from tests import picky as picky_strategy
from tests.clusters import (
    SMALL,
    Cluster,
    HandIsland,
    TrackingIsland,
    displacement,
)
from tests.integration.test_restart import DATA, MODEL, run_file, stores  # noqa: F401
from tests.ledgers import alone
from tests.settings import ALONE

SGD: dict[str, Any] = {"outer.optimizer": "sgd", "outer.lr": 0.5}
OLD, NEW = 0.5, 0.125


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path, SGD)


def adopt(*islands: HandIsland) -> None:
    """What an island does at a round boundary."""
    for island in islands:
        info = island.coordinator.info()
        island.adopt(info)
        island.cluster.manifest = info.manifest()


def record(cluster: Cluster, **changes: Any) -> None:
    """A restart with a changed file and --new-manifest."""
    found = clusters.manifest_for(cluster.layout, {**SGD, **changes})
    boot.record_manifest(cluster.ledger, found)
    cluster.restart()


def weights_of(cluster: Cluster) -> torch.Tensor:
    return cluster.buffer("master")


def stepped(start: torch.Tensor, round_number: int, *, lr: float) -> torch.Tensor:
    """An outer SGD step computed by the test."""
    both = [displacement(SMALL, name, round_number) for name in ("a", "b")]
    return start - lr * (both[0] + both[1]) / 2


# From which round on


def test_change_while_a_round_is_open_counts_from_the_next_one(cluster):
    a, b = cluster.pair()
    before = weights_of(cluster)

    first = cluster.coordinator.set_outer_lr(NEW).from_round
    cluster.rounds(1, a, b)  # made under the version of the open round
    adopt(a, b)
    cluster.rounds(1, a, b)

    assert first == 2
    expected = stepped(stepped(before, 1, lr=OLD), 2, lr=NEW)
    torch.testing.assert_close(weights_of(cluster), expected, rtol=0, atol=1e-7)
    assert cluster.coordinator.manifest.outer.lr == NEW


def test_round_that_is_planned_keeps_its_version(cluster):
    a, b = cluster.pair()
    a.contribute()
    b.contribute()
    cluster.freeze()  # round 2 is planned now, round 1 not published yet

    first = cluster.coordinator.set_outer_lr(NEW).from_round

    assert first == 3
    assert cluster.settle() == 1
    cluster.rounds(1, a, b)
    adopt(a, b)
    cluster.rounds(1, a, b)
    assert [r.manifest_sha256 for r in alone(cluster.ledger).rounds.all()][:3] == [
        cluster.coordinator.manifests.of_round(n).sha256 for n in (1, 1, 3)
    ]
    assert cluster.audit(with_replay=True).problems == []


def test_change_before_the_first_round_counts_for_it(cluster):
    first = cluster.coordinator.set_outer_lr(NEW).from_round
    islands = [HandIsland(cluster, name) for name in "ab"]
    adopt(*islands)
    for island in islands:
        island.join()
    before = weights_of(cluster)

    cluster.rounds(1, *islands)

    assert first == 1
    torch.testing.assert_close(weights_of(cluster), stepped(before, 1, lr=NEW), rtol=0, atol=1e-7)
    assert cluster.audit(with_replay=True).problems == []


def test_rate_that_goes_back_is_a_third_version(cluster):
    a, b = cluster.pair()
    for lr in (NEW, OLD):
        cluster.coordinator.set_outer_lr(lr)
        cluster.rounds(1, a, b)
        adopt(a, b)
    cluster.rounds(1, a, b)

    assert len({m.sha256 for m in alone(cluster.ledger).manifests.all()}) == 3
    assert [m.from_round for m in alone(cluster.ledger).manifests.all()] == [1, 2, 3]
    assert cluster.audit(with_replay=True).problems == []


def test_second_change_before_the_round_is_planned_replaces_the_first(cluster):
    a, b = cluster.pair()

    rounds = [cluster.coordinator.set_outer_lr(lr).from_round for lr in (0.25, NEW)]
    cluster.rounds(1, a, b)
    adopt(a, b)
    cluster.rounds(1, a, b)

    assert rounds == [2, 2]
    assert cluster.coordinator.manifest.outer.lr == NEW
    assert cluster.audit(with_replay=True).problems == []


def test_rate_that_is_in_force_already_records_nothing(cluster):
    before = cluster.coordinator.state_hash()

    assert cluster.coordinator.set_outer_lr(OLD).from_round == 1
    assert cluster.coordinator.state_hash() == before


@pytest.mark.parametrize("lr", [0.0, -1.0, 100.1, 1e308, float("nan"), float("inf")])
def test_rate_that_breaks_the_rule_is_refused_and_records_nothing(cluster, lr):
    before = cluster.coordinator.state_hash()

    with pytest.raises(ConfigError, match=r"^outer\.lr="):
        cluster.coordinator.set_outer_lr(lr)

    assert cluster.coordinator.state_hash() == before


def test_changes_from_another_thread_while_rounds_close_leave_a_run_that_replays(cluster):
    a, b = cluster.pair()
    stop = threading.Event()

    def change() -> None:
        lr = 0.1
        while not stop.is_set():
            lr = 0.6 - lr
            cluster.coordinator.set_outer_lr(lr)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(8):
            adopt(a, b)
            cluster.rounds(1, a, b)
    finally:
        stop.set()
        thread.join()

    assert len({r.manifest_sha256 for r in alone(cluster.ledger).rounds.all()}) > 1
    assert cluster.audit(with_replay=True).problems == []


# Proof


@pytest.fixture
def changed_run(cluster: Cluster) -> Cluster:
    """Rounds 1 and 2 at the old rate, 3 and 4 at the new one."""
    a, b = cluster.pair()
    cluster.rounds(1, a, b)
    cluster.coordinator.set_outer_lr(NEW)
    cluster.rounds(1, a, b)
    adopt(a, b)
    cluster.rounds(2, a, b)
    return cluster


def test_run_with_two_versions_passes_its_audit(changed_run):
    report = changed_run.audit(with_replay=True)

    assert report.problems == []
    assert report.replayed_rounds == 4
    assert report.digest == changed_run.digest


def test_replay_with_the_old_rate_for_all_rounds_differs_from_the_change_on(changed_run):
    """The control: it is the version of each round that replay needs."""
    only_first = Manifests(alone(changed_run.ledger).manifests.all()[:1])
    replay = changed_run.replay(manifests=only_first)

    found = [replayed.difference() is None for replayed in replay.onward(replay.restore(None))]

    assert found == [True, True, False, False]


@pytest.mark.parametrize(
    ("field", "value"), [("from_round", 2), ("from_round", 4), ("sha256", "0" * 64)]
)
def test_audit_finds_a_version_that_was_moved(changed_run, field, value):
    clusters.tamper(changed_run.ledger, "manifests", {"version": 2}, **{field: value})

    report = changed_run.audit()

    assert [p.round for p in report.problems][:1] == [min(3, value) if field == "from_round" else 3]


@pytest.mark.parametrize("restart_after", [1, 2, 3, 4])
def test_restart_between_rounds_ends_in_the_same_bits(tmp_path, changed_run, restart_after):
    again = Cluster(tmp_path / "again", SGD)
    a, b = again.pair()
    for number in (1, 2, 3, 4):
        if number == 2:
            again.coordinator.set_outer_lr(NEW)
        adopt(a, b)
        again.rounds(1, a, b)
        if number == restart_after:
            again.restart()
            adopt(a, b)
            a.beat()
            b.beat()

    assert again.digests_by_round() == changed_run.digests_by_round()
    assert again.audit(with_replay=True).problems == []


def test_restart_while_the_change_waits_for_its_round(cluster):
    a, b = cluster.pair()
    cluster.coordinator.set_outer_lr(NEW)

    cluster.restart()

    assert cluster.coordinator.manifest.outer.lr == OLD
    cluster.rounds(1, a, b)
    assert cluster.coordinator.manifest.outer.lr == NEW
    assert cluster.coordinator.info().manifest_version == 2


# Islands


def test_message_under_an_earlier_version_is_refused_once_a_later_one_is_in_force(cluster):
    a, b = cluster.pair()
    cluster.coordinator.set_outer_lr(NEW)
    a.beat()  # round 1 is under the first version still

    cluster.rounds(1, a, b)

    with pytest.raises(ManifestMismatch, match="fetch /info again"):
        a.beat()
    adopt(a)
    a.beat()


def test_late_contribution_to_a_closed_round_is_stale_not_mismatched(tmp_path):
    cluster = Cluster(tmp_path, {**SGD, "membership.quorum": 2})
    a, b, c = (cluster.island(name) for name in "abc")
    cluster.rounds(1, a, b)  # the third came too late for the first round
    late = c.frame()
    cluster.coordinator.set_outer_lr(NEW)
    a.contribute()
    b.contribute()
    assert cluster.settle() == 1
    adopt(a, b, c)

    with pytest.raises(StaleContribution):
        c.send(late)

    cluster.rounds(1, a, b, c)
    assert cluster.audit(with_replay=True).problems == []


def test_contribution_made_under_another_version_than_its_round_is_refused(cluster):
    a, b = cluster.pair()
    cluster.rounds(1, a, b)
    before = cluster.coordinator.state_hash()

    with pytest.raises(ManifestMismatch, match=r"to round 2 is not .* is under"):
        a.send(a.frame(manifest_sha256="7" * 64))

    assert cluster.coordinator.state_hash() == before


def test_assignment_names_the_version_of_its_round(cluster):
    a, b = cluster.pair()
    cluster.coordinator.set_outer_lr(NEW)
    first = a.assignment().manifest_sha256
    cluster.rounds(1, a, b)
    adopt(a, b)

    second = a.assignment().manifest_sha256

    assert [first, second] == [m.sha256 for m in alone(cluster.ledger).manifests.all()]


def test_worker_that_registers_under_an_earlier_version_is_told_which_one_is_in_force(cluster):
    a, b = cluster.pair()
    cluster.coordinator.set_outer_lr(NEW)
    late = HandIsland(cluster, "late")
    cluster.rounds(1, a, b)

    with pytest.raises(ManifestMismatch, match=r"version 1 .* in force, 2, from round 2 on"):
        late.join()


# What else a new version changes


def test_rows_of_a_planned_round_stay_and_the_next_plan_follows_the_new_version(cluster):
    a, b = cluster.pair()

    record(cluster, sync_every=5)
    cluster.rounds(1, a, b)
    adopt(a, b)

    assert [lease.stop - lease.start for lease in alone(cluster.ledger).leases.of_round(1)] == [
        6,
        6,
    ]
    assert [lease.stop - lease.start for lease in alone(cluster.ledger).leases.of_round(2)] == [
        15,
        15,
    ]
    cluster.rounds(1, a, b)
    assert cluster.audit(with_replay=True).problems == []


@pytest.mark.parametrize(
    ("before", "after"), [("fp32", "bf16"), ("bf16", "fp32"), ("int8", "bf16"), ("bf16", "int8")]
)
@pytest.mark.parametrize("snapshot_every", [1, 100])
def test_download_codec_changes_with_the_published_weights_exact(
    tmp_path, before, after, snapshot_every
):
    settings = {**SGD, "storage.snapshot_every": snapshot_every}
    cluster = Cluster(tmp_path, {**settings, "download.codec": before})
    a, b = TrackingIsland(cluster, "a"), TrackingIsland(cluster, "b")
    for island in (a, b):
        island.join()
    for _ in range(2):
        cluster.rounds(1, a, b)
        a.fetch()
    found = clusters.manifest_for(SMALL, {**settings, "download.codec": after})
    boot.record_manifest(cluster.ledger, found)
    cluster.restart()
    for _ in range(3):
        cluster.rounds(1, a, b)
        adopt(a, b)
        a.fetch()
        a.weights.download = cluster.manifest.download.build()

    assert a.weights.digest == cluster.published_digest
    assert (cluster.digest == cluster.published_digest) == (after == "fp32")
    assert cluster.audit(with_replay=True).problems == []
    assert cluster.restart().audit(with_replay=True).problems == []
    assert cluster.published_digest == a.weights.digest


@pytest.mark.parametrize(
    "changes",
    [
        {"upload.codec": "int8"},
        {"upload.codec": "bf16"},
        {"weighting": "tokens"},
        {"storage.retain": "snapshots", "storage.snapshot_every": 1, "storage.keep_snapshots": 1},
        {"membership.min_workers": 1},
        {"evaluate.every": 1},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_run_goes_on_and_passes_its_audit_after_a_change(cluster, changes):
    a, b = cluster.pair()
    cluster.rounds(2, a, b)

    record(cluster, **changes)
    cluster.rounds(1, a, b)
    adopt(a, b)
    cluster.rounds(2, a, b)

    assert cluster.version == 5
    assert cluster.audit(with_replay=True).problems == []
    assert cluster.restart().version == 5


def test_heartbeat_timeout_of_the_version_in_force_decides_who_is_live(cluster):
    a, b = cluster.pair()
    record(cluster, heartbeat_timeout=50.0)
    cluster.rounds(1, a, b)
    adopt(a, b)
    cluster.settle()
    a.beat()
    cluster.clock.advance(seconds=40)

    assert "a" in cluster.coordinator.members()

    cluster.clock.advance(seconds=11)

    assert cluster.coordinator.members() == []


def test_finished_run_goes_on_when_a_new_version_moves_its_end(tmp_path):
    cluster = Cluster(tmp_path, {**SGD, "stop.rounds": 2})
    a, b = cluster.pair()
    cluster.rounds(2, a, b)
    assert cluster.coordinator.is_finished()

    record(cluster, **{"stop.rounds": 4})
    adopt(a, b)
    for island in (a, b):
        island.beat()
    cluster.settle()
    cluster.rounds(2, a, b)

    assert cluster.coordinator.is_finished()
    assert cluster.version == 4
    assert cluster.audit(with_replay=True).problems == []


def test_new_version_can_end_a_run_early(tmp_path):
    cluster = Cluster(tmp_path, {**SGD, "stop.rounds": 9})
    a, b = cluster.pair()
    cluster.rounds(1, a, b)

    record(cluster, **{"stop.rounds": 1})
    cluster.rounds(1, a, b)  # it is planned, so it counts

    assert cluster.coordinator.is_finished()
    with pytest.raises(WrongRound):
        a.send(a.frame(a.assignment().model_copy(update={"round": 3})))


# The file


def files(stores, changes: dict[str, Any], **options: Any):  # noqa: F811
    return boot.create_or_check(
        stores, run_file(**changes), ManualClock(), new_run_id="two", **options
    )


@pytest.fixture
def created(stores):  # noqa: F811
    boot.create_or_check(stores, run_file(), ManualClock(), new_run_id="one")
    return stores


def test_changed_file_is_refused_with_both_values_and_the_flag(created):
    with pytest.raises(ConfigError, match=r"outer\.lr: 0\.7 -> 0\.5; .*--new-manifest"):
        files(created, {"outer.lr": 0.5})


def test_flag_records_a_changed_file_from_the_next_round_on(created):
    made = files(created, {"outer.lr": 0.5, "inner.clip": 2.0}, new_manifest=True)

    newest = alone(created.ledger).manifests.all()[-1]
    assert (newest.version, newest.from_round, newest.sha256) == (2, 1, made.sha256())
    assert (made.manifest_version, made.outer.lr, made.inner.clip) == (2, 0.5, 2.0)
    assert files(created, {"outer.lr": 0.5, "inner.clip": 2.0}) == made


def test_file_of_an_earlier_version_is_a_changed_file(created):
    files(created, {"outer.lr": 0.5}, new_manifest=True)

    with pytest.raises(ConfigError, match=r"outer\.lr: 0\.5 -> 0\.7"):
        files(created, {})


def test_flag_with_an_unchanged_file_records_nothing(created):
    before = created.ledger.state_hash()

    made = files(created, {}, new_manifest=True)

    assert made.manifest_version == 1
    assert created.ledger.state_hash() == before


FIXED_CHANGES: dict[str, tuple[object, str]] = {
    "name": ("another", "name is 'by-hand' in this run and 'another'"),
    "seed": (7, "seed is 0 in this run and 7"),
    "model": ({**MODEL, "width": 16}, "model.definition.width is 8 in this run and 16"),
    "data": ({**DATA, "rows": 200}, "data.definition.rows is 100 in this run and 200"),
    "work.policy": ("at_most_once", "work.policy is 'exactly_once' in this run and 'at_most_once'"),
    "outer.optimizer": ("sgd", "outer.optimizer is 'nesterov' in this run and 'sgd'"),
    "inner.optimizer": ("sgd", "inner.optimizer is 'adamw' in this run and 'sgd'"),
}


@pytest.mark.parametrize("name", FIXED_CHANGES)
def test_flag_refuses_what_no_version_changes_by_name_with_both_values(created, name):
    value, expected = FIXED_CHANGES[name]
    before = created.ledger.state_hash()

    with pytest.raises(ConfigError) as refused:
        files(created, {name: value}, new_manifest=True)

    assert expected in str(refused.value)
    assert created.ledger.state_hash() == before


@pytest.mark.parametrize("name", FIXED_CHANGES)
def test_refusal_without_the_flag_does_not_offer_it_for_what_no_version_changes(created, name):
    with pytest.raises(ConfigError, match="cannot change in any version") as refused:
        files(created, {name: FIXED_CHANGES[name][0]})

    assert "--new-manifest" not in str(refused.value)


def test_everything_fixed_that_a_file_can_say_is_tried():
    asynchronous = {"outer.delay"}  # said by tests/integration/test_asynchronous.py

    assert set(FIXED) - set(ALONE) - asynchronous == set(FIXED_CHANGES)


def test_change_made_while_serving_stands_after_a_restart_with_the_same_file(created):
    files(created, {})
    boot.open_coordinator(created, ManualClock()).set_outer_lr(0.25)

    assert files(created, {}).outer.lr == 0.25


def test_flag_puts_the_file_in_place_of_a_change_made_while_serving(created):
    files(created, {})
    boot.open_coordinator(created, ManualClock()).set_outer_lr(0.25)

    made = files(created, {}, new_manifest=True)

    assert (made.manifest_version, made.outer.lr, made.manifest_source) == (3, 0.7, "file")


# What the strategy says to a change


@pytest.fixture
def picky(tmp_path: Path) -> Iterator[Cluster]:
    """A run whose strategy depends on settings that others may change."""
    source = Path(picky_strategy.__file__).read_text()
    site = distributions.write(tmp_path / "site", "picky", "picky:Picky.of", source)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        made = Cluster(tmp_path / "run", {"strategy": "picky"})
        yield made
        made.close()


REFUSED_BY_THE_STRATEGY: dict[str, tuple[dict[str, Any], str]] = {
    "its own rule": ({"sync_every": 3}, r"sync_every=3 is odd"),
    "lead": ({"sync_every": 6}, r"lead is 0 in this run and 1 with sync_every: 2 -> 6; .*restore"),
    "cut": (
        {"weighting": "tokens"},
        r"tensor 'norm', .* is \(0, 1\) in this run and \(1, 0\) with weighting: 'equal' -> ",
    ),
}


@pytest.mark.parametrize("what", REFUSED_BY_THE_STRATEGY)
def test_change_that_the_strategy_cannot_go_on_under_is_not_recorded(picky, what):
    changes, expected = REFUSED_BY_THE_STRATEGY[what]
    before = picky.ledger.state_hash()

    with pytest.raises(ConfigError, match=expected):
        boot.record_manifest(picky.ledger, picky.manifest.model_copy(update=changes))

    assert picky.ledger.state_hash() == before


def test_rate_that_the_strategy_refuses_is_not_recorded_and_the_run_goes_on(picky):
    a, b = picky.pair()

    with pytest.raises(ConfigError, match=r"outer\.lr=0\.125 is not for this strategy"):
        picky.coordinator.set_outer_lr(0.125)
    picky.rounds(2, a, b)

    assert picky.restart().version == 2
    assert len(alone(picky.ledger).manifests.all()) == 1


def test_change_that_the_strategy_takes_is_recorded(picky):
    made = boot.record_manifest(picky.ledger, picky.manifest.model_copy(update={"sync_every": 4}))

    assert (made.manifest_version, made.sync_every) == (2, 4)
