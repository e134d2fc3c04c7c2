"""Signals before a coordinator serves: heard once, and not amid what belongs together."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from atoll.cli.stopping import SIGNALS, EarlySignals, Stopped


@pytest.fixture
def early() -> Iterator[EarlySignals]:
    before = [signal.getsignal(number) for number in SIGNALS]
    made = EarlySignals()
    made.listen()
    yield made
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


def tell(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_ends_what_is_under_way(early, number):
    with pytest.raises(Stopped):
        tell(number)

    assert number.name in early.told


def test_second_signal_does_not_cut_short_what_closes(early):
    with pytest.raises(Stopped):
        tell(signal.SIGTERM)

    tell(signal.SIGINT)

    assert "SIGTERM" in early.told


def test_steps_that_belong_together_are_done_before_it_is_heard(early):
    done = []

    def act() -> None:
        with early.held_back():
            tell(signal.SIGTERM)
            done.append("all of it")

    with pytest.raises(Stopped):
        act()

    assert done == ["all of it"]


def test_nothing_is_raised_without_a_signal(early):
    with early.held_back():
        early.check()

    assert early.told is None


ENDS_LATE = """
import os, signal, sys
from atoll.cli import main

class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
        kill(pid, number)

last = Last()  # goes with the modules, when Python has let go of its handlers
sys.argv = ["atoll", {command!r}, "--help"]
main()
"""


@pytest.mark.parametrize(("command", "code"), [("serve", 0), ("status", -signal.SIGTERM)])
def test_signal_after_the_end_of_a_coordinator_is_not_its_exit_code(command, code):
    words = [sys.executable, "-c", ENDS_LATE.format(command=command)]

    ended = subprocess.run(words, stdout=subprocess.DEVNULL, check=False, timeout=60)

    assert ended.returncode == code  # of another command: the control
