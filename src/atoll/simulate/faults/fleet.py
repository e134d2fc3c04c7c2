"""The workers' machines: processes that run, stop, die and are started again."""

import hashlib
from dataclasses import dataclass, field

from atoll.errors import AtollError
from atoll.island.conversation.intents import Until
from atoll.simulate.faults.buckets import Servers
from atoll.simulate.faults.calls import Answer, Call
from atoll.simulate.faults.disk import Disk
from atoll.simulate.faults.host import Host
from atoll.simulate.faults.network import Network
from atoll.simulate.faults.process import Events, Process
from atoll.simulate.faults.world import World


@dataclass(eq=False)
class Fleet:
    """Every process of every worker; a worker's newest process is restarted when it ends."""

    world: World
    network: Network
    host: Host
    servers: Servers
    newest: dict[str, Process] = field(default_factory=dict)
    # Replaced ones that are still there, and impostors.
    others: list[Process] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.workers = [f"island-{index}" for index in range(self.world.scenario.islands)]
        self._gone: set[str] = set()  # workers whose machine does not come back
        self._rng = self.world.stream("fleet")
        self._count = 0
        self.network.aside = self._aside
        self.host.is_in_flight = self._is_in_flight

    def start(self, worker_id: str, disk: Disk | None = None, *, is_extra: bool = False) -> Process:
        """A new process of a worker; `is_extra`: nobody restarts it."""
        self._count += 1
        disk = disk or self._new_disk()
        reference = self.host.checker.reference
        process = Process(self.world, worker_id, self._count, disk, reference, self.servers)
        process.home = self.host.home / "islands" / process.name
        if is_extra:
            self.others.append(process)
        else:
            self.newest[worker_id] = process
        self.world.note("process starts", process.name)
        for thread in process.threads():
            self.world.after(self._rng.uniform(0, 0.5), self._resume, process, thread, Answer())
        return process

    def _new_disk(self, signing: bytes = b"") -> Disk:
        key = self._rng.randbytes(32).hex()
        # Drawn apart: what else a seed draws stays.
        return Disk(key, signing or hashlib.sha256(key.encode()).digest())

    def join(self, worker_id: str) -> None:
        """A worker comes that was not there before."""
        self.world.note("worker joins", worker_id)
        self.workers.append(worker_id)
        self.start(worker_id)

    # Threads

    def _resume(self, process: Process, thread: Events, answer: Answer) -> None:
        """Goes on with one of a process's threads, until it waits for something again."""
        if not process.is_alive:
            return
        wait = process.stopped_until - self.world.now
        if wait > 0:
            self.world.after(wait, self._resume, process, thread, answer)
            return
        try:
            if answer.error is not None:
                step = thread.throw(answer.error)
            else:
                step = thread.send(answer.value)
        except StopIteration:
            self._wake(process)
            return
        except AtollError as error:
            self.world.note("process ends", f"{process.name} {error.code}")
            self._end(process)
            if self._is_wanted(process):
                self.world.after(self._rng.uniform(0.5, 4.0), self.restart, process)
            return
        if isinstance(step, Until):
            process.waiting.append((step.holds, thread))
        elif isinstance(step, Call):
            self.network.send(step, lambda answer: self._resume(process, thread, answer))
        else:
            pause, process.jump = step * process.jump, 1.0
            self.world.after(pause, self._resume, process, thread, Answer())
        self._wake(process)

    def _wake(self, process: Process) -> None:
        """Threads that wait for another one look whether it has got there."""
        waiting, process.waiting = process.waiting, []
        for holds, thread in waiting:
            if holds():
                self.world.after(0.0, self._resume, process, thread, Answer())
            else:
                process.waiting.append((holds, thread))

    def _aside(self) -> Call | None:
        awake = [p for p in self.running() if p.stopped_until <= self.world.now]
        return self._rng.choice(awake).aside() if awake else None

    def _is_in_flight(self) -> bool:
        return any(process.is_alive and process.in_flight for process in self.newest.values())

    # Lives

    def kill(self, process: Process, *, is_noticed: bool) -> None:
        """A process dies; `is_noticed`: its connections are reset, as when only it is gone."""
        self.world.note("process killed", process.name)
        if process.in_flight:
            self.world.note("met: island died, in flight", process.name)
        self._end(process)
        if is_noticed:
            self.world.after(self._rng.uniform(0, 0.5), self._reset, process)

    def _end(self, process: Process) -> None:
        process.is_alive = False
        if process in self.others:
            self.others.remove(process)

    def _reset(self, process: Process) -> None:
        stream, life = process.presence
        if self.host.coordinator is not None and life == self.host.life:
            self.host.checker.seen.lost.setdefault(process.worker_id, self.world.now)
            self.host.coordinator.absent(stream)

    def _is_wanted(self, process: Process) -> bool:
        """Whether it is its worker's newest, and the worker's machine is still there."""
        worker_id = process.worker_id
        return self.newest.get(worker_id) is process and worker_id not in self._gone

    def restart(self, process: Process, *, keeps_disk: bool = True) -> None:
        """Starts the worker again, unless somebody has meanwhile or it is gone for good."""
        if self._is_wanted(process):
            # Who loses the key that signs as well is nobody that a run with buckets takes back.
            disk = process.disk if keeps_disk else self._new_disk(process.disk.signing)
            self.start(process.worker_id, disk)

    def retire(self, worker_id: str) -> None:
        """A machine is lost for good."""
        self.world.note("machine lost", worker_id)
        self._gone.add(worker_id)
        self.kill(self.newest[worker_id], is_noticed=False)

    def running(self) -> list[Process]:
        """Newest processes that are alive, in worker_id order."""
        return [self.newest[w] for w in self.workers if self.newest[w].is_alive]

    def heal(self) -> None:
        """Faults end: what is stopped or slow goes on, what has no business here ends."""
        for process in list(self.others):
            self._end(process)
        for process in self.newest.values():
            process.stopped_until = 0.0
            process.slowness = 1.0
