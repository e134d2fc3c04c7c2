"""What tests of faults share: a strategy from outside, and programs that run under strace."""

from collections.abc import Callable, Iterator
from typing import NoReturn

import pytest

from tests import distributions, strace
from tests.crashes import CrashRun, Undisturbed
from tests.faults.power.recording import Recording, record


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The strategy from outside, for what a synchronous run cannot show."""
    with distributions.relay_installed(tmp_path_factory.mktemp("relay")):
        yield


@pytest.fixture(scope="module")
def program(skip: Callable[[str], NoReturn]) -> Iterator[CrashRun]:
    """The run of `crash_run.py`, loaded and waiting for jobs."""
    strace.require(skip)
    with CrashRun.started() as started:
        yield started


@pytest.fixture(scope="module")
def undisturbed(program: CrashRun) -> Undisturbed:
    return program.undisturbed()


@pytest.fixture(scope="module")
def recording(
    tmp_path_factory: pytest.TempPathFactory, skip: Callable[[str], NoReturn]
) -> Recording:
    """A run's durable calls, for power cuts between them."""
    strace.require(skip)
    return record(tmp_path_factory.mktemp("power"))
