"""One holder of a state directory at a time, named to the next."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from atoll.clock import SystemClock
from atoll.errors import StateHeld, StoreError
from atoll.ledger.sqlite import lock
from atoll.ledger.sqlite.lock import Lock

WALL = 1_700_000_000.0


def hold(directory: Path, *, pid: int, wall: float) -> Lock:
    """Holds it as a process of this number does, at this time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getpid", lambda: pid)
        patch.setattr(SystemClock, "wall", lambda _: wall)
        return lock.hold(directory)


def test_second_holder_is_told_process_host_and_start_of_the_first(tmp_path: Path):
    first = hold(tmp_path, pid=4242, wall=WALL)

    with pytest.raises(StateHeld) as caught:
        hold(tmp_path, pid=5, wall=WALL + 60)

    message = str(caught.value)
    assert f"process 4242 on {socket.gethostname()!r} since 2023-11-14 22:13:20 UTC" in message
    first.close()


def test_refused_holder_leaves_the_first_ones_name(tmp_path: Path):
    first = hold(tmp_path, pid=4242, wall=WALL)
    with pytest.raises(StateHeld):
        hold(tmp_path, pid=5, wall=WALL)

    written = json.loads(first.path.read_text())

    assert written == {"pid": 4242, "started": WALL, "host": socket.gethostname()}
    first.close()


def test_directory_can_be_held_again_when_its_lock_is_closed(tmp_path: Path):
    hold(tmp_path, pid=1234567890, wall=WALL + 0.123456).close()

    again = hold(tmp_path, pid=2, wall=WALL)

    assert json.loads(again.path.read_text())["pid"] == 2
    again.close()


def test_lock_is_released_by_leaving_the_block(tmp_path: Path):
    with closing(hold(tmp_path, pid=1, wall=WALL)):
        pass

    hold(tmp_path, pid=2, wall=WALL).close()


def test_closing_twice_does_not_release_the_next_holder(tmp_path: Path):
    first = hold(tmp_path, pid=1, wall=WALL)
    first.close()
    second = hold(tmp_path, pid=2, wall=WALL)

    first.close()

    with pytest.raises(StateHeld, match="process 2"):
        hold(tmp_path, pid=3, wall=WALL)
    second.close()


def test_refused_holder_leaks_no_descriptor(tmp_path: Path):
    first = hold(tmp_path, pid=1, wall=WALL)
    before = os.listdir("/proc/self/fd")

    with pytest.raises(StateHeld):
        hold(tmp_path, pid=2, wall=WALL)

    assert os.listdir("/proc/self/fd") == before
    first.close()


def test_holder_that_has_not_written_its_name_is_still_respected(tmp_path: Path):
    first = hold(tmp_path, pid=1, wall=WALL)
    first.path.write_bytes(b"")

    with pytest.raises(StateHeld, match="just started"):
        hold(tmp_path, pid=2, wall=WALL)

    first.close()


def test_absent_directory_is_refused_by_name(tmp_path: Path):
    with pytest.raises(StoreError, match=r"absent.*it must be a directory that can be written to"):
        hold(tmp_path / "absent", pid=1, wall=WALL)


HOLD = """
import sys
from pathlib import Path
from atoll.ledger.sqlite import lock
held = lock.hold(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_lock_ends_with_its_process_however_that_ends(tmp_path: Path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        with pytest.raises(StateHeld, match=f"process {child.pid} "):
            hold(tmp_path, pid=1, wall=WALL)

        child.send_signal(signal.SIGKILL)
        child.wait()

    hold(tmp_path, pid=1, wall=WALL).close()


def test_lock_is_not_passed_on_to_a_started_program(tmp_path: Path):
    first = hold(tmp_path, pid=1, wall=WALL)
    with subprocess.Popen(
        [sys.executable, "-S", "-c", "print('up', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        close_fds=False,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        open_files = Path("/proc/self/fd").iterdir()
        [mine] = [link for link in open_files if os.path.realpath(link) == str(first.path)]
        os.close(int(mine.name))  # as the end of this process would

        hold(tmp_path, pid=2, wall=WALL).close()

        child.kill()


def test_directory_that_is_replaced_while_it_is_being_opened_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The lock would be on the file of the one that is gone."""
    home = tmp_path / "c"
    home.mkdir()
    real = fcntl.flock

    def late(descriptor: int, how: int) -> None:
        home.rename(tmp_path / "moved")
        home.mkdir()
        real(descriptor, how)

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", late)
        with pytest.raises(StateHeld, match="moved away or replaced"):
            hold(home, pid=1, wall=WALL)

    hold(home, pid=2, wall=WALL).close()
