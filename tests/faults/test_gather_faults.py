"""Windows of a gather with real ranks and a real S3 server that fail: the right bits, or one name.

Ranks are processes that run the command's own code; they are killed or stopped at named points. The
points one by one, and stopped ranks at each of them, are for `make storm` (ATOLL_GATHER_FALLS=0:
all); the server that is killed for ten seconds is in `benchmarks.gather`.
"""

import math
import os
import shutil
import threading
from collections.abc import Iterator

import pytest

from atoll.gather import publish
from tests import gather_machines as machines
from tests.gather_machines import Machine, expected
from tests.gather_windows import same
from tests.processes import eventually
from tests.ranks.gather_window import APPLY, POINTS, STOP, Fall
from tests.s3_proxy import (
    Asked,
    S3Proxy,
    Sent,
    TokenBucket,
    broken_bytes,
    bytes_twice,
    proxied,
    sent_bytes,
)

pytestmark = [pytest.mark.storm, pytest.mark.s3, pytest.mark.timeout(900)]

ALL = (*POINTS, APPLY)
FALLS = int(os.environ.get("ATOLL_GATHER_FALLS", "1")) or len(ALL)
AWAY_SECONDS = float(os.environ.get("ATOLL_GATHER_AWAY", "2"))
TAKEN = ("10", "11", "8", "9", "r1")  # `7` and the first reserve publish nothing
DEADLINE_SECONDS = 4.0  # of a collective; later than a window's seconds
ELSEWHERE = 99  # a port that nobody is told of but by a redirect
TOLD = ("uids", "skipped", "success_rate", "download_bytes", "digest")


@pytest.fixture
def proxy(s3_server) -> Iterator[S3Proxy]:
    with proxied(s3_server.url) as made:
        yield made


@pytest.fixture(scope="module")
def published(tmp_path_factory, s3_server) -> Machine:
    """One run's objects, for all tests that change none of them."""
    machine = Machine(tmp_path_factory.mktemp("gather"), s3_server.url, S3Proxy(s3_server.url))
    machine.publish(*TAKEN)
    return machine


@pytest.fixture
def machine(published: Machine, proxy: S3Proxy) -> Machine:
    published.proxy, published.seconds, published.patience_seconds = proxy, 3.0, 0.3
    return published


@pytest.fixture
def state(request: pytest.FixtureRequest) -> str:
    return "".join(c if c.isalnum() else "-" for c in request.node.name)


def object_bytes(machine: Machine) -> int:
    with machine.bucket() as bucket:
        keys = [key for uid in TAKEN for key in bucket.keys(f"{machine.folder}/{uid}/frames")]
        tags = [bucket.look(key, deadline=machines.CLOCK.now() + 20) for key in keys]
    return sum(tag.nbytes for tag in tags if tag is not None)


def test_five_ranks_end_in_the_bits_of_one_and_of_the_reference(machine, state):
    one = machine.run(1, state=f"{state}-one")
    single = list(machine.proxy.sent)
    five = machine.run(5, state=f"{state}-five")

    assert sorted(five) == [0, 1, 2, 3, 4]
    told = [{name: found.get(name) for name in TOLD} for found in (*one.values(), *five.values())]
    assert told == [told[0]] * 6
    assert one[0]["uids"] == list(TAKEN) and one[0]["artifact"] == five[0]["artifact"]
    assert {uid: why[0] for uid, why in one[0]["skipped"].items()} == {
        "7": "MISSING",
        "r0": "MISSING",
    }
    for name in ("one", "five"):
        assert same(machine.weights(f"{state}-{name}"), expected(TAKEN))
    # Another set gives other weights: the comparison bites.
    assert not same(machine.weights(f"{state}-one"), expected((*TAKEN[:4], "r0")))
    # By the proxy's count every byte came once in each.
    needed = object_bytes(machine)
    several = machine.proxy.sent[len(single) :]
    assert sent_bytes(single) == sent_bytes(several) == needed
    assert bytes_twice(single) == bytes_twice(several) == 0


