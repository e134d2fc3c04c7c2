"""A streaming run that goes on after the round that was to be its last, which carried all of it.

`Sea.run` ends with an audit: every row is in each fragment at most once.
"""

from pathlib import Path
from typing import Any

import pytest

from atoll.ledger.ledger import Ledger
from atoll.proof import pairs
from atoll.strategies.base import ALL
from tests.integration.test_resume_streaming import STREAMING
from tests.ledgers import alone
from tests.seas import Call, Killed, Sea

END, LATER_END = 4, 8
LAST = 7  # a step of the last round
DELAYS = pytest.mark.parametrize("delay", [0, 3], ids="delay {}".format)


def streaming(home: Path, delay: int) -> Sea:
    """Two steps a round, so that none or two rounds are in flight."""
    return Sea(home, **{**STREAMING, "sync_every": 4, "delay_steps": delay, "stop.rounds": END})


def check(ledger: Ledger) -> None:
    """Two rounds carried the whole model, and every row is in every fragment."""
    rounds = alone(ledger).rounds.all()
    made = [c for r in rounds for c in alone(ledger).contributions.of_round(r.round)]
    assert [r.round for r in rounds if r.fragment == ALL] == [END, LATER_END]
    assert {(c.first, c.round) for c in made if c.round > END} == {(5, 5), (5, 6), (6, 7), (7, 8)}
    found = pairs.balance(rounds, made, fragments=2)
    assert [(f.missed, f.to_come) for f in found] == [(0, 0), (0, 0)]


@DELAYS
def test_run_that_had_ended_goes_on_from_the_published_weights(tmp_path, delay):
    ended = streaming(tmp_path, delay)
    ended.run()
    again = streaming(tmp_path, delay)
    again.restart(**{"stop.rounds": LATER_END})

    again.run()

    again.open()
    check(again.stores.ledger)
    again.stores.ledger.close()


@pytest.mark.parametrize(("delay", "step"), [(0, LAST), (1, LAST - 1), (3, LAST)])
def test_run_whose_last_round_is_open_goes_on_from_the_published_weights(tmp_path, delay, step):
    def moved(sea: Sea, call: Call) -> Any:
        sea.restart(**{"stop.rounds": LATER_END})
        return call()

    sea = streaming(tmp_path, delay)
    sea.faults["a", "step", step] = moved

    sea.run()

    sea.open()
    check(sea.stores.ledger)
    sea.stores.ledger.close()


@DELAYS
def test_island_that_is_killed_after_a_round_of_all_goes_on_from_the_published_weights(
    tmp_path, delay
):
    def moved(sea: Sea, call: Call) -> Any:
        sea.restart(**{"stop.rounds": LATER_END})
        return call()

    def killed(_: Sea, __: Call) -> Any:
        raise Killed

    calm, sea = streaming(tmp_path / "calm", delay), streaming(tmp_path / "killed", delay)
    calm.faults["a", "step", LAST] = moved
    sea.faults = {("a", "step", LAST): moved, ("a", "step", LAST + 2): killed}

    assert sea.run() == calm.run()
    assert sea.lives["a"] == 2
