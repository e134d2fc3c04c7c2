"""Who makes the faults: at random moments one of those that the seed has, until they end."""

import random
from collections.abc import Callable

from atoll.coordinator.service import Coordinator
from atoll.simulate.faults.calls import Call
from atoll.simulate.faults.fleet import Fleet
from atoll.simulate.faults.host import Host
from atoll.simulate.faults.invariants.checker import Checker
from atoll.simulate.faults.loop import EventLoop
from atoll.simulate.faults.network import Network
from atoll.simulate.faults.process import Process
from atoll.simulate.faults.scenario import HEARTBEAT_TIMEOUT, Scenario

DAY_SECONDS = 86_400.0
_WAYS = (frozenset({"to"}), frozenset({"from"}), frozenset({"to", "from"}))


class Nemesis:
    """Injects faults and, at the end, takes them back."""

    def __init__(
        self,
        scenario: Scenario,
        loop: EventLoop,
        *,
        host: Host,
        network: Network,
        fleet: Fleet,
        checker: Checker,
        rng: random.Random,
    ) -> None:
        self.is_over = False
        self._scenario = scenario
        self._loop = loop
        self._host = host
        self._network = network
        self._fleet = fleet
        self._checker = checker
        self._rng = rng
        known: dict[str, Callable[[], None]] = {
            "partition": self._partition,
            "kill worker": self._kill_worker,
            "stop worker": self._stop_worker,
            "replace worker": self._replace_worker,
            "impostor": self._impostor,
            "slow worker": self._slow_worker,
            "crash coordinator": self._crash,
            "clock jump": self._clock_jump,
            "operator": self._operate,
            "corrupt weights": self._corrupt_weights,
            "outer lr": self._change_rate,
        }
        self._actions = [(name, known[name]) for name in known if scenario.has(name)]
        self._pause()

    def _pause(self) -> None:
        self._loop.after(self._rng.expovariate(1.0) * self._scenario.gap_seconds, self._act)

    def _act(self) -> None:
        if self.is_over:
            return
        if self._actions:
            name, action = self._rng.choice(self._actions)
            self._loop.note(f"fault: {name}")
            action()
        self._pause()

    def end(self) -> None:
        """No more faults; what is cut or stopped comes back."""
        self.is_over = True
        self._loop.note("faults end")
        self._network.cut.clear()
        self._network.is_faulty = False
        self._host.is_faulty = False
        self._host.seams.spare()
        self._fleet.heal()
        may_go = self._scenario.islands - self._scenario.settings["membership"]["min_workers"]
        if self._scenario.has("kill worker") and may_go > 0 and self._rng.random() < 0.5:
            self._fleet.retire(self._rng.choice(self._fleet.workers))
        self._restore()

    def _restore(self) -> None:
        """The operator's actions are taken back, as soon as somebody answers."""
        if self._host.coordinator is None:
            self._loop.after(1.0, self._restore)
            return
        for worker_id in sorted(self._checker.members.kicked):
            self._allow(worker_id)
        self._order("run")

    # Workers

    def _partition(self) -> None:
        way = self._rng.choice(_WAYS)
        everybody = self._rng.random() < 0.3
        chosen = self._fleet.workers if everybody else [self._rng.choice(self._fleet.workers)]
        for worker_id in chosen:
            self._network.cut[worker_id] = way
        self._loop.after(
            self._rng.uniform(1.0, 2.5 * HEARTBEAT_TIMEOUT), lambda: self._mend(list(chosen))
        )

    def _mend(self, chosen: list[str]) -> None:
        for worker_id in chosen:
            self._network.cut.pop(worker_id, None)

    def _somebody(self) -> Process | None:
        """A process that runs; None when all are down."""
        running = self._fleet.running()
        return self._rng.choice(running) if running else None

    def _kill_worker(self) -> None:
        process = self._somebody()
        if process is None:
            return
        self._fleet.kill(process, is_noticed=self._rng.random() < 0.6)
        keeps_disk = self._rng.random() < 0.7
        self._loop.after(
            self._rng.uniform(0.3, 2 * HEARTBEAT_TIMEOUT),
            lambda: self._fleet.restart(process, keeps_disk=keeps_disk),
        )

    def _stop_worker(self) -> None:
        if process := self._somebody():
            longest = 2.5 * HEARTBEAT_TIMEOUT
            process.stopped_until = self._loop.now + self._rng.uniform(1.0, longest)

    def _replace_worker(self) -> None:
        """Its machine hangs, another process is started in its place, then the old one wakes up."""
        if process := self._somebody():
            process.stopped_until = self._loop.now + self._rng.uniform(0.5, 2 * HEARTBEAT_TIMEOUT)
            self._fleet.others.append(process)
            self._fleet.start(process.worker_id, process.disk.copy())

    def _impostor(self) -> None:
        worker_id = self._rng.choice(self._fleet.workers)
        process = self._fleet.start(worker_id, is_extra=True)
        self._loop.after(
            self._rng.uniform(3.0, 15.0),
            lambda: self._fleet.kill(process, is_noticed=True) if process.is_alive else None,
        )

    def _slow_worker(self) -> None:
        if process := self._somebody():
            process.slowness = 6.0
            self._loop.after(self._rng.uniform(5.0, 20.0), process.hurry)

    def _corrupt_weights(self) -> None:
        if process := self._somebody():
            process.corrupt()

    # The coordinator

    def _crash(self) -> None:
        if self._rng.random() < 0.25:
            self._host.kill()
        else:
            self._host.seams.kill_after(self._rng.randint(1, 60))

    def _clock_jump(self) -> None:
        if self._rng.random() < 0.5:
            self._host.clock.wall_offset += self._rng.choice((-DAY_SECONDS, DAY_SECONDS, -5.0))
        elif running := self._fleet.running():
            jump = self._rng.choice((0.0, 3.0))
            self._rng.choice(running).jump = jump

    # The operator

    def _operate(self) -> None:
        if self._rng.random() < 0.5:
            self._order("pause")
            self._loop.after(self._rng.uniform(0.5, 8.0), lambda: self._order("run"))
            return
        worker_id = self._rng.choice(self._fleet.workers)
        answered = self._say(lambda c: c.kick(worker_id))
        if answered:
            self._checker.members.kicked.add(worker_id)
            self._loop.after(self._rng.uniform(2.0, 10.0), lambda: self._allow(worker_id))

    def _allow(self, worker_id: str) -> None:
        if self._say(lambda c: c.allow(worker_id)):
            self._checker.members.kicked.discard(worker_id)
        else:
            self._loop.after(1.0, lambda: self._allow(worker_id))

    def _order(self, action: str) -> None:
        def work(coordinator: Coordinator) -> None:
            reply = coordinator.order(action)  # type: ignore[arg-type]  # one of Action's words
            self._checker.members.ordered(reply.command.number)

        if not self._say(work) and action == "run":
            self._loop.after(1.0, lambda: self._order(action))

    def _change_rate(self) -> None:
        lr = self._rng.choice((0.3, 0.5, 0.7))
        self._say(lambda c: c.set_outer_lr(lr))

    def _say(self, work: Callable[[Coordinator], object]) -> bool:
        """One request of the operator; whether it was answered."""
        answer = self._host.handle(Call("operator", work, "operator", "operator"))
        self._loop.note("operator", "ok" if answer.error is None else answer.error.code)
        return answer.error is None
