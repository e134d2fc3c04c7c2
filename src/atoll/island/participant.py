"""What every island has beside its training: settings, heartbeats, presence, and its goodbye."""

import logging
import random
import threading
from collections.abc import Callable
from contextlib import ExitStack

from atoll.clock import Clock
from atoll.errors import AtollError
from atoll.island.conversation import session as sessions
from atoll.island.conversation.beside import Beside
from atoll.island.conversation.session import Session
from atoll.island.driver import Driver
from atoll.island.link.base import Attendance, Link
from atoll.island.ranks.group import SOLO, Group
from atoll.island.state.store import IslandIdentity
from atoll.island.telemetry import Meter, Samples
from atoll.protocol.manifest import Manifest
from atoll.protocol.messages import Telemetry

log = logging.getLogger(__name__)

Spawn = Callable[[str, Callable[[], None]], object]


def in_a_thread(name: str, work: Callable[[], None]) -> None:
    """Begins what goes on beside the training of a process."""
    threading.Thread(target=work, name=name, daemon=True).start()


class Participant:
    """This process's part in a run. Not thread-safe, except `beat` and `attend`."""

    def __init__(
        self,
        link: Link,
        clock: Clock,
        *,
        identity: IslandIdentity,
        jitter: random.Random,
        group: Group = SOLO,
        spawn: Spawn = in_a_thread,
    ) -> None:
        self.group = group
        self._clock = clock
        self._spawn = spawn  # begins what goes on beside the training
        self._driver = Driver(link, clock, group)
        info = self._driver.run(sessions.look(jitter))
        self._session = Session(identity, info, jitter, group=group)
        self._meter = Meter(clock)
        self._samples = Samples(clock)
        self._beside = Beside(self._session, self.telemetry, self._samples)
        self._held = ExitStack()
        log.info("settings adopted from the coordinator", extra={"manifest": self.manifest.body()})

    @property
    def manifest(self) -> Manifest:
        """The settings of the round under way; another object after a new version was adopted."""
        return self._session.adopted.manifest

    @property
    def worker_id(self) -> str:
        """Who this island is in the run."""
        return self._session.standing.island.worker_id

    def close(self) -> None:
        """Leaves the run and lets go of what it holds; harmless when repeated."""
        self._driver.run(self._session.leave())
        self.release()

    def leave_now(self) -> None:
        """Tells the coordinator once that this island goes; says nothing when it is away."""
        if not self.group.is_leader:
            return
        try:
            with self.group.alone():
                self._driver.run(self._session.leave_once())
        except AtollError as error:
            log.warning("left without a word", extra={"code": error.code, "reason": str(error)})

    def release(self) -> None:
        """Lets go without a word to the coordinator, as a crash does; this island may come back."""
        self._held.close()

    def hold(self, held: ExitStack) -> None:
        """What to let go when the run is closed or released."""
        self._held = held

    def beat(self) -> None:
        """One heartbeat; called from a thread of its own."""
        self._driver.run(self._beside.beat())

    def attend(self) -> Attendance | None:
        """Opens the presence stream, from a thread of its own; None before and after the run."""
        return self._driver.run(self._beside.attend())

    def telemetry(self) -> Telemetry:
        """What this island tells about itself."""
        return self._meter.telemetry(self._driver.link.traffic)
