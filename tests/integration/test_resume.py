"""An island over lost replies, deaths and a coordinator that goes away: as if nothing had happened.

Real islands train a tiny model on a virtual clock; what crosses their link is lost, cut or ended at
chosen calls.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator.rounds.run_weights import RunWeights
from atoll.coordinator.rounds.spool import SpooledFrame
from atoll.errors import CoordinatorUnreachable, Fenced, FrameError
from atoll.island.link.base import DownloadProgress
from tests.ledgers import alone
from tests.seas import (
    NAMES,
    ROUNDS,
    STEPS,
    Call,
    Fault,
    Killed,
    Sea,
    coordinator_restarts_after,
    coordinator_restarts_before,
    evicted,
    killed_after,
    killed_before,
    lost_reply,
    lost_request,
)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of a run in which nothing goes wrong."""
    return Sea(tmp_path_factory.mktemp("calm")).run()


@pytest.fixture
def sea(tmp_path: Path) -> Sea:
    return Sea(tmp_path)


def offered(sea: Sea) -> SpooledFrame:
    """The frame that the island asks for in this call."""
    return sea.coordinator.weights.frame_for(
        round_number=sea.kwargs["round_number"], have_digest=sea.kwargs["have_digest"]
    )


FAULTS: dict[str, dict[tuple[str, str, int], Fault]] = {
    "info is lost": {("a", "info", 1): lost_reply},
    "register's reply is lost": {("a", "register", 1): lost_reply},
    "assignment's reply is lost": {("a", "assignment", 2): lost_reply},
    "upload is lost": {("a", "upload", 1): lost_request},
    "receipt is lost": {("a", "upload", 2): lost_reply},
    "receipt is lost three times": {("a", "upload", n): lost_reply for n in (2, 3, 4)},
    "every receipt is lost": {("a", "upload", n): lost_reply for n in (1, 3)},
    "evaluation's reply is lost": {("a", "evaluation", 1): lost_reply},
    "download is lost": {("b", "download", 2): lost_request},
    "killed in training": {("a", "step", 3): killed_before},
    "killed after its last step": {("a", "step", STEPS * 2): killed_before},
    "killed twice in one round": {
        ("a", "step", 3): killed_before,
        ("a", "step", 4): killed_before,
    },
    "killed before an upload": {("a", "upload", 2): killed_before},
    "killed before the receipt": {("a", "upload", 2): killed_after},
    "killed before its first receipt": {("a", "upload", 1): killed_after},
    "killed in a download": {("a", "download", 2): killed_before},
    "killed while waiting": {("a", "assignment", 5): killed_before},
    "both killed": {("a", "upload", 2): killed_after, ("b", "step", 3): killed_before},
    "evicted in training": {("a", "step", 3): evicted},
    "evicted before an upload": {("a", "upload", 2): evicted},
    "evicted before a download": {("a", "download", 2): evicted},
    "evicted while waiting": {("a", "assignment", 5): evicted},
    "evicted in every round": {("a", "step", 1): evicted, ("a", "step", 3): evicted},
    "coordinator restarts before an upload": {("a", "upload", 2): coordinator_restarts_before},
    "coordinator restarts before a receipt": {("a", "upload", 2): coordinator_restarts_after},
    "coordinator restarts before a download": {("a", "download", 2): coordinator_restarts_before},
}


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS.keys())
def test_island_ends_in_the_bits_of_a_calm_run(sea, calm, faults):
    """Nothing is lost, nothing counts twice, inner state and residual continue."""
    sea.faults = faults

    digest = sea.run()

    assert digest == calm
    assert all(sea.calls[name, method] >= n for name, method, n in faults)


def test_fault_leaves_one_contribution_of_each_island_in_each_round(sea, monkeypatch):
    """It neither contributes twice nor contributes zeros."""
    sea.faults = FAULTS["every receipt is lost"]
    counts = []
    publish = RunWeights.publish

    def counting(self: RunWeights) -> None:
        number = self.current.version + 1
        counts.append([c.norm > 0 for c in alone(sea.stores.ledger).contributions.of_round(number)])
        publish(self)

    monkeypatch.setattr(RunWeights, "publish", counting)

    sea.run()

    assert counts == [[True, True]] * ROUNDS


def test_island_that_lost_its_directory_starts_from_the_runs_weights(sea, calm):
    """The ledger is the truth: the run completes, with another inner state and so other bits."""

    def killed_and_erased(sea: Sea, _: Call) -> Any:
        for path in (sea.home / "a").glob("*-[0-9]*"):
            shutil.rmtree(path)
        raise Killed

    sea.faults = {("a", "step", 3): killed_and_erased}

    assert sea.run() != calm


def test_residual_of_error_feedback_is_part_of_what_continues(tmp_path):
    """The control: bits of a bf16 upload depend on what rounding lost before."""
    with_feedback = Sea(tmp_path / "with").run()
    without = Sea(tmp_path / "without", **{"upload.error_feedback": False}).run()

    assert with_feedback != without


