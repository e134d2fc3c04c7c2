"""Who makes the faults: at random moments one of those that the seed has, until they end."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from atoll.coordinator.service import Coordinator
from atoll.protocol.control import Action
from atoll.simulate.faults.buckets import Servers
from atoll.simulate.faults.calls import Call
from atoll.simulate.faults.fleet import Fleet
from atoll.simulate.faults.host import Host
from atoll.simulate.faults.network import Network
from atoll.simulate.faults.process import Process
from atoll.simulate.faults.scenario import HEARTBEAT_TIMEOUT
from atoll.simulate.faults.world import World

DAY_SECONDS = 86_400.0
SPOILING = ("object lost", "object swapped", "object cut")
_WAYS = (frozenset({"to"}), frozenset({"from"}), frozenset({"to", "from"}))


@dataclass(eq=False)
class Nemesis:
    """Injects faults and, at the end, takes them back."""

    world: World
    host: Host
    network: Network
    fleet: Fleet
    servers: Servers

    def __post_init__(self) -> None:
        self._rng = self.world.stream("nemesis")
        self._members = self.host.checker.members
        # By a coordinator that died before it answered: it may be recorded all the same.
        self._maybe_kicked: set[str] = set()
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
            "bucket away": self._bucket_away,
            **{kind: partial(self.servers.spoil, kind) for kind in SPOILING},
        }
        self._actions = [(name, known[name]) for name in known if self.world.has(name)]
        self._pause()

    def _pause(self) -> None:
        gap_seconds = self.world.scenario.gap_seconds
        self.world.after(self._rng.expovariate(1.0) * gap_seconds, self._act)

    def _act(self) -> None:
        if not self.world.is_faulty:
            return
        if self._actions:
            name, action = self._rng.choice(self._actions)
            self.world.note(f"fault: {name}")
            action()
        self._pause()

    def end(self) -> None:
        """No more faults; what is cut or stopped comes back."""
        scenario = self.world.scenario
        self.world.is_faulty = False
        self.world.note("faults end")
        self.network.cut.clear()
        self.world.away.clear()
        self.host.seams.dies_at = math.inf
        self.fleet.heal()
        may_go = scenario.islands - scenario.settings["membership"]["min_workers"]
        if scenario.has("kill worker") and may_go > 0 and self._rng.random() < 0.5:
            self.fleet.retire(self._rng.choice(self.fleet.workers))
        self._restore()

    def _restore(self) -> None:
        """The operator's actions are taken back, as soon as somebody answers."""
        if self.host.coordinator is None:
            self.world.after(1.0, self._restore)
            return
        for worker_id in sorted(self._members.kicked | self._maybe_kicked):
            self._allow(worker_id)
        self._order("run")

    # Workers

    def _partition(self) -> None:
        way = self._rng.choice(_WAYS)
        everybody = self._rng.random() < 0.3
        chosen = self.fleet.workers if everybody else [self._rng.choice(self.fleet.workers)]
        self.network.cut.update(dict.fromkeys(chosen, way))
        self.world.after(self._rng.uniform(1.0, 2.5 * HEARTBEAT_TIMEOUT), self._mend, chosen)

    def _mend(self, chosen: list[str]) -> None:
        for worker_id in chosen:
            self.network.cut.pop(worker_id, None)

    def _somebody(self) -> Process | None:
        """A process that runs; None when all are down."""
        running = self.fleet.running()
        return self._rng.choice(running) if running else None

    def _stop(self, process: Process, least: float, most: float) -> None:
        process.stopped_until = self.world.now + self._rng.uniform(least, most * HEARTBEAT_TIMEOUT)

    def _kill_worker(self) -> None:
        if process := self._somebody():
            self.fleet.kill(process, is_noticed=self._rng.random() < 0.6)
            keeps_disk = self._rng.random() < 0.7
            pause = self._rng.uniform(0.3, 2 * HEARTBEAT_TIMEOUT)
            self.world.after(pause, lambda: self.fleet.restart(process, keeps_disk=keeps_disk))

    def _stop_worker(self) -> None:
        if process := self._somebody():
            self._stop(process, 1.0, 2.5)

    def _replace_worker(self) -> None:
        """Its machine hangs, another process is started in its place, then the old one wakes up."""
        if process := self._somebody():
            self._stop(process, 0.5, 2)
            self.fleet.others.append(process)
            self.fleet.start(process.worker_id, process.disk.copy())

    def _impostor(self) -> None:
        worker_id = self._rng.choice(self.fleet.workers)
        if self.fleet.servers.names and not self._is_known(worker_id):
            # Where islands publish, the first key of a name stands: it would be the impostor's.
            return
        process = self.fleet.start(worker_id, is_extra=True)
        self.world.after(
            self._rng.uniform(3.0, 15.0),
            lambda: self.fleet.kill(process, is_noticed=True) if process.is_alive else None,
        )

    def _is_known(self, worker_id: str) -> bool:
        """Whether it is seen to have registered; while the coordinator is away nobody is."""
        return self.host.coordinator is not None and worker_id in self.host.view().workers

    def _slow_worker(self) -> None:
        if process := self._somebody():
            process.slowness = 6.0
            self.world.after(self._rng.uniform(5.0, 20.0), process.hurry)

    def _corrupt_weights(self) -> None:
        if process := self._somebody():
            process.corrupt()

    # The coordinator

    def _crash(self) -> None:
        if self._rng.random() < 0.25:
            self.host.kill()
        else:
            self.host.seams.kill_after(self._rng.randint(1, 60))

    def _clock_jump(self) -> None:
        if self._rng.random() < 0.5:
            self.host.clock.wall_offset += self._rng.choice((-DAY_SECONDS, DAY_SECONDS, -5.0))
        elif running := self.fleet.running():
            jump = self._rng.choice((0.0, 3.0))
            self._rng.choice(running).jump = jump

    # Buckets

    def _bucket_away(self) -> None:
        self.servers.go_away(self._rng.uniform(0.5, 2 * HEARTBEAT_TIMEOUT))

    # The operator

    def _operate(self) -> None:
        if self._rng.random() < 0.5:
            self._order("pause")
            self.world.after(self._rng.uniform(0.5, 8.0), self._order, "run")
            return
        worker_id = self._rng.choice(self.fleet.workers)
        if self._say(lambda c: c.kick(worker_id)):
            self._members.kicked.add(worker_id)
            self.world.after(self._rng.uniform(2.0, 10.0), self._allow, worker_id)
        else:
            self._maybe_kicked.add(worker_id)

    def _allow(self, worker_id: str) -> None:
        if self._say(lambda c: c.allow(worker_id)):
            self._members.kicked.discard(worker_id)
        else:
            self.world.after(1.0, self._allow, worker_id)

    def _order(self, action: Action) -> None:
        done = self._say(lambda c: self._members.ordered(c.order(action).command.number))
        if not done and action == "run":
            self.world.after(1.0, self._order, action)

    def _change_rate(self) -> None:
        lr = self._rng.choice((0.3, 0.5, 0.7))
        self._say(lambda c: c.set_outer_lr(lr))

    def _say(self, work: Callable[[Coordinator], object]) -> bool:
        """One request of the operator; whether it was answered."""
        answer = self.host.handle(Call("operator", work, "operator", "operator"))
        self.world.note("operator", answer.word)
        return answer.error is None
