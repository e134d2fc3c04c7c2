"""Shares of the held-out rows, asked for by several request threads at once."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest

from atoll.coordinator.rounds.evaluation import Evaluation
from atoll.errors import ContributionError, WrongRound
from atoll.ledger import engines
from atoll.protocol.messages import EvaluationReport, Identity
from tests.clusters import DATA_IDENTITY, SMALL, manifest_for
from tests.ledgers import alone

ROWS = 12
PATIENCE_SECONDS = 0.2


class Overtaken(int):
    """A version whose first comparison with the newest gives another request time to pass by."""

    def meet(self, other: threading.Event) -> "Overtaken":
        self._other = other
        return self

    def __gt__(self, newest: int) -> bool:
        is_newer = int(self) > newest
        self._reached.set()
        self._other.wait(PATIENCE_SECONDS)
        return is_newer

    @property
    def _reached(self) -> threading.Event:
        return cast(threading.Event, self.__dict__.setdefault("reached", threading.Event()))

    def wait(self) -> None:
        """Until it is being compared."""
        assert self._reached.wait(10)


def evaluation(every: int = 1) -> Evaluation:
    made = manifest_for(SMALL, {"evaluate.every": every}, {**DATA_IDENTITY, "held_out_rows": ROWS})
    ledger = engines.open_ledger(":memory:")  # where nothing was evaluated yet
    for worker_id in "ab":
        alone(ledger).members.register(worker_id, "key", wall=0.0)
    return Evaluation(ledger, manifest=lambda: made)


def rows(found: Evaluation, worker_id: str, version: int, members: list[str]) -> set[int]:
    task = found.task(worker_id, version=version, members=members, final=False)
    return set() if task is None else set(range(task.start, task.stop))


def test_rows_of_a_version_are_cut_once_when_two_ask_at_the_same_time():
    """The round is filled up between the two questions, so each comes with its own members."""
    found, is_done = evaluation(), threading.Event()
    first = Overtaken(1).meet(is_done)

    def second() -> set[int]:
        first.wait()
        try:
            return rows(found, "b", 1, ["a", "b", "c"])
        finally:
            is_done.set()

    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(second)
        mine = rows(found, "a", first, ["a", "b"])

    assert mine & later.result() == set()
    assert mine | later.result() == set(range(ROWS))


def test_request_that_was_overtaken_does_not_cut_the_newer_rows_anew():
    found = evaluation()
    newer = rows(found, "a", 2, ["a", "b"])

    late = rows(found, "c", 1, ["a", "b", "c"])

    assert late == set()
    assert rows(found, "b", 2, ["a", "b", "c"]) == set(range(ROWS)) - newer


# Where training does not wait for versions


def report(found: Evaluation, worker_id: str, version: int, loss_sum: float = 1.0) -> None:
    who = Identity(
        run_id="r",
        manifest_sha256="0" * 64,
        worker_id=worker_id,
        incarnation=1,
        island_key="0" * 64,
        generation=1,
    )
    found.take(EvaluationReport(identity=who, version=version, loss_sum=loss_sum, tokens=1))


def test_version_that_nobody_held_is_made_up_for_by_the_next_and_only_once():
    found = evaluation(every=4)
    report_of_0 = rows(found, "a", 0, ["a"])
    report(found, "a", 0)

    asked = [len(rows(found, "a", version, ["a"])) for version in (1, 2, 3, 5)]
    report(found, "a", 5)

    assert report_of_0 == set(range(ROWS))
    assert asked == [0, 0, 0, ROWS]
    assert [len(rows(found, "a", version, ["a"])) for version in (6, 7, 8)] == [0, 0, ROWS]


@pytest.mark.parametrize("loss_sum", [-1e-300, -1e6, 1.1e6, 1.7e308])
def test_loss_that_no_model_has_is_left_out(loss_sum):
    found = evaluation()
    rows(found, "a", 1, ["a"])

    with pytest.raises(ContributionError, match="from 0 to 1e\\+06 for each token"):
        report(found, "a", 1, loss_sum)

    with found.ledger.reading() as t:
        assert list(t.evaluations.all()) == []
    report(found, "a", 1, 1e6)  # the control: the bound itself


def test_version_that_was_asked_for_and_not_reported_is_asked_for_again():
    found = evaluation(every=4)
    rows(found, "a", 4, ["a"])

    assert rows(found, "b", 5, ["b"]) == set(range(ROWS))


def test_later_version_will_do_where_one_island_has_all_the_rows():
    found = evaluation()
    rows(found, "a", 1, ["a"])

    report(found, "a", 3)

    with found.ledger.reading() as t:
        assert [(e.version, e.worker_id) for e in t.evaluations.all()] == [(3, "a")]


@pytest.mark.parametrize("version", [0, 2])
def test_shared_rows_are_of_one_version(version):
    found = evaluation()
    rows(found, "a", 1, ["a", "b"])

    with pytest.raises(WrongRound, match=f"version={version} of the evaluation was not asked"):
        report(found, "a", version)

    with found.ledger.reading() as t:
        assert t.evaluations.all() == []
