"""The coordinator's process: the real one over real files, killed and started again."""

from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from atoll.blobs.directory import DirectoryBlobs
from atoll.coordinator import boot
from atoll.coordinator.rounds.spool import Spool
from atoll.coordinator.service import Coordinator
from atoll.coordinator.stores import Stores
from atoll.errors import AtollError, CoordinatorUnreachable
from atoll.ledger import engines, migrations
from atoll.proof import audit as auditing
from atoll.proof.report import Problem
from atoll.protocol.manifest import Manifest
from atoll.simulate.faults import seams, standin
from atoll.simulate.faults.buckets import Servers
from atoll.simulate.faults.calls import Answer, Call
from atoll.simulate.faults.durable import View, Watched
from atoll.simulate.faults.invariants.base import Violation
from atoll.simulate.faults.invariants.checker import Checker
from atoll.simulate.faults.seams import Crash, Seams
from atoll.simulate.faults.world import ProcessClock, World

TICK_SECONDS = 1.0
WAKE_SECONDS = 0.01  # from a change to the closing thread's next look
# Transactions during which the closing thread holds no lock.
_UNLOCKED = frozenset(
    f"{when} {call}" for when in ("before", "after") for call in ("rounds.publish", "snapshots.add")
)
_OPENS_STREAM = frozenset({"begin", "attend"})


