"""A sharded run's coordinator out of its records: no weights are read."""

from functools import cache

from atoll.clock import Clock
from atoll.coordinator import member_wiring
from atoll.coordinator.changes import Changes
from atoll.coordinator.counters import Counters
from atoll.coordinator.member_wiring import Opened
from atoll.coordinator.members.barriers import Barriers
from atoll.coordinator.members.dialback import Dial
from atoll.coordinator.rounds.disk_space import DiskSpace
from atoll.coordinator.sharded.boundaries import Boundaries
from atoll.coordinator.sharded.checkpoints import Checkpoints
from atoll.coordinator.sharded.damages import Damages
from atoll.coordinator.sharded.groups import Groups
from atoll.coordinator.sharded.hashes import Hashes
from atoll.coordinator.sharded.intervals import Intervals
from atoll.coordinator.sharded.saves import Saves
from atoll.coordinator.sharded.service import ShardedCoordinator
from atoll.coordinator.sharded.status import ShardedReport
from atoll.coordinator.stores import Stores
from atoll.protocol.sharded import Restore
from atoll.wire import frame


def wired(stores: Stores, clock: Clock, opened: Opened, *, dial: Dial) -> ShardedCoordinator:
    """The coordinator of the run in `stores`."""
    ledger, blobs, changed, counters = stores.ledger, stores.blobs, Changes(), Counters()
    run, manifests, layout = opened.run, opened.manifests, opened.layout
    membership = member_wiring.membership(ledger, clock, opened, changed, dial=dial)
    registry, heartbeats = membership.registry, membership.registry.heartbeats
    intervals = Intervals(ledger, manifests)
    heartbeats.timeout_seconds = manifests.in_force.manifest.heartbeat_timeout
    checkpoints = Checkpoints(
        ledger,
        blobs,
        clock,
        intervals,
        run=run,
        manifests=manifests,
        layout=layout,
        changed=changed,
    )

    @cache  # a blob is hashed when it is first opened
    def initial() -> Restore:
        with blobs.open(run.initial_sha256) as reader:
            _, offset = frame.read_preamble(reader)
        return Restore(source="initial", step=0, parts=(run.initial_sha256,), offset=offset)

    damages = Damages(ledger, blobs, clock, run.initial_sha256, changed)
    groups = Groups(
        ledger,
        clock,
        registry,
        membership.presence,
        membership.control,
        intervals,
        initial=initial,
        is_committing=checkpoints.is_due,
        damages=damages,
        changed=changed,
    )
    checkpoints.groups = groups
    saves = Saves(ledger, groups, intervals)
    largest = intervals.asked.save_bytes(layout, 0, manifests.first.manifest.membership.min_workers)
    disk = DiskSpace(blobs, clock, needed_bytes=largest)
    return ShardedCoordinator(
        run_id=run.run_id,
        run=run,
        layout=layout,
        ledger=ledger,
        blobs=blobs,
        manifests=manifests,
        samples=stores.samples,
        counters=counters,
        changed=changed,
        heartbeats=heartbeats,
        registry=registry,
        operator=membership.control,
        presence=membership.presence,
        membership=membership,
        barriers=Barriers(on_complete=changed),
        disk=disk,
        intervals=intervals,
        groups=groups,
        saves=saves,
        boundaries=Boundaries(groups, intervals, membership.control),
        checkpoints=checkpoints,
        hashes=Hashes(blobs, layout),
        damages=damages,
        report=ShardedReport(
            run_id=run.run_id,
            ledger=ledger,
            membership=membership,
            manifests=manifests,
            intervals=intervals,
            groups=groups,
            saves=saves,
            counters=counters,
            disk=disk,
        ),
    )
