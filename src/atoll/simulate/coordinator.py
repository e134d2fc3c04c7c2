"""A run's coordinator in the memory of a simulation, which can be killed and started again."""

from collections.abc import Callable
from pathlib import Path

from atoll.blobs.directory import DirectoryBlobs
from atoll.clock import Clock
from atoll.config import RunFile
from atoll.coordinator import boot
from atoll.coordinator.authority import Authority
from atoll.coordinator.rounds.spool import Spool
from atoll.coordinator.stores import Stores
from atoll.errors import CoordinatorUnreachable
from atoll.ledger import engines
from atoll.simulate import buckets
from atoll.strategies import registry


class SimulatedCoordinator:
    """The coordinator object of the moment, on the stores that `open_stores` gives."""

    def __init__(self, run_file: RunFile, clock: Clock, open_stores: Callable[[], Stores]) -> None:
        self._open_stores = open_stores
        self._clock = clock
        self._is_away = False
        self._stores = open_stores()
        manifest = boot.create_or_check(self._stores, run_file, clock, new_run_id="simulated")
        self.manifest = manifest
        self.by_step = registry.any_of(manifest).by_step
        self.buckets = buckets.made_for(manifest.gather, clock)  # they outlive the coordinator
        self.now = self._open()  # the present life

    def _open(self) -> Authority:
        if self.by_step:
            return boot.open_sharded(self._stores, self._clock, dial=_dial)
        return boot.open_coordinator(self._stores, self._clock, buckets=self.buckets)

    def reach(self) -> Authority:
        """The coordinator; CoordinatorUnreachable while it is away."""
        if self._is_away:
            raise CoordinatorUnreachable("the simulated coordinator is away")
        return self.now

    def go_away(self, seconds: float) -> None:
        """Dies without a word, keeping only what is durable, and comes back."""
        self._is_away = True
        self.close_stores()
        self._clock.sleep(seconds)
        self._stores = self._open_stores()
        self.now = self._open()
        self._is_away = False

    @property
    def is_away(self) -> bool:
        return self._is_away

    def close_stores(self) -> None:
        """Lets go of the stores."""
        self._stores.ledger.close()
        self._stores.blobs.close()


def stores_in(home: Path) -> Stores:
    """What a coordinator keeps, in `home`."""
    return Stores(
        engines.open_ledger(home / "ledger.sqlite"),
        DirectoryBlobs(home / "blobs"),
        Spool(home / "spool"),
    )


def _dial(ip_address: str, port: int, seconds: float) -> None:
    """Simulated ranks are reached as soon as they are there."""
