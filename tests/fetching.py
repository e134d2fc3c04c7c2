"""Peers, buckets and validators that are played, in the virtual time of fibers."""

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from atoll.blobs.bucket import Tag
from atoll.clock import Clock
from atoll.errors import ObjectChanged, ObjectMissing, StoreAway, StoreLate
from atoll.gather import publish
from atoll.gather import statement as statements
from atoll.gather.fetch import Fetcher
from atoll.gather.keys import SecretKey
from atoll.gather.peers import Peer
from atoll.gather.spool import Spool
from atoll.gather.statement import Statement
from atoll.gather.words import Reason, Skip
from atoll.simulate.fibers import Scheduler

T = TypeVar("T")
WINDOW = 7
NBYTES = 300_000
BASE = "b" * 64
GRAIN = 512  # bytes that come at a time


def secret(uid: str) -> SecretKey:
    return SecretKey(hashlib.sha256(uid.encode()).digest())


def peer(uid: str, bucket: str = "main") -> Peer:
    return Peer(uid, secret(uid).public, bucket, f"peers/{uid}")


def body(uid: str, nbytes: int = NBYTES) -> bytes:
    return (hashlib.sha256(b"body" + uid.encode()).digest() * (nbytes // 32 + 1))[:nbytes]


def document(uid: str, data: bytes, **changes: Any) -> bytes:
    told: dict[str, Any] = {
        "run_id": "run",
        "manifest_sha256": "a" * 64,
        "uid": uid,
        "window": WINDOW,
        "base_digest": BASE,
        "sample_digest": "c" * 64,
        "nbytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    return statements.signed(Statement(**(told | changes)), secret(uid))


@dataclass
class Manner:
    """How a bucket serves one peer's objects."""

    rate: float = 1e6  # bytes a second
    latency: float = 0.01
    away: tuple[float, float] = (0.0, 0.0)  # from, until
    missing_until: float = 0.0
    breaks_at: int = -1  # once, at that byte of an object
    changes_at: int = -1  # from that byte on it is another object
    is_stalled: bool = False


class PlayedBucket:
    """Objects that come at a peer's own speed; counts what was sent of each."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.objects: dict[str, bytes] = {}
        self.manners: dict[str, Manner] = {}
        self.sent: dict[str, list[tuple[int, int]]] = {}
        self.looks: list[str] = []

    def publish(self, uid: str, data: bytes | None = None, **changes: Any) -> None:
        data = body(uid) if data is None else data
        sha256 = hashlib.sha256(data).hexdigest()
        self.objects[publish.frame_key(f"peers/{uid}", sha256)] = data
        self.objects[publish.statement_key(f"peers/{uid}", WINDOW)] = document(uid, data, **changes)

    def manner(self, key: str) -> Manner:
        return self.manners.setdefault(key.split("/")[1], Manner())

    def look(self, key: str, *, deadline: float) -> Tag | None:
        self.looks.append(key)
        self._answer(key, deadline)
        if self.clock.now() < self.manner(key).missing_until:
            return None
        data = self.objects.get(key)
        return None if data is None else Tag(len(data), hashlib.md5(data).hexdigest(), 5.0)

    def pieces(
        self, key: str, tag: Tag, start: int, stop: int, *, deadline: float
    ) -> Iterator[memoryview]:
        manner = self.manner(key)
        self._answer(key, deadline)
        data = self.objects.get(key)
        if data is None:
            raise ObjectMissing
        if hashlib.md5(data).hexdigest() != tag.entity:
            raise ObjectChanged(f"object {key} was replaced")
        while start < stop:
            grain = min(GRAIN if manner.rate < 1e5 else 64 << 10, stop - start)
            self._sleep(grain / manner.rate, deadline)
            if self._is_away(manner) or start <= manner.breaks_at < start + grain:
                manner.breaks_at = -1
                raise StoreAway
            if start <= manner.changes_at < start + grain:
                raise ObjectChanged(f"object {key} was replaced")
            self.sent.setdefault(key, []).append((start, start + grain))
            yield memoryview(data)[start : start + grain]
            start += grain

    def _answer(self, key: str, deadline: float) -> None:
        manner = self.manner(key)
        self._sleep(1e9 if manner.is_stalled else manner.latency, deadline)
        if self._is_away(manner):
            raise StoreAway

    def _is_away(self, manner: Manner) -> bool:
        return manner.away[0] <= self.clock.now() < manner.away[1]

    def _sleep(self, seconds: float, deadline: float) -> None:
        left = deadline - self.clock.now()
        self.clock.sleep(max(0.0, min(seconds, left)))
        if seconds >= left:
            raise StoreLate

    def bytes_sent(self) -> int:
        return sum(b - a for key, cut in self.sent.items() for a, b in cut if "/frames/" in key)

    def put(self, key: str, source: bytes | Path) -> Tag:
        raise NotImplementedError

    def create(self, key: str, data: bytes) -> bool:
        raise NotImplementedError

    def remove(self, key: str) -> None:
        raise NotImplementedError

    def keys(self, prefix: str) -> Iterator[str]:
        raise NotImplementedError


@dataclass(frozen=True)
class Seen:
    sha256: str
    nbytes: int
    payload_start: int
    squares: tuple[float, ...]


class PlayedValidator:
    """Checks size and hash, as the real one does last; refuses a byte that a test names."""

    def __init__(self, peer: Peer, statement: Statement, *, bad_byte: int | None = None) -> None:
        if statement.window != WINDOW or statement.uid != peer.uid:
            raise Skip(Reason.STATEMENT, f"another window or uid than {peer.uid!r}")
        self._statement = statement
        self._hash, self._taken, self._bad = hashlib.sha256(), 0, bad_byte

    def feed(self, piece: memoryview, /) -> None:
        self._hash.update(piece)
        self._taken += len(piece)
        if self._bad is not None and self._taken > self._bad:
            raise Skip(Reason.INDICES, "an index repeats")

    def finish(self) -> Seen:
        if self._hash.hexdigest() != self._statement.sha256:
            raise Skip(Reason.FRAME, "other bytes than the statement names")
        first = float(int(self._statement.sha256[:8], 16))
        return Seen(self._statement.sha256, self._taken, 100, (first, first / 3))


def in_fibers(scheduler: Scheduler) -> Callable[[list[Callable[[], None]]], None]:
    def run(works: list[Callable[[], None]]) -> None:
        fibers = [scheduler.spawn("fetch", work) for work in works]
        scheduler.wait_for(lambda: all(one.done for one in fibers), threading.Condition())

    return run


def played(*works: Callable[[], T], scheduler: Scheduler, limit_seconds: float = 1e5) -> list[T]:
    """What each of `works` returns, all at once in fibers."""
    found: dict[int, T] = {}

    def run(number: int, work: Callable[[], T]) -> None:
        found[number] = work()

    for number, work in enumerate(works):
        scheduler.spawn(f"work-{number}", partial(run, number, work))
    scheduler.run_until(lambda: len(found) == len(works), limit_seconds=limit_seconds)
    return [found[number] for number in range(len(works))]


def fetcher(
    scheduler: Scheduler, buckets: Mapping[str, PlayedBucket], home: Path, **changes: Any
) -> Fetcher:
    options: dict[str, Any] = {
        "window": WINDOW,
        "buckets": buckets,
        "validator_of": PlayedValidator,
        "spool": Spool(home),
        "clock": scheduler,
        "slots": 4,
        "piece_bytes": 256 << 10,
        "run": in_fibers(scheduler),
    }
    return Fetcher(**(options | changes))


def covered(cuts: Sequence[tuple[int, int]]) -> int:
    """How many different bytes are in ranges."""
    return len({k for a, b in cuts for k in range(a, b)})
