"""Shares of the held-out rows, asked for by several request threads at once."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from atoll.coordinator.rounds.evaluation import Evaluation
from atoll.ledger import engines
from tests.clusters import DATA_IDENTITY, SMALL, manifest_for

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


def evaluation() -> Evaluation:
    made = manifest_for(SMALL, {"evaluate.every": 1}, {**DATA_IDENTITY, "held_out_rows": ROWS})
    ledger = engines.open_ledger(":memory:")  # where nothing was evaluated yet
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
