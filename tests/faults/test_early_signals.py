"""SIGTERM and SIGINT before a coordinator serves: it ends with 0 and a line, and starts again.

A pipe in the place of a file that a start reads holds it where it is, for as long as the test
wants.
"""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from atoll.errors import AtollError, StateHeld
from atoll.launch import state
from atoll.ledger.sqlite import lock
from tests import processes
from tests.commanded import RUN_FILE
from tests.ledgers import alone
from tests.lives import Life, Lives

SIGNALS = [signal.SIGTERM, signal.SIGINT]


@dataclass(frozen=True)
class Start:
    """A coordinator on its way; `run` has its directory and run file."""

    run: Lives
    life: Life

    def end(self, number: signal.Signals) -> tuple[int | None, str]:
        """Tells it to stop; its exit code and what it printed."""
        self.life.signal(number)
        return self.life.wait(), self.life.log.tail()


def held_by(pipe: Path, life: Life) -> None:
    """Returns once the process reads from the pipe, which gives it nothing."""

    def reads() -> bool:
        if not life.is_running():
            raise AtollError(f"it ended by itself:\n{life.log.tail()}")
        try:
            os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)  # open until this process ends
        except OSError:
            return False
        return True

    processes.eventually("a reader of the pipe", reads)


@pytest.fixture
def reading_its_file(tmp_path: Path) -> Iterator[Start]:
    """It reads its run file: nothing is opened yet."""
    pipe = tmp_path / "run.toml"
    os.mkfifo(pipe)
    with Lives(tmp_path / "lives", pipe) as run:
        life = run.start_coordinator()
        held_by(pipe, life)
        yield Start(run, life)


@pytest.fixture
def holding_its_state(tmp_path: Path) -> Iterator[Start]:
    """It opens its directory, which is locked by now."""
    file, pipe = tmp_path / "run.toml", tmp_path / "lives" / "coordinator" / "stores.json"
    file.write_text(RUN_FILE)
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)
    with Lives(tmp_path / "lives", file) as run:
        life = run.start_coordinator()
        held_by(pipe, life)
        with pytest.raises(StateHeld, match=f"process {life.pid}"):
            lock.hold(run.directory())
        yield Start(run, life)


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_while_it_reads_its_run_file_ends_it_well(
    reading_its_file: Start, number: signal.Signals
) -> None:
    code, said = reading_its_file.end(number)

    assert code == 0
    assert f"coordinator stopped by {number.name} before it served" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_while_it_holds_its_state_ends_it_well_and_it_starts_again(
    holding_its_state: Start, number: signal.Signals
) -> None:
    run = holding_its_state.run

    code, said = holding_its_state.end(number)

    assert (code, "Traceback" in said) == (0, False)
    assert f"coordinator stopped by {number.name} before it served" in said
    (run.directory() / "stores.json").unlink()
    again = run.serve()
    again.signal(number)
    assert again.wait() == 0
    with state.at_rest(run.directory()) as (ledger, _):
        assert alone(ledger).run.get() is not None
        assert ledger.damage() == []


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_while_an_island_waits_for_its_coordinator_ends_it_as_a_signal_does(
    tmp_path: Path, number: signal.Signals
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        words = [*processes.ATOLL, "join", f"http://127.0.0.1:{silent.getsockname()[1]}"]
        words += ["--token", "of-tests", "--state", str(tmp_path / "island")]
        island = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Tests that run in the background ignore it, and so would what they start.
            preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
        )
        with silent.accept()[0]:
            island.send_signal(number)
            said, _ = island.communicate(timeout=60)

    assert island.returncode == 130
    assert b"Traceback" not in said
