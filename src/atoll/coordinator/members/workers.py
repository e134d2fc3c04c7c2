"""Workers: who is in, in which incarnation, with which key.

Owns registration and the check of who speaks, in which life and generation, of every mutating
message. Knows nothing of rounds.
"""

import hashlib
import hmac
import threading
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace

from atoll.clock import Clock
from atoll.coordinator.members.heartbeats import Heartbeats
from atoll.errors import (
    Evicted,
    Fenced,
    ManifestMismatch,
    StaleGeneration,
    TooManyWorkers,
    UnknownWorker,
    WorkerTaken,
)
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import GenerationRecord, PublisherRecord, WorkerRecord
from atoll.protocol.messages import Identity, RegisterRequest

# Every name costs memory, a row and a line of /workers for as long as the run lasts.
MAX_NAMES = 10_000


def key_hash(island_key: str) -> str:
    """What is stored of an island key: 256 random bits need no salt."""
    return hashlib.sha256(island_key.encode()).hexdigest()


@dataclass(eq=False)
class Registry:
    """The durable list of workers with a copy in memory. Thread-safe."""

    ledger: Ledger
    heartbeats: Heartbeats
    clock: Clock
    _: KW_ONLY
    run_id: str
    manifest: Callable[[], str]  # hash of the one in force

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        with self.ledger.reading() as t:
            self._workers = {w.worker_id: w for w in t.members.workers()}
            # The newest: who is in, by rank. Replaced whole, so it is read without the lock.
            self.generation = t.members.generation()
            # Where islands publish: who signs what a worker publishes. Replaced whole.
            self.publishers = {p.worker_id: p for p in t.publishers.all()}
        self._hostnames: dict[str, str] = {}
        self._evictions: dict[str, str] = {}  # why, of those that have not come back
        for worker in self._workers.values():
            # After a restart every registered worker gets a full timeout to be heard again.
            if worker.active:
                self.heartbeats.hear(worker.worker_id)

    def check_run(self, run_id: str, manifest_sha256: str) -> None:
        """Refuses a message made for another run or under another manifest."""
        self.check_run_id(run_id)
        right = self.manifest()
        if manifest_sha256 != right:
            raise ManifestMismatch(
                f"manifest_sha256={manifest_sha256!r} is not the run's {right!r}, which is in "
                f"force now; fetch /info again and adopt it"
            )

    def check_run_id(self, run_id: str) -> None:
        """Refuses what was made for another run."""
        if run_id != self.run_id:
            raise ManifestMismatch(
                f"run_id={run_id!r} is not this coordinator's run {self.run_id!r}; "
                f"fetch /info again or use another URL"
            )

    def register(
        self,
        request: RegisterRequest,
        *,
        peer: str = "",
        check: Callable[[], None] = lambda: None,
        publisher: PublisherRecord | None = None,
    ) -> WorkerRecord:
        """Registers a worker under its next incarnation.

        The island key that holds the name takes it over at once; with another key the name is free
        only when its holder has left or has not been heard within the heartbeat timeout. `peer` is
        where the request came from: the address of a worker that advertises none. `check` refuses
        by raising; nobody is removed between it and the registration. With the worker goes its
        `publisher`, for good.
        """
        self.check_run(request.run_id, request.manifest_sha256)
        name, hashed = request.worker_id, key_hash(request.island_key)
        with self._lock:
            check()
            known = self._workers.get(name)
            if known is None and len(self._workers) >= MAX_NAMES:
                raise TooManyWorkers(
                    f"worker_id={name!r} would be the run's name number {len(self._workers) + 1}; "
                    f"it takes {MAX_NAMES}; join with --worker-id and a name that `atoll workers` "
                    f"shows as left or evicted"
                )
            if known is not None and known.active and not _same(known.key_sha256, hashed):
                silent = self.heartbeats.seconds_since(name)
                if name in self.heartbeats.live([name]):
                    raise WorkerTaken(
                        f"worker_id={name!r} is held by a live process heard {silent:.1f} s ago "
                        f"under another island key; choose another --worker-id or stop that process"
                    )
            address = request.ip_address or peer
            with self.ledger.writing() as t:
                record = t.members.register(
                    name,
                    hashed,
                    wall=self.clock.wall(),
                    ip_address=address,
                    port=request.port,
                    certificate=request.certificate,
                )
                if publisher is not None:
                    t.publishers.add(publisher)
                generation = t.members.generation()
            self.generation = generation
            self._workers[name] = record
            if publisher is not None:
                self.publishers = {**self.publishers, name: publisher}
            self._evictions.pop(name, None)
            self._hostnames[name] = request.hostname
            self.heartbeats.hear(name)
            return record

    def deregister(self, identity: Identity) -> None:
        """The worker leaves for good; its rows reopen when the round closes."""
        with self._lock:
            self._remove(self.check(identity))

    def evict(self, worker_id: str, incarnation: int, *, reason: str) -> bool:
        """Takes a worker for dead; False when that life of it is over already."""
        with self._lock:
            known = self._workers.get(worker_id)
            if known is None or not known.active or known.incarnation != incarnation:
                return False
            self._remove(known)
            self._evictions[worker_id] = reason
            return True

    def _remove(self, known: WorkerRecord) -> None:
        with self.ledger.writing() as t:
            t.members.deregister(known.worker_id, known.incarnation, wall=self.clock.wall())
            generation = t.members.generation()
        self.generation = generation
        self._workers[known.worker_id] = replace(known, active=False)
        self.heartbeats.forget(known.worker_id)

    def eviction(self, worker_id: str) -> str | None:
        """Why the worker was taken for dead, if it was and has not come back."""
        return self._evictions.get(worker_id)

    def must_know(self, worker_id: str) -> None:
        """UnknownWorker for a name that never registered."""
        if worker_id not in self._workers:
            raise UnknownWorker(
                f"worker_id={worker_id!r} has never registered in run {self.run_id!r}; "
                f"`atoll workers` lists those that have"
            )

    def remove(self, worker_id: str) -> int:
        """Takes a worker that registered once out without its asking; which life that ended."""
        with self._lock:
            known = self._workers[worker_id]
            if known.active:
                self._remove(known)
            return known.incarnation

    def check(self, identity: Identity) -> WorkerRecord:
        """The record of who speaks, or why they may not."""
        self.check_run(identity.run_id, identity.manifest_sha256)
        # Without the lock, which a registration holds for a whole transaction: every message of
        # every worker comes here. In this order: a worker that comes back is active before its
        # eviction is forgotten.
        name = identity.worker_id
        evicted, known = self._evictions.get(name), self._workers.get(name)
        if known is None or not (known.active or evicted):
            raise UnknownWorker(
                f"worker_id={name!r} is not registered in run {self.run_id!r}; register first"
            )
        if not _same(known.key_sha256, key_hash(identity.island_key)):
            raise Fenced(
                f"worker_id={name!r} belongs to another island key now; this process must stop"
            )
        if identity.incarnation != known.incarnation:
            raise Fenced(
                f"incarnation={identity.incarnation} of worker_id={name!r} was followed by "
                f"{known.incarnation}; this process must stop"
            )
        if evicted:
            raise Evicted(
                f"worker_id={name!r} was taken for dead, since {evicted}; register again and "
                f"repeat the message, the work done so far still counts"
            )
        return known

    def check_generation(self, number: int) -> GenerationRecord:
        """The present generation, if it is the message's; else StaleGeneration with its number."""
        present = self.generation
        if number != present.number:
            raise StaleGeneration(
                f"generation={number} is not the present one, which is {present.number}: a worker "
                f"joined, left or was evicted; repeat the message in generation {present.number}, "
                f"and ask /training/ready where ranks and addresses matter",
                present=present.number,
            )
        return present

    def active(self) -> list[WorkerRecord]:
        """Registered workers, in worker_id order."""
        return [worker for worker in self.known() if worker.active]

    def known(self) -> list[WorkerRecord]:
        """Every worker that ever registered, in worker_id order."""
        with self._lock:
            return [self._workers[w] for w in sorted(self._workers)]

    def live(self) -> frozenset[str]:
        """Registered workers that are heard from.

        Without the lock: a heartbeat, which is to wait for nothing, may ask.
        """
        return self.heartbeats.live(member.worker_id for member in self.generation.members)

    def hostname(self, worker_id: str) -> str:
        """The name the worker's machine gave."""
        return self._hostnames.get(worker_id, "")


def _same(left: str, right: str) -> bool:
    return hmac.compare_digest(left.encode(), right.encode())
