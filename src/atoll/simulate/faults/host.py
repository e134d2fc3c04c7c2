"""The coordinator's process: the real one over real files, killed and started again."""

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from atoll.blobs.directory import DirectoryBlobs
from atoll.coordinator import boot
from atoll.coordinator.rounds.spool import Spool
from atoll.coordinator.service import Coordinator
from atoll.coordinator.stores import Stores
from atoll.errors import AtollError, CoordinatorUnreachable
from atoll.ledger import engines, migrations
from atoll.ledger.database import Database
from atoll.ledger.ledger import Ledger
from atoll.proof import audit as auditing
from atoll.proof import balance as balances
from atoll.protocol.manifest import Manifest
from atoll.simulate.faults import seams, standin
from atoll.simulate.faults.calls import Answer, Call
from atoll.simulate.faults.durable import View, Watched
from atoll.simulate.faults.invariants.base import Violation
from atoll.simulate.faults.invariants.checker import Checker
from atoll.simulate.faults.loop import EventLoop, LoopClock
from atoll.simulate.faults.seams import Crash, Seams

TICK_SECONDS = 1.0
WAKE_SECONDS = 0.01  # from a change to the closing thread's next look


class Host:
    """Where the coordinator runs. Down between a kill and its restart."""

    def __init__(
        self, home: Path, made: Manifest, loop: EventLoop, rng: random.Random, checker: Checker
    ) -> None:
        self.home = home
        self.life = 0
        self._seams_before = 0  # passed in earlier lives
        self.coordinator: Coordinator | None = None
        self.clock = LoopClock(loop, started=0.0, wall_offset=0.0)
        self.is_faulty = True  # whether it may still be killed
        self.seams = Seams()
        self.interleave: Callable[[], None] = lambda: None
        self._loop = loop
        self._rng = rng
        self._checker = checker
        self._database: Database | None = None
        self._blobs: DirectoryBlobs | None = None
        self._watched: Watched | None = None
        self._died_in = 0
        self._closing = False
        self._wake_due = False
        self._create(made)

    def _create(self, made: Manifest) -> None:
        ledger = engines.open_ledger(self.home / "ledger.sqlite")
        blobs = DirectoryBlobs(self.home / "blobs")
        standin.create(ledger, blobs, made, wall=0.0)
        ledger.close()
        blobs.close()

    @property
    def seams_passed(self) -> int:
        """Places at which it was or could have been killed."""
        return self._seams_before + self.seams.passed

    # Its life

    def start(self) -> None:
        """Opens the state that is there and serves; killed again when the seam says so."""
        self.life += 1
        self._seams_before += self.seams.passed
        fresh = Seams()
        fresh.between = self._between
        self.seams = fresh
        may_die = self.is_faulty and self._checker.scenario.has("crash coordinator")
        if may_die and self._rng.random() < 0.15:
            # Some lives are short: boot itself is cut, and the first things after it.
            fresh.kill_after(self._rng.randint(1, 12))
        self._loop.note("coordinator starts", str(self.life))
        try:
            coordinator = self._open(fresh)
        except Crash as crash:
            self._die(str(crash))
            return
        except Exception as error:
            raise Violation("restart-opens", f"life {self.life} does not start: {error}") from error
        self.coordinator = coordinator
        self._checker.restarted(self.view(), coordinator)
        self._tick(self.life)

    def _open(self, fresh: Seams) -> Coordinator:
        database = self._database = engines.open_database(self.home / "ledger.sqlite")
        migrations.migrate(database)
        self._watched = Watched(database.connection)
        database.connection.watcher = seams.StatementSeams(fresh)
        fresh.recorded = lambda: self._checker.recorded(self.view())
        self._checker.recorded(self.view())
        blobs = DirectoryBlobs(self.home / "blobs", files=seams.SteppedFiles(fresh))
        self._blobs = blobs
        self.clock = LoopClock(
            self._loop, started=1000.0 * self.life, wall_offset=self.clock.wall_offset
        )
        stores = Stores(seams.SteppedLedger(database, fresh), blobs, Spool(self.home / "spool"))
        coordinator = boot.open_coordinator(stores, self.clock, layout=standin.LAYOUT)
        coordinator.on_change(self._wake)
        return coordinator

    def kill(self) -> None:
        """Ends the process between two events."""
        if self.coordinator is not None:
            self.seams.is_dead = True
            self._die("between two messages")

    def _die(self, where: str) -> None:
        if self._died_in == self.life:
            return  # a message that came in between has ended it already
        self._died_in = self.life
        self._loop.note("coordinator killed", where)
        self.coordinator = None
        self._close()
        self._loop.after(self._rng.uniform(0.05, 8.0), self.start)

    def _close(self) -> None:
        """Gives back what a dead process would: descriptors and locks, nothing written."""
        if self._blobs is not None:
            self._blobs.close()
        if self._database is not None:
            # Its end would shorten the log; a dead process does nothing of the kind.
            with suppress(Crash):
                self._database.close()
        self._watched = self._blobs = self._database = None

    def stop(self) -> None:
        """The end of the simulation."""
        self.seams.is_dead = True
        self.coordinator = None
        self._close()

    def view(self) -> View:
        """The durable rows now."""
        assert self._watched is not None
        return self._watched.view()

    def audit(self) -> list[str]:
        """What `atoll audit --replay` finds."""
        assert self._database is not None and self._blobs is not None
        ledger = Ledger(self._database)
        found = auditing.audit(ledger, self._blobs, layout=standin.LAYOUT, with_replay=True)
        return [str(problem) for problem in found.problems]

    def balance(self) -> list[str]:
        """What the audit's balance of rows and queues alone finds."""
        assert self._database is not None
        with Ledger(self._database).reading() as t:
            leases = [lease for r in t.rounds.all() for lease in t.leases.of_round(r.round)]
            datasets, queues = t.datasets.all(), t.queues.all()
        wrong = [f"{e}" for e in balances.balance(leases, datasets) if not e.holds]
        disagreeing = balances.check_queues(queues, leases, datasets)
        return wrong + [f"queue {name}: {what}" for name, what in disagreeing]

    # What it does

    def handle(self, call: Call) -> Answer:
        """A message arrives; CoordinatorUnreachable when nobody answers."""
        coordinator = self.coordinator
        if coordinator is None or call.life not in (None, self.life):
            return Answer(error=CoordinatorUnreachable("nobody answers"))
        before = self.view()
        try:
            with self._checker.during(call):
                value = call.work(coordinator)
        except Crash as crash:
            self._die(f"{call.kind}: {crash}")
            return Answer(error=CoordinatorUnreachable("the connection was reset"))
        except AtollError as error:
            self._checker.refused(call, error, before, self.view())
            return Answer(error=error)
        except Exception as error:
            raise Violation("coordinator-stays-up", f"{call.kind} raised {error!r}") from error
        self._checker.answered(call, value, before, self.view())
        return Answer(value, life=self.life)

    def _wake(self) -> None:
        if not self._wake_due:
            self._wake_due = True
            life = self.life
            self._loop.after(WAKE_SECONDS, lambda: self._look(life))

    def _tick(self, life: int) -> None:
        if life == self.life and self.coordinator is not None:
            self._look(life)
            self._loop.after(TICK_SECONDS, lambda: self._tick(life))

    def _look(self, life: int) -> None:
        """What the closing thread does when it wakes up."""
        self._wake_due = False
        while life == self.life and self.coordinator is not None:
            coordinator, before = self.coordinator, self.view()
            self._closing = True
            try:
                closed = coordinator.advance()
            except Crash as crash:
                self._die(f"advance: {crash}")
                return
            except Exception as error:
                raise Violation("coordinator-stays-up", f"advance raised {error!r}") from error
            finally:
                self._closing = False
            self._checker.advanced(coordinator, before, self.view())
            if closed:
                self._loop.note("round closed", str(coordinator.weights.current.version))
            else:
                return

    def _between(self, where: str) -> None:
        """Other threads' messages come in while a round closes, where no lock is held."""
        chance = 0.5 if self.is_faulty else 0.25
        if self._closing and where in _UNLOCKED and self._rng.random() < chance:
            self._closing = False
            self._checker.interrupted(self.view())
            try:
                self.interleave()
            finally:
                self._closing = True
            if self.seams.is_dead:
                raise Crash(where)


# Transactions during which the closing thread holds no lock.
_UNLOCKED = frozenset(
    {
        f"{when} {call}"
        for when in ("before", "after")
        for call in ("rounds.publish", "snapshots.add")
    }
)