def test_download_that_breaks_off_resumes_where_it_stood(sea, calm):
    taken: list[int] = []

    def broken(sea: Sea, call: Call) -> Any:
        progress: DownloadProgress = sea.kwargs["progress"]
        sink = sea.kwargs["sink"]
        spooled = offered(sea)
        progress.opened(spooled.tag, 0)
        sink(spooled.read(0, 1000))
        progress.offset = 1000
        taken.append(1000)
        raise CoordinatorUnreachable

    sea.faults = {("a", "download", 2): broken}

    assert sea.run() == calm
    assert taken == [1000]


def test_download_overtaken_by_a_newer_version_is_fetched_whole(sea, calm):
    """A frame begun is never continued with another one's bytes."""

    def overtaken(sea: Sea, _: Call) -> Any:
        progress: DownloadProgress = sea.kwargs["progress"]
        spooled = offered(sea)
        progress.opened(spooled.tag, 0)
        sea.kwargs["sink"](spooled.read(0, 1000))
        progress.offset, progress.tag = 1000, "weights-0-gone"
        raise CoordinatorUnreachable

    sea.faults = {("a", "download", 2): overtaken}

    assert sea.run() == calm


def test_damaged_download_is_fetched_whole(sea, calm):
    def damaged(sea: Sea, _: Call) -> Any:
        spooled = offered(sea)
        data = bytearray(spooled.read(0, spooled.nbytes))
        data[3000] ^= 1
        sea.kwargs["sink"](bytes(data))

    sea.faults = {("a", "download", 2): damaged}

    assert sea.run() == calm


def test_progress_refuses_another_frame_than_the_one_begun():
    progress = DownloadProgress(tag="weights-1-aa", offset=10)

    with pytest.raises(FrameError, match="fetched whole"):
        progress.opened("weights-2-bb", 10)


@pytest.fixture
def slow(tmp_path: Path) -> Sea:
    """A run that does not wait for the slow: one contribution is a quorum."""
    return Sea(
        tmp_path,
        **{
            "stop.rounds": 4,
            "membership.min_workers": 1,
            "membership.quorum": 1,
            "membership.grace_seconds": 1.0,
        },
    )


def late(sea: Sea, call: Call) -> Any:
    sea.scheduler.sleep(2.0)
    return call()


def test_island_whose_round_closed_without_it_goes_on(slow):
    """StaleContribution rolls back, its rows go to a later round, and it contributes again."""
    slow.faults = {("b", "upload", 2): late}

    slow.run()

    assert slow.stale["b"] == 1
    assert slow.status.stale_contributions == 1


def test_stale_island_contributes_to_a_later_round(slow, monkeypatch):
    slow.faults = {("b", "upload", 1): late}
    by: list[set[str]] = []
    publish = RunWeights.publish

    def watching(self: RunWeights) -> None:
        number = self.current.version + 1
        by.append({c.worker_id for c in alone(slow.stores.ledger).contributions.of_round(number)})
        publish(self)

    monkeypatch.setattr(RunWeights, "publish", watching)

    slow.run()

    assert "b" in set.union(*by)
    assert any("b" not in workers for workers in by)


def test_island_that_was_deregistered_registers_again(sea, calm):
    """An island that the run no longer knows does not train on for nothing."""

    def forgotten(sea: Sea, call: Call) -> Any:
        sea.coordinator.kick("a")
        sea.coordinator.allow("a")
        return call()

    sea.faults = {("a", "upload", 2): forgotten}

    assert sea.run() == calm
    assert sea.calls["a", "register"] == 2


def test_earlier_life_of_an_island_stops_when_a_later_one_took_over(sea):
    def taken_over(sea: Sea, call: Call) -> Any:
        sea.coordinator.register(sea.registration("a"))
        return call()

    sea.faults = {("a", "upload", 2): taken_over}

    with pytest.raises(Fenced, match="this process must stop"):
        sea.run()


def test_state_of_another_run_is_dropped(tmp_path, calm):
    other = Sea(tmp_path / "other", seed=99)
    other.run()
    mine = Sea(tmp_path / "mine")
    (tmp_path / "other" / "a").rename(tmp_path / "mine" / "a")
    for path in (tmp_path / "mine" / "a").glob("*/complete.json"):
        path.write_text(path.read_text().replace('"sea"', '"another"'))

    assert mine.run() == calm


def test_island_keeps_one_checkpoint_and_nothing_pending_at_the_end(sea):
    sea.run()

    for name in NAMES:
        kept = sorted(p.name for p in (sea.home / name).iterdir() if p.is_dir())
        assert kept == [f"checkpoint-{ROUNDS}"]


def test_state_of_rounds_the_coordinator_has_not_come_to_is_dropped(tmp_path, calm):
    """A coordinator restored from an older copy: the island's later rounds never happened."""
    ahead = Sea(tmp_path / "ahead")
    ahead.run()
    mine = Sea(tmp_path / "mine")
    (tmp_path / "ahead" / "a").rename(tmp_path / "mine" / "a")

    assert mine.run() == calm
