"""Buckets of a simulated run: servers that go away, and lose, swap or cut what they keep."""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from atoll.blobs.bucket import Tag
from atoll.blobs.memory_bucket import MemoryBucket
from atoll.clock import Clock
from atoll.errors import StoreAway, StoreLate
from atoll.simulate.faults.world import ProcessClock, World

FLAKY_RATE = 0.1  # of calls that fail, where a seed has such servers


class LeapingClock(ProcessClock):
    """What waits within one event is not held up: the time passes after it, all at once."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.leapt = 0.0

    def now(self) -> float:
        return super().now() + self.leapt

    def sleep(self, seconds: float) -> None:
        self.leapt += seconds

    def wait_for(
        self,
        holds: Callable[[], object],
        changed: threading.Condition,  # noqa: ARG002  # nothing else happens within an event
        *,
        seconds: float | None = None,
    ) -> bool:
        if not holds():
            assert seconds is not None, f"nobody but time makes {holds} true"
            self.leapt += seconds
        return bool(holds())


class FaultyBucket(MemoryBucket):
    """A bucket as one process sees it; what it keeps, all of them see."""

    def __init__(self, world: World, *, name: str) -> None:
        super().__init__(ProcessClock(world), name=name)
        self._world = world
        self._rng = world.stream(f"bucket {name}")

    def seen_by(self, clock: Clock) -> "FaultyBucket":
        """For a process whose deadlines are in the time of `clock`."""
        seen = copy.copy(self)
        seen._clock = clock
        return seen

    # What its server does to those who ask

    def look(self, key: str, *, deadline: float) -> Tag | None:
        self._answer(key)
        return super().look(key, deadline=deadline)

    def pieces(
        self, key: str, tag: Tag, start: int, stop: int, *, deadline: float
    ) -> Iterator[memoryview]:
        self._answer(key)
        for piece in super().pieces(key, tag, start, stop, deadline=deadline):
            if self._is_flaky():
                yield piece[: len(piece) // 2]
                raise StoreAway(f"the connection broke within {key!r}")
            yield piece

    def put(self, key: str, source: bytes | Path) -> Tag:
        self._answer(key)
        done = super().put(key, source)
        self._answer(key)  # done, and nobody hears of it
        return done

    def create(self, key: str, data: bytes) -> bool:
        self._answer(key)
        done = super().create(key, data)
        self._answer(key)
        return done

    def remove(self, key: str) -> None:
        self._answer(key)
        super().remove(key)

    def keys(self, prefix: str) -> Iterator[str]:
        self._answer(prefix)
        return super().keys(prefix)

    def _answer(self, key: str) -> None:
        if self._world.now < self._world.away.get(self._name, 0.0):
            raise StoreAway(f"the server of {self._name!r} is away")
        if self._is_flaky():
            late = self._rng.random() < 0.5
            raise (StoreLate if late else StoreAway)(f"no answer about {key!r}")

    def _is_flaky(self) -> bool:
        return self._rng.random() < FLAKY_RATE and self._world.has("bucket flaky")

    # What it does to what it keeps

    def spoil(self, kind: str) -> str:
        """Loses, swaps or cuts an object; its key, or nothing where there is none."""
        keys = sorted(self._objects)
        if not keys:
            return ""
        key, other = self._rng.choice(keys), self._rng.choice(keys)
        _, data = self._objects[key]
        if kind == "object lost":
            del self._objects[key]
        elif kind == "object cut":
            self._keep(key, data[: self._rng.randrange(len(data))])
        else:
            self._keep(key, self._objects[other][1])
        return key


class Servers:
    """The buckets of a run by name; none where its strategy has none."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.stream("servers")
        named = world.scenario.settings.get("gather", {}).get("buckets", {})
        self._buckets = {name: FaultyBucket(world, name=name) for name in sorted(named)}

    @property
    def names(self) -> list[str]:
        return list(self._buckets)

    def seen_by(self, clock: Clock) -> Mapping[str, FaultyBucket]:
        """For one process."""
        return {name: bucket.seen_by(clock) for name, bucket in self._buckets.items()}

    def go_away(self, seconds: float) -> None:
        """One of them answers nobody for so long."""
        self._world.away[self._rng.choice(self.names)] = self._world.now + seconds

    def spoil(self, kind: str) -> None:
        """One of them loses, swaps or cuts an object."""
        name = self._rng.choice(self.names)
        self._world.note("object spoiled", f"{kind} {name} {self._buckets[name].spoil(kind)}")
