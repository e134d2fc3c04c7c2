"""Who takes part in a run, wired from its records: the same for every strategy."""

from dataclasses import dataclass

from atoll.clock import Clock
from atoll.coordinator.changes import Changes
from atoll.coordinator.members import dialback
from atoll.coordinator.members.control import Control
from atoll.coordinator.members.dialback import Dial, Dialback
from atoll.coordinator.members.heartbeats import Heartbeats
from atoll.coordinator.members.membership import Membership
from atoll.coordinator.members.presence import Presence
from atoll.coordinator.members.workers import Registry
from atoll.layout import Layout
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import RunRecord
from atoll.versions.manifests import Manifests


@dataclass(frozen=True)
class Opened:
    """What is recorded of a run."""

    run: RunRecord
    manifests: Manifests
    layout: Layout


def membership(
    ledger: Ledger,
    clock: Clock,
    opened: Opened,
    changed: Changes,
    *,
    dial: Dial = dialback.connect,
) -> Membership:
    """Who takes part, with what knows of it."""
    manifests = opened.manifests
    heartbeats = Heartbeats(clock, timeout_seconds=manifests.newest.manifest.heartbeat_timeout)
    registry = Registry(
        ledger,
        heartbeats,
        clock,
        run_id=opened.run.run_id,
        manifest=lambda: manifests.in_force.sha256,
    )
    made = Membership(
        registry,
        Presence(clock),
        Control(ledger),
        Dialback(clock, dial=dial),
        clock=clock,
        manifests=manifests,
        layout=opened.layout,
        changed=changed,
    )
    made.finish_kicks()
    return made
