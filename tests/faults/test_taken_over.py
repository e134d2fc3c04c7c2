"""Two coordinators and one run: the second is refused, or takes over and the first is fenced.

Real processes. On PostgreSQL and S3 the holder is stopped by SIGSTOP, another coordinator takes
over from another directory and publishes rounds, and SIGCONT wakes the first one with a request in
its socket that it would have recorded.
"""

import re
import signal
import socket
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import NullPool, create_engine, text

from atoll.blobs.registry import open_blobs
from atoll.island.link.network import NetworkLink
from atoll.protocol.messages import InfoRequest, RegisterRequest
from tests import ledgers, lives, processes, servers
from tests.lives import Life, Lives, Place

pytestmark = pytest.mark.xdist_group("taken-over")

REFUSED = 2
LEASE_SECONDS = 2.0
ROUNDS = 3
ISLANDS = ("island-0", "island-1")
UNFENCED = {"ATOLL_TEST_UNFENCED": "1"}


@dataclass(frozen=True)
class Seen:
    """The shared state at one moment."""

    state_hash: str
    rounds: int
    blobs: frozenset[str]


@dataclass(frozen=True)
class Woken:
    """What came of a stopped coordinator."""

    refused: tuple[int | None, str]  # the second one's first try, while the lease was live
    first_pid: int
    second_pid: int
    before: Seen
    after: Seen
    answer: bytes  # to the request that waited
    exit_code: int | None  # None: it serves on
    log: str


def seen(place: Place, spool: Path) -> Seen:
    """Read without holding anything."""
    assert place.ledger is not None
    assert place.blobs is not None
    state_hash = ledgers.state_hash(place.ledger)
    with create_engine(place.ledger, poolclass=NullPool).connect() as connection:
        published = text("SELECT count(*) FROM rounds WHERE state = 'published'")
        rounds = connection.execute(published).scalar_one()
    blobs = open_blobs(place.blobs, spool=spool, s3=place.s3)
    stored = frozenset(ref.sha256 for ref in blobs.stored())
    blobs.close()
    return Seen(state_hash, rounds, stored)


def is_settled(place: Place, spool: Path) -> bool:
    """Whether the last version has its snapshot and no blob is left that nothing references."""
    assert place.ledger is not None
    with create_engine(place.ledger, poolclass=NullPool).connect() as connection:
        newest = connection.execute(text("SELECT max(version) FROM snapshots")).scalar_one()
        kept = text(
            "SELECT initial_sha256 FROM runs UNION "
            "SELECT master_sha256 || published_sha256 || slots_sha256 FROM snapshots UNION "
            "SELECT sha256 FROM contributions WHERE round > (SELECT min(version) FROM snapshots)"
        )
        names = " ".join(connection.execute(kept).scalars())
    return newest == ROUNDS and all(name in names for name in seen(place, spool).blobs)