def test_rank_killed_at_one_point_after_another_ends_in_the_right_bits(machine, state):
    """Life after life on one state; the last one is left alone, and no byte came twice."""
    for number, point in enumerate(ALL):
        fall = Fall(rank=0 if point == "recorded" else number % 2, point=point)
        group = machine.start(2, state=state, fall=fall, timeout_seconds=DEADLINE_SECONDS)

        found = group.ended()

        assert group.fell(fall.rank) == point
        [other] = found.values()
        assert other["code"] == "MISSING_RANKS", (point, other)
        assert not (machine.home / state / "weights" / "00000001.f32").exists()
    found = machine.run(2, state=state)

    assert [one["uids"] for one in found.values()] == [list(TAKEN)] * 2
    assert same(machine.weights(state), expected(TAKEN))
    sent = machine.proxy.sent
    assert bytes_twice(sent) == 0
    assert sent_bytes(sent) <= object_bytes(machine) + broken_bytes(sent)


def test_control_rank_that_lost_its_spool_downloads_twice(machine, state):
    fall = Fall(rank=1, point="exchange")
    machine.start(2, state=state, fall=fall, timeout_seconds=DEADLINE_SECONDS).ended()
    for rank in (0, 1):
        shutil.rmtree(machine.home / state / f"rank-{rank}")

    machine.run(2, state=state)

    # But for what was sent just before the rank died, which may not have been taken.
    assert bytes_twice(machine.proxy.sent) > object_bytes(machine) / 2


@pytest.mark.parametrize("point", ALL[:1] if FALLS == 1 else ALL)
def test_rank_that_is_stopped_is_named_within_the_deadline(machine, state, point):
    point = "exchange" if FALLS == 1 else point
    fall = Fall(rank=0 if point == "recorded" else 1, point=point, signal=STOP)
    group = machine.start(3, state=state, fall=fall, timeout_seconds=DEADLINE_SECONDS)

    found = group.ended()

    assert group.fell(fall.rank) == point
    assert sorted(found) == sorted({0, 1, 2} - {fall.rank})
    assert {one["code"] for one in found.values()} == {"MISSING_RANKS"}
    # A window's own time, and one collective's.
    limit = machine.seconds + DEADLINE_SECONDS + 3.0
    assert all(one["took_seconds"] < limit for one in found.values())
    machine.run(3, state=state)
    assert same(machine.weights(state), expected(TAKEN))


def test_server_that_is_away_in_the_middle_costs_only_that_time(machine, state):
    machine.seconds = 20.0 + AWAY_SECONDS
    machine.proxy.limits = {rank: TokenBucket(20e3) for rank in range(2)}
    group = machine.start(2, state=state)
    eventually("a first piece", lambda: sent_bytes(list(machine.proxy.sent)) > 0)
    machine.proxy.is_away = True
    timer = threading.Timer(AWAY_SECONDS, lambda: setattr(machine.proxy, "is_away", False))
    timer.start()

    found = group.ended()
    timer.join()

    assert [one["uids"] for one in found.values()] == [list(TAKEN)] * 2
    assert same(machine.weights(state), expected(TAKEN))
    assert min(one["took_seconds"] for one in found.values()) > AWAY_SECONDS
    assert bytes_twice(machine.proxy.sent) == 0


def test_server_that_takes_no_artifact_for_some_attempts_costs_only_their_time(machine, state):
    """Each object of the archive is refused twice, the body and the record."""
    met: list[str] = []

    def overloaded(asked: Asked) -> bool:
        is_refused = "/archive-" in asked.key and asked.method == "PUT" and met.count(asked.key) < 2
        if is_refused:
            met.append(asked.key)
            asked.answer("503 Slow Down", "content-length: 0")
        return is_refused

    machine.proxy.intercept = overloaded

    found = machine.run(2, state=state)

    kinds = sorted(key.split("/")[-2] for key in met)
    assert kinds == ["bodies", "bodies", "windows", "windows"]
    assert [one["uids"] for one in found.values()] == [list(TAKEN)] * 2
    assert same(machine.weights(state), expected(TAKEN))


