"""Fixtures of all tiers: the real servers of a run, shared by its workers, and its logs."""

import logging
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import hypothesis
import pytest

from tests import servers
from tests.servers import RunningServer, ServerMissing, Servers

_SERVERS: pytest.StashKey[Servers] = pytest.StashKey()
_OWNER: pytest.StashKey[tuple[str, int]] = pytest.StashKey()
_OWNED = "atoll_servers"

# An example's time is the machine's affair, not the code's.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


def pytest_configure(config: pytest.Config) -> None:
    given = getattr(config, "workerinput", None)
    if given is None:
        # Not below pytest's own folder: PostgreSQL's user must be able to reach its data.
        directory, owner_pid = tempfile.mkdtemp(prefix="atoll-servers-"), os.getpid()
    else:
        directory, owner_pid = given[_OWNED]
    config.stash[_SERVERS] = Servers(Path(directory), owner_pid=owner_pid)
    config.stash[_OWNER] = (directory, owner_pid)


# Files of few tests that take long: begun first, or one core waits for the other at the end.
LONG_FIRST = ("tests/faults/", "tests/e2e/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long files first; within them, and after them, the order of collection."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG_FIRST))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    """Tells an xdist worker where the run's servers are."""
    node.workerinput[_OWNED] = node.config.stash[_OWNER]


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and _SERVERS in config.stash:
        config.stash[_SERVERS].stop()


@pytest.fixture(autouse=True)
def logs_of_the_process() -> None:
    """Every test has the logs of a fresh process, whatever commands ran in this one before it.

    A command in a fixture of a whole module leaves them on a stream that is closed by now.
    """
    root = logging.getLogger("atoll")
    root.handlers[:], root.propagate = [], True
    root.setLevel(logging.NOTSET)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from a second thread, and on a busy machine they wait for it.

    All of `tests/integration` has it; a file elsewhere asks for it with `usefixtures`.
    """
    import torch  # here: the process that only hands tests out needs none

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def s3_server(pytestconfig: pytest.Config) -> RunningServer:
    """A SeaweedFS server with the bucket `servers.BUCKET`; tests choose a prefix of their own."""
    return _or_skip(pytestconfig.stash[_SERVERS].s3)


@pytest.fixture(scope="session")
def postgres_server(pytestconfig: pytest.Config) -> RunningServer:
    """A PostgreSQL server; most tests want `postgres_url`."""
    return _or_skip(pytestconfig.stash[_SERVERS].postgres)


@pytest.fixture
def postgres_url(postgres_server: RunningServer) -> str:
    """The URL of a fresh, empty PostgreSQL database, postgresql+psycopg://..."""
    return servers.create_database(postgres_server, f"test_{uuid.uuid4().hex}")


@pytest.fixture(scope="session")
def skip() -> Callable[[str], NoReturn]:
    """Skips what this machine lacks something for; with CI=true that is a failure."""
    return _skip


def _or_skip(start: Callable[[], RunningServer]) -> RunningServer:
    try:
        return start()
    except ServerMissing as exc:
        _skip(str(exc))


def _skip(reason: str) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason} (CI=true: this may not be skipped)")
    pytest.skip(reason)
