"""Workers that come later, in the middle of a cycle: while others train and hand in."""

from dataclasses import dataclass

from atoll.simulate.faults.fleet import Fleet
from atoll.simulate.faults.host import Host
from atoll.simulate.faults.world import World

LOOK_SECONDS = 0.3  # so that one may come at any time between two hand-ins


@dataclass(eq=False)
class Joiners:
    """Starts each of the scenario's joiners once it finds the others at work."""

    world: World
    host: Host
    fleet: Fleet

    def __post_init__(self) -> None:
        for worker_id, version in self.world.scenario.joiners:
            self.world.after(LOOK_SECONDS, self._look, worker_id, version)

    def _look(self, worker_id: str, version: int) -> None:
        if self.host.coordinator is not None and self._are_at_work(version):
            self.fleet.join(worker_id)
        else:
            self.world.after(LOOK_SECONDS, self._look, worker_id, version)

    def _are_at_work(self, version: int) -> bool:
        """Somebody has handed in what is not published, and somebody trains."""
        view = self.host.view()
        waits = any(view.accepted(number) for number in view.open_rounds)
        trains = view.table("leases").grouped("state").get("leased")
        return view.version >= version and waits and bool(trains)