class Hostile:
    """What happens to the objects of some peers on their way; those of others pass."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.met: set[str] = set()
        self.followed: list[str] = []
        self._elsewhere = machine.proxy.port(ELSEWHERE)

    def __call__(self, asked: Asked) -> bool:
        if "elsewhere" in asked.key:
            self.followed.append(asked.key)
        _, _, folder, uid, kind, *_ = [*asked.key.split("/"), "", "", "", ""]
        manner = {"10": self._lies, "11": self._redirects, "9": self._swaps, "8": self._restates}
        if folder != self._machine.folder or kind != "frames" or uid not in manner:
            return False
        if asked.method != "GET":
            return False
        is_first = uid not in self.met
        self.met.add(uid)
        return manner[uid](asked, is_first)

    def _lies(self, asked: Asked, _: bool) -> bool:
        """The range that was asked for, and more bytes than it has."""
        told = {name.lower(): value for name, value in asked.headers.items()}
        start, last = told["range"].removeprefix("bytes=").split("-")
        with self._machine.bucket() as bucket:
            tag = bucket.look(_key(asked), deadline=machines.CLOCK.now() + 20)
        assert tag is not None
        place = f"content-range: bytes {start}-{last}/{tag.nbytes}"
        headers = (place, f"etag: {told['if-match']}", f"content-length: {1 << 28}")
        asked.answer("206 Partial Content", *headers, body=bytes(1 << 20))
        return True

    def _redirects(self, asked: Asked, _: bool) -> bool:
        where = f"location: {self._elsewhere}/elsewhere/object"
        asked.answer("307 Temporary Redirect", where, "content-length: 0")
        return True

    def _swaps(self, asked: Asked, is_first: bool) -> bool:
        """Another object under the same name, between the look and the read."""
        if is_first:
            with self._machine.bucket() as bucket:
                bucket.put(_key(asked), b"x" * 1000)
        return False

    def _restates(self, asked: Asked, is_first: bool) -> bool:
        """A second statement, after the first was read: that one counts."""
        if is_first:
            prefix = f"{self._machine.folder}/8"
            with self._machine.bucket() as bucket:
                bucket.put(publish.statement_key(prefix, 0), b"another statement")
        return False


def _key(asked: Asked) -> str:
    return asked.key.split("/", 2)[2]


def test_hostile_servers_change_nobody_elses_result(tmp_path, s3_server, proxy):
    machine = Machine(tmp_path, s3_server.url, proxy, seconds=4.0)
    machine.publish(*machines.PRIMARIES, *machines.RESERVES)
    hostile = Hostile(machine)
    proxy.intercept = hostile
    proxy.slow = {f"/{machine.folder}/7/": TokenBucket(500)}  # trickles

    found = machine.run(2, state="group")

    assert hostile.met == {"10", "11", "8", "9"} and hostile.followed == []
    assert {uid: why[0] for uid, why in found[0]["skipped"].items()} == {
        "10": "SIZE",
        "11": "MISSING",
        "7": "SLOW",
        "9": "CHANGED",
    }
    assert found[0]["uids"] == found[1]["uids"] == ["8", "r0", "r1"]
    assert same(machine.weights("group"), expected(("8", "r0", "r1")))


def test_proxy_counts_what_came_again_though_nothing_broke():
    def piece(start: int, nbytes: int, *, is_whole: bool) -> Sent:
        return Sent(0, "/b/frames/x", start, 100, nbytes, math.inf, is_whole)

    calm = [piece(0, 100, is_whole=True), piece(100, 100, is_whole=True)]
    broken = [*calm, piece(200, 60, is_whole=False), piece(250, 100, is_whole=True)]
    again = [*calm, piece(60, 100, is_whole=True)]

    assert [bytes_twice(one) for one in (calm, broken, again)] == [0, 0, 100]
    assert broken_bytes(broken) == 60
