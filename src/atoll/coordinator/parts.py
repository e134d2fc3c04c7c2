"""What a coordinator is made of, as one value; `boot` puts it together."""

from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.coordinator.accept.uploads import Uploads
from atoll.coordinator.counters import Counters
from atoll.coordinator.members.barriers import Barriers
from atoll.coordinator.members.control import Control
from atoll.coordinator.members.dialback import Dialback
from atoll.coordinator.members.heartbeats import Heartbeats
from atoll.coordinator.members.liveness import Liveness
from atoll.coordinator.members.membership import Membership
from atoll.coordinator.members.presence import Presence
from atoll.coordinator.members.readiness import MemberTable
from atoll.coordinator.members.workers import Registry
from atoll.coordinator.rounds.assignments import Assignments
from atoll.coordinator.rounds.closing import Closing
from atoll.coordinator.rounds.disk_space import DiskSpace
from atoll.coordinator.rounds.rounds import Rounds
from atoll.coordinator.rounds.run_weights import RunWeights
from atoll.coordinator.rounds.snapshots import Snapshots
from atoll.coordinator.shown.samples import SampleStore
from atoll.coordinator.shown.status import Report
from atoll.layout import Layout
from atoll.ledger.ledger import Ledger
from atoll.versions.manifests import Manifests


@dataclass
class Changes:
    """Who is told, from any thread, that a waiting worker may have something to do."""

    listeners: list[Callable[[], None]] = field(default_factory=list)

    def __call__(self) -> None:
        for listener in self.listeners:
            listener()


@dataclass(frozen=True, kw_only=True)
class Members:
    """Who takes part, and how it is known."""

    heartbeats: Heartbeats
    registry: Registry
    control: Control
    presence: Presence
    dialback: Dialback
    membership: Membership
    liveness: Liveness
    barriers: Barriers
    table: MemberTable


@dataclass(frozen=True, kw_only=True)
class Parts:
    """All parts of one coordinator, wired to each other."""

    run_id: str
    ledger: Ledger
    layout: Layout
    manifests: Manifests
    samples: SampleStore
    counters: Counters
    changes: Changes
    members: Members
    rounds: Rounds
    weights: RunWeights
    uploads: Uploads
    assignments: Assignments
    disk: DiskSpace
    snapshots: Snapshots
    closing: Closing
    report: Report