@dataclass(eq=False)
class Host:
    """Where the coordinator runs. Down between a kill and its restart."""

    world: World
    home: Path
    checker: Checker
    servers: Servers
    life: int = 0
    coordinator: Coordinator | None = None
    seams: Seams = field(default_factory=Seams)
    interleave: Callable[[], None] = lambda: None
    is_in_flight: Callable[[], bool] = lambda: False  # whether some island's hand-in is
    _seams_before: int = 0  # passed in earlier lives
    _died_in: int = 0
    _closing: bool = False
    _wake_due: bool = False
    _held: ExitStack = field(default_factory=ExitStack)  # files of the present life
    _stores: Stores = field(init=False)
    _watched: Watched = field(init=False)

    def __post_init__(self) -> None:
        self._rng = self.world.stream("host")
        self.clock = ProcessClock(self.world)

    def create(self, made: Manifest) -> None:
        """Records the run, in its empty home."""
        ledger = closing(engines.open_ledger(self.home / "ledger.sqlite"))
        with ledger as records, closing(DirectoryBlobs(self.home / "blobs")) as blobs:
            standin.create(records, blobs, made, wall=0.0)

    @property
    def seams_passed(self) -> int:
        """Places at which it was or could have been killed."""
        return self._seams_before + self.seams.passed

    # Its life

    def start(self) -> None:
        """Opens the state that is there and serves; killed again when the seam says so."""
        self.life += 1
        self._seams_before += self.seams.passed
        self.seams = Seams(recorded=self._recorded, between=self._between)
        if self.world.has("crash coordinator") and self._rng.random() < 0.15:
            # Some lives are short: boot itself is cut, and the first things after it.
            self.seams.kill_after(self._rng.randint(1, 12))
        self.world.note("coordinator starts", str(self.life))
        try:
            coordinator = self._open()
        except Crash as crash:
            self._die(str(crash))
            return
        except Exception as error:
            raise Violation("restart-opens", life=self.life, error=error) from error
        self.coordinator = coordinator
        self.checker.restarted(self.view(), coordinator)
        self._tick(self.life)

    def _open(self) -> Coordinator:
        database = engines.open_database(self.home / "ledger.sqlite")
        # Its end would shorten the log; a dead process does nothing of the kind.
        self._held.enter_context(suppress(Crash))
        self._held.callback(database.close)
        migrations.migrate(database)
        self._watched = Watched(database.connection)
        database.connection.watcher = seams.StatementSeams(self.seams, self._watched.written)
        self._recorded()
        blobs = DirectoryBlobs(self.home / "blobs", files=seams.SteppedFiles(self.seams))
        self._held.callback(blobs.close)
        started, wall_offset = 1000.0 * self.life, self.clock.wall_offset
        self.clock = ProcessClock(self.world, started=started, wall_offset=wall_offset)
        ledger = seams.SteppedLedger(database, self.seams)
        self._stores = Stores(ledger, blobs, Spool(self.home / "spool"))
        buckets = self.servers.seen_by(self.clock)
        coordinator = boot.open_coordinator(
            self._stores, self.clock, layout=standin.LAYOUT, buckets=buckets
        )
        coordinator.on_change(self._wake)
        return coordinator

    def _recorded(self) -> None:
        self.checker.recorded(self.view())

    def kill(self) -> None:
        """Ends the process between two events."""
        if self.coordinator is not None:
            self.seams.is_dead = True
            self._die("between two messages")

    def _die(self, where: str) -> None:
        if self._died_in == self.life:
            return  # a message that came in between has ended it already
        self._died_in = self.life
        self.world.note("coordinator killed", where)
        if self.is_in_flight():
            self.world.note("met: coordinator died, in flight")
        self.stop()
        self.world.after(self._rng.uniform(0.05, 8.0), self.start)

    def stop(self) -> None:
        """Gives back what a dead process would: descriptors and locks, nothing written."""
        self.seams.is_dead = True
        self.coordinator = None
        self._held.close()

    def view(self) -> View:
        """The durable rows now."""
        return self._watched.view()

    def audit(self, *, with_replay: bool) -> list[Problem]:
        """What `atoll audit` finds."""
        ledger, blobs = self._stores.ledger, self._stores.blobs
        found = auditing.audit(ledger, blobs, layout=standin.LAYOUT, with_replay=with_replay)
        return found.problems

    # What it does

    def handle(self, call: Call) -> Answer:
        """A message arrives; CoordinatorUnreachable when nobody answers."""
        coordinator = self.coordinator
        if coordinator is None or call.life not in (None, self.life):
            return Answer(error=CoordinatorUnreachable("nobody answers"))
        before = self.view()
        try:
            with self.checker.during(call):
                value = call.work(coordinator)
        except Crash as crash:
            self._die(f"{call.kind}: {crash}")
            return Answer(error=CoordinatorUnreachable("the connection was reset"))
        except AtollError as error:
            self.checker.refused(call, error, before, self.view())
            return Answer(error=error)
        except Exception as error:
            raise Violation("coordinator-stays-up", call=call, error=error) from error
        self.checker.answered(call, value, before, self.view())
        return Answer((value, self.life) if call.kind in _OPENS_STREAM else value)

    def _wake(self) -> None:
        if not self._wake_due:
            self._wake_due = True
            self.world.after(WAKE_SECONDS, self._look, self.life)

    def _tick(self, life: int) -> None:
        if life == self.life and self.coordinator is not None:
            self._look(life)
            self.world.after(TICK_SECONDS, self._tick, life)

    def _look(self, life: int) -> None:
        """What the closing thread does when it wakes up."""
        self._wake_due = False
        closed = True
        while closed and life == self.life and self.coordinator is not None:
            coordinator, before = self.coordinator, self.view()
            self._closing = True
            try:
                closed = coordinator.advance()
            except Crash as crash:
                self._die(f"advance: {crash}")
                return
            except Exception as error:
                raise Violation("coordinator-stays-up", advancing=life, error=error) from error
            finally:
                self._closing = False
            self.checker.advanced(coordinator, before, self.view())
            if closed:
                self.world.note("round closed", str(coordinator.weights.current.version))

    def _between(self, where: str) -> None:
        """Other threads' messages come in while a round closes, where no lock is held."""
        chance = 0.5 if self.world.is_faulty else 0.25
        if self._closing and where in _UNLOCKED and self._rng.random() < chance:
            self._closing = False
            self.checker.interrupted(self.view())
            try:
                self.interleave()
            finally:
                self._closing = True
            if self.seams.is_dead:
                raise Crash(where)
