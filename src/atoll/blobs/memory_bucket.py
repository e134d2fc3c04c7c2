"""A bucket in this process's memory: for simulation and tests. Nothing survives the process."""

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

from atoll import files as filesystem
from atoll.blobs import bucket as buckets
from atoll.blobs.bucket import PIECE_BYTES, Tag
from atoll.clock import Clock


class MemoryBucket:
    """Objects in a dictionary; several threads may share it."""

    def __init__(self, clock: Clock, *, name: str = "memory") -> None:
        self._clock = clock
        self._name = name
        self._objects: dict[str, tuple[Tag, bytes]] = {}
        self._serial = itertools.count(1)
        self._lock = threading.Lock()

    def look(self, key: str, *, deadline: float) -> Tag | None:
        buckets.check_key(key)
        self._check_time(key, deadline)
        found = self._objects.get(key)
        return found and found[0]

    def pieces(
        self, key: str, tag: Tag, start: int, stop: int, *, deadline: float
    ) -> Iterator[memoryview]:
        buckets.check_key(key)
        buckets.check_range(key, tag, start, stop)
        for begin in range(start, stop, PIECE_BYTES):
            self._check_time(key, deadline)
            found = self._objects.get(key)
            if found is None:
                raise buckets.missing(self._where(key))
            if found[0].entity != tag.entity:
                raise buckets.changed(self._where(key))
            yield memoryview(found[1])[begin : min(begin + PIECE_BYTES, stop)]

    def put(self, key: str, source: bytes | Path) -> Tag:
        buckets.check_key(key)
        if isinstance(source, Path):
            with filesystem.naming("read", source):
                source = source.read_bytes()
        with self._lock:
            return self._keep(key, source)

    def create(self, key: str, data: bytes) -> bool:
        buckets.check_key(key)
        with self._lock:
            if key in self._objects:
                return False
            self._keep(key, data)
            return True

    def remove(self, key: str) -> None:
        buckets.check_key(key)
        with self._lock:
            self._objects.pop(key, None)

    def keys(self, prefix: str) -> Iterator[str]:
        buckets.check_key(prefix)
        with self._lock:
            found = [key for key in self._objects if key.startswith(prefix + "/")]
        return iter(found)

    def _keep(self, key: str, data: bytes) -> Tag:
        tag = Tag(len(data), f"{next(self._serial)}", self._clock.wall())
        self._objects[key] = (tag, bytes(data))
        return tag

    def _check_time(self, key: str, deadline: float) -> None:
        if self._clock.now() >= deadline:
            raise buckets.late(self._where(key))

    def _where(self, key: str) -> str:
        return f"object {self._name}:{key}"
