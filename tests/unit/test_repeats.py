"""Log lines that repeat: counted and told, whoever logs them, in bounded memory."""

import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from atoll.cli import output
from atoll.cli.repeats import BURST, WINDOW_SECONDS, Repeats
from atoll.clock import ManualClock


class Log:
    """A logger with the filter on its only handler, on a clock of the test."""

    def __init__(self, *, most_keys: int = 512, clock: ManualClock | None = None) -> None:
        self.lines: list[str] = []
        self.clock = clock or ManualClock()
        handler = logging.Handler()
        handler.emit = self._emit  # type: ignore[method-assign]
        self.repeats = Repeats(
            handler.handle, self.clock, fields_of=output.fields_of, most_keys=most_keys
        )
        handler.addFilter(self.repeats)
        self._handler = handler
        self._format = output.FieldsFormatter("%(message)s")

    def _emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self._format.format(record))

    def say(
        self, event: str, *, level: int = logging.INFO, exc_info: object = None, **fields: object
    ) -> None:
        said = {"name": "x", "levelno": level, "msg": event, "exc_info": exc_info, **fields}
        self._handler.handle(logging.makeLogRecord(said))

    def later(self, seconds: float = WINDOW_SECONDS) -> None:
        self.clock.advance(seconds=seconds)


def test_equal_lines_are_one_and_the_next_after_the_window_tells_how_many_were_left_out():
    log = Log()
    for _ in range(1000):
        log.say("no file", fd=3)
    log.later()
    log.say("no file", fd=3)

    assert log.lines == ["no file  fd=3", "no file  fd=3  repeated=999"]


def test_count_is_told_when_another_line_comes_after_the_window():
    log = Log()
    for _ in range(3):
        log.say("no file")
    log.say("round closed")
    log.later()
    log.say("round frozen")

    assert log.lines == ["no file", "round closed", "no file  repeated=2", "round frozen"]


def test_lines_that_differ_in_a_field_all_pass():
    log = Log()
    for number in range(200):
        log.say("round closed", round=number)

    assert log.lines == [f"round closed  round={number}" for number in range(200)]


def test_flood_of_one_warning_passes_in_bursts_whatever_its_fields():
    log = Log()
    for number in range(1000):
        log.say("refused", level=logging.WARNING, port=number)
    log.later()
    log.say("refused", level=logging.WARNING, port=1000)

    assert log.lines[:BURST] == [f"refused  port={number}" for number in range(BURST)]
    assert log.lines[BURST:] == [f"refused  port=1000  repeated={1000 - BURST}"]


def test_lines_of_other_levels_and_loggers_are_not_repeats():
    log = Log()
    log.say("no file", level=logging.WARNING)
    log.say("no file", level=logging.ERROR)
    log.say("no file", level=logging.ERROR, name="y")

    assert len(log.lines) == 3


def test_traceback_is_in_the_first_line_alone():
    log = Log()
    try:
        raise OSError("too many")
    except OSError:
        for _ in range(5):
            log.say("accept", level=logging.ERROR, exc_info=sys.exc_info())
    log.repeats.tell_rest()

    assert "Traceback" in log.lines[0]
    assert log.lines[1:] == ["accept  repeated=4"]


def test_end_tells_what_was_not_told_once():
    log = Log()
    log.say("no file")
    log.say("no file")
    log.repeats.tell_rest()
    log.repeats.tell_rest()

    assert log.lines == ["no file", "no file  repeated=1"]


def test_no_line_is_lost_of_sight_when_there_are_too_many_to_remember():
    log = Log(most_keys=4)
    log.say("first")
    log.say("first")
    for number in range(100):
        log.say("other", number=number)

    assert "first  repeated=1" in log.lines
    assert len(log.lines) == 102
    assert log.repeats.remembered <= 4


class Crossing(ManualClock):
    """Lets other threads go on in the middle of a look at it, and notes who else looks then."""

    inside, most = 0, 0

    def now(self) -> float:
        self.inside += 1
        self.most = max(self.most, self.inside)
        os.sched_yield()
        self.inside -= 1
        return super().now()


def test_lines_of_many_threads_are_all_counted():
    clock = Crossing()
    log = Log(clock=clock)
    with ThreadPoolExecutor(8) as pool:
        for _ in range(4000):
            pool.submit(log.say, "no file")
    log.repeats.tell_rest()

    assert log.lines == ["no file", "no file  repeated=3999"]
    assert clock.most == 1


@pytest.mark.parametrize("name", ["atoll.x", "asyncio"])
def test_commands_count_repeats_of_their_own_and_of_the_libraries_that_serve(
    capsys, monkeypatch, name
):
    loggers = [logging.getLogger(n) for n in ("atoll", "asyncio", "uvicorn", "grpc")]
    before = [(x.handlers[:], x.level, x.propagate) for x in loggers]
    try:
        output.set_up_logs("info")
        for _ in range(5):
            logging.getLogger(name).error("socket.accept() out of system resource")
        assert capsys.readouterr().err.count("out of system resource") == 1
        [handler] = logging.getLogger("atoll").handlers
        [repeats] = handler.filters
        assert isinstance(repeats, Repeats)
        repeats.tell_rest()
        assert "repeated=4" in capsys.readouterr().err
    finally:
        for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
            logger.handlers[:], logger.propagate = handlers, propagate
            logger.setLevel(level)


@pytest.mark.parametrize(("closed", "said"), [(False, "no file  repeated=2"), (True, "")])
def test_rest_is_told_at_the_end_of_the_process_where_stderr_is_still_open(closed, said):
    script = (
        "import io, logging, os, sys; from atoll.cli import output; sys.stderr = io.TextIOWrapper("
        "os.fdopen(os.dup(2), 'wb')); output.set_up_logs('info');"
        "[logging.getLogger('atoll').info('no file') for _ in range(3)];"
        f"sys.stderr.close() if {closed} else None; sys.stderr = sys.__stderr__"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    first, *rest = [line.partition("INFO    ")[2] for line in ended.stderr.splitlines()]
    assert (ended.returncode, first, "".join(rest)) == (0, "no file", said)
    assert "Logging error" not in ended.stderr
