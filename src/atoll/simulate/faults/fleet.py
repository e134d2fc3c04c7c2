"""The workers' machines: processes that run, stop, die and are started again."""

import random
from dataclasses import dataclass, replace
from typing import Any

from atoll.errors import AtollError
from atoll.simulate.faults.calls import Answer, Call
from atoll.simulate.faults.disk import Disk
from atoll.simulate.faults.host import Host
from atoll.simulate.faults.invariants.checker import Checker
from atoll.simulate.faults.loop import EventLoop
from atoll.simulate.faults.network import Network
from atoll.simulate.faults.process import Events, Process
from atoll.simulate.faults.scenario import Scenario


@dataclass
class _Thread:
    """One of a process's two threads."""

    process: Process
    steps: Events
    is_main: bool


class Fleet:
    """Every process of every worker; a worker's newest process is restarted when it ends."""

    def __init__(
        self,
        scenario: Scenario,
        loop: EventLoop,
        network: Network,
        host: Host,
        checker: Checker,
        rng: random.Random,
    ) -> None:
        self.workers = [f"island-{index}" for index in range(scenario.islands)]
        self.newest: dict[str, Process] = {}
        self.others: list[Process] = []  # replaced ones that are still there, and impostors
        self.is_faulty = True
        self._gone: set[str] = set()  # workers whose machine does not come back
        self._scenario = scenario
        self._loop = loop
        self._network = network
        self._host = host
        self._checker = checker
        self._rng = rng
        self._count = 0
        self._streams: dict[str, tuple[int, Any]] = {}  # process -> coordinator's life, stream
        network.aside = self._aside

    def start(self, worker_id: str, disk: Disk | None = None, *, is_extra: bool = False) -> Process:
        """A new process of a worker; `is_extra`: nobody restarts it."""
        self._count += 1
        process = Process(
            worker_id,
            disk or Disk(self._rng.randbytes(32).hex()),
            number=self._count,
            seed=self._scenario.seed,
            step_seconds=self._scenario.step_seconds,
            loop=self._loop,
            reference=self._checker.reference,
        )
        if self.is_faulty:
            process.rogue = 0.4 if self._scenario.has("rogue") else 0.0
            process.repeats = 3 * self._scenario.duplicate
            process.flips = 0.15 if self._scenario.has("corrupt weights") else 0.0
        process.on_attend = lambda opened: self._streams.__setitem__(process.name, opened)
        if is_extra:
            self.others.append(process)
        else:
            self.newest[worker_id] = process
        self._loop.note("process starts", process.name)
        for steps, is_main in ((process.main(), True), (process.pulse(), False)):
            self._begin(_Thread(process, steps, is_main))
        return process

    # Threads

    def _begin(self, thread: _Thread) -> None:
        self._loop.after(self._rng.uniform(0, 0.5), lambda: self._resume(thread, None))

    def _resume(self, thread: _Thread, answer: Answer | None) -> None:
        process = thread.process
        if not process.is_alive:
            return
        if process.stopped_until > self._loop.now:
            wait = process.stopped_until - self._loop.now
            self._loop.after(wait, lambda: self._resume(thread, answer))
            return
        try:
            if answer is not None and answer.error is not None:
                step = thread.steps.throw(answer.error)
            else:
                step = thread.steps.send(None if answer is None else answer.value)
        except StopIteration:
            return
        except AtollError as error:
            self._loop.note("process ends", f"{process.name} {error.code}")
            self._end(process)
            self._restart_later(process)
            return
        self._wait_for(thread, step)

    def _wait_for(self, thread: _Thread, step: Call | float) -> None:
        if isinstance(step, Call):
            takes_life = step.kind in ("begin", "attend")

            def deliver(answer: Answer) -> None:
                if takes_life and answer.error is None:
                    # A stream belongs to the life of the coordinator that opened it.
                    answer = replace(answer, value=_stream(answer))
                self._resume(thread, answer)

            self._network.send(step, deliver)
            return
        process = thread.process
        pause, process.jump = step * process.jump, 1.0
        self._loop.after(pause, lambda: self._resume(thread, None))

    def _aside(self) -> Call | None:
        awake = [p for p in self.running() if p.stopped_until <= self._loop.now]
        return self._rng.choice(awake).aside() if awake else None

    # Lives

    def kill(self, process: Process, *, is_noticed: bool) -> None:
        """A process dies; `is_noticed`: its connections are reset, as when only it is gone."""
        self._loop.note("process killed", process.name)
        self._end(process)
        if is_noticed:
            self._loop.after(self._rng.uniform(0, 0.5), lambda: self._reset(process))

    def _end(self, process: Process) -> None:
        process.is_alive = False
        if process in self.others:
            self.others.remove(process)

    def _reset(self, process: Process) -> None:
        life, stream = self._streams.pop(process.name, (0, None))
        coordinator = self._host.coordinator
        if coordinator is not None and life == self._host.life:
            self._checker.seen.lost.setdefault(process.worker_id, self._loop.now)
            coordinator.absent(stream)

    def _restart_later(self, process: Process) -> None:
        worker_id = process.worker_id
        if self.newest.get(worker_id) is not process or worker_id in self._gone:
            return
        self._loop.after(self._rng.uniform(0.5, 4.0), lambda: self.restart(process))

    def restart(self, process: Process, *, keeps_disk: bool = True) -> None:
        """Starts the worker again, unless somebody has meanwhile or it is gone for good."""
        worker_id = process.worker_id
        if self.newest[worker_id] is process and worker_id not in self._gone:
            self.start(worker_id, process.disk if keeps_disk else None)

    def retire(self, worker_id: str) -> None:
        """A machine is lost for good."""
        self._loop.note("machine lost", worker_id)
        self._gone.add(worker_id)
        self.kill(self.newest[worker_id], is_noticed=False)

    def running(self) -> list[Process]:
        """Newest processes that are alive, in worker_id order."""
        return [self.newest[w] for w in self.workers if self.newest[w].is_alive]

    def heal(self) -> None:
        """Faults end: what is stopped goes on, what misbehaves stops doing so."""
        self.is_faulty = False
        for process in list(self.others):
            self._end(process)
        for process in self.newest.values():
            process.stopped_until = 0.0
            process.slowness = 1.0
            process.rogue = process.repeats = process.flips = 0.0


def _stream(answer: Answer) -> tuple[Any, Any]:
    return answer.value, answer.life