def is_stopped(life: Life) -> bool:
    stat = Path(f"/proc/{life.pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "T"


def lease_is_over(place: Place) -> bool:
    assert place.ledger is not None
    with create_engine(place.ledger, poolclass=NullPool).connect() as connection:
        silent = text(
            "SELECT clock_timestamp() - renewed > lease_seconds * interval '1 second' FROM holder"
        )
        return bool(connection.execute(silent).scalar_one())


def registration(url: str) -> bytes:
    """The request of one more island, as it goes over the wire."""
    link = NetworkLink(url, token=processes.TOKENS.worker)
    info = link.send(InfoRequest())
    link.close()
    request = RegisterRequest(
        run_id=info.run_id,
        manifest_sha256=info.manifest_sha256,
        worker_id="late",
        island_key="5" * 64,
        layout_digest=info.model_hash,
        data_identity=info.data.identity,
    )
    body = request.model_dump_json().encode()
    head = (
        "POST /workers/register HTTP/1.1\r\nHost: late\r\nConnection: close\r\n"
        f"Authorization: Bearer {processes.TOKENS.worker}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def answer(waiting: socket.socket) -> bytes:
    """All that comes until the other side hangs up."""
    said = b""
    try:
        while piece := waiting.recv(65536):
            said += piece
    except ConnectionError:
        pass  # a server that ends may reset instead of closing
    return said


def wake(home: Path, place: Place, variables: dict[str, str]) -> Woken:
    """The whole story; `variables` are the first coordinator's."""
    home.mkdir(parents=True, exist_ok=True)
    file = lives.run_file(
        home / "run.toml", place, rounds=ROUNDS, min_workers=2, retain="snapshots"
    )
    lease = ("--ledger-lease", str(LEASE_SECONDS))
    with Lives(home, file, place) as run:
        first = run.serve("first", *lease, **variables)
        late = registration(run.url)
        early = run.start_coordinator("second", *lease)
        refused = (early.wait(), early.log.tail())
        first.signal(signal.SIGSTOP)
        processes.eventually("the first one standing still", lambda: is_stopped(first))
        with socket.create_connection(("127.0.0.1", run.port)) as waiting:
            waiting.settimeout(processes.LIMIT_SECONDS)
            waiting.sendall(late)
            processes.eventually("the end of the lease", lambda: lease_is_over(place))
            run.port = 0
            second = run.serve("second", *lease, "--stay")
            for name in ISLANDS:
                run.join(name)
            run.finish(*ISLANDS)
            # Islands end with the last version; its snapshot and what goes with it come after.
            look = home / "look"
            processes.eventually("the last snapshot", lambda: is_settled(place, look))
            before = seen(place, home / "look")
            first.signal(signal.SIGCONT)
            said = answer(waiting)
        exit_code = None if variables else first.wait()
        after = seen(place, home / "look")
        return Woken(
            refused, first.pid, second.pid, before, after, said, exit_code, first.log.tail()
        )


@pytest.fixture(scope="module")
def shared(postgres_server: servers.RunningServer, s3_server: servers.RunningServer) -> Place:
    name = f"taken_{uuid.uuid4().hex}"
    return Place(
        ledger=servers.create_database(postgres_server, name),
        blobs=f"s3://{servers.BUCKET}/{name}",
        s3=lives.s3_access(s3_server),
    )


@pytest.fixture(scope="module")
def woken(shared: Place, tmp_path_factory: pytest.TempPathFactory) -> Woken:
    return wake(tmp_path_factory.mktemp("taken-over"), shared, {})


@pytest.mark.postgres
@pytest.mark.s3
def test_second_coordinator_is_refused_by_the_name_of_the_first(woken: Woken) -> None:
    code, log = woken.refused

    assert code == REFUSED
    assert re.search(rf"held by 'atoll pid {woken.first_pid} on .*, epoch 1, heard", log)


@pytest.mark.postgres
@pytest.mark.s3
def test_second_coordinator_publishes_while_the_first_is_stopped(woken: Woken) -> None:
    assert woken.before.rounds == ROUNDS


@pytest.mark.postgres
@pytest.mark.s3
def test_woken_coordinator_writes_nothing(woken: Woken) -> None:
    assert woken.after == woken.before
    assert b"200 OK" not in woken.answer


@pytest.mark.postgres
@pytest.mark.s3
def test_woken_coordinator_ends_and_names_the_new_holder(woken: Woken) -> None:
    last = woken.log.strip().splitlines()[-1]

    assert woken.exit_code == REFUSED
    assert re.search(rf"taken over and is held by 'atoll pid {woken.second_pid} on ", last)
    assert last.endswith("[SUPERSEDED]")


@pytest.mark.postgres
@pytest.mark.s3
def test_woken_coordinator_without_the_check_would_write(
    postgres_server: servers.RunningServer,
    s3_server: servers.RunningServer,
    tmp_path: Path,
) -> None:
    """The control: with the check patched away the request that waited is recorded."""
    name = f"mutant_{uuid.uuid4().hex}"
    place = Place(
        ledger=servers.create_database(postgres_server, name),
        blobs=f"s3://{servers.BUCKET}/{name}",
        s3=lives.s3_access(s3_server),
    )

    mutant = wake(tmp_path, place, UNFENCED)

    assert b"200 OK" in mutant.answer
    assert mutant.after.state_hash != mutant.before.state_hash


def test_second_coordinator_on_one_directory_is_refused_by_the_name_of_the_first(
    tmp_path: Path,
) -> None:
    place = Place()
    file = lives.run_file(tmp_path / "run.toml", place, rounds=1, min_workers=1, retain="all")
    with Lives(tmp_path, file, place) as run:
        first = run.serve("coordinator")
        second = run.start_coordinator("coordinator")

        code = second.wait()

        assert code == REFUSED
        assert f"is held by process {first.pid} on" in second.log.tail()
        assert first.is_running()
        first.signal(signal.SIGTERM)
        assert first.wait() == 0
