"""Records for ledgers, and moves that take one through a run's life."""

from dataclasses import replace

from atoll.ledger.base import Ledger
from atoll.ledger.records import (
    ContributionRecord,
    DatasetRecord,
    EvaluationRecord,
    LeaseRecord,
    ManifestRecord,
    Published,
    QueueRecord,
    RoundPlan,
    RunRecord,
    SnapshotRecord,
)

RUN = RunRecord(run_id="run-1", created_wall=1_700_000_000.25, initial_sha256="1" * 64)
MANIFEST = ManifestRecord(version=1, sha256="2" * 64, body='{"a":"θ"}', from_round=1)
PUBLISHED = Published(
    prev_hash="3" * 64,
    hash="4" * 64,
    master_digest="5" * 64,
    published_digest="6" * 64,
    leaves=bytes(range(64)),
    published_leaves=None,
    published_wall=1_700_000_009.5,
)
# In the order of code points, which no locale gives.
NAMES = ["-dash", "0", "B", "Z.9", "_x", "a", "b"]


def lease(round_number: int, worker_id: str, start: int, stop: int) -> LeaseRecord:
    return LeaseRecord(round=round_number, worker_id=worker_id, start=start, stop=stop)


def extension(
    round_number: int, leases: list[LeaseRecord], *, cursor: int, taken: list[LeaseRecord]
) -> RoundPlan:
    return RoundPlan(
        round=round_number,
        manifest_sha256=MANIFEST.sha256,
        cursor=cursor,
        leases=tuple(leases),
        taken=tuple(taken),
    )


def plan(
    round_number: int, leases: list[LeaseRecord], *, taken: tuple[LeaseRecord, ...] = ()
) -> RoundPlan:
    return RoundPlan(
        round=round_number,
        manifest_sha256=MANIFEST.sha256,
        cursor=16 * round_number,
        leases=tuple(leases),
        taken=taken,
    )


def contribution(worker_id: str = "a", **changes: object) -> ContributionRecord:
    record = ContributionRecord(
        round=1,
        worker_id=worker_id,
        incarnation=1,
        sha256=f"blob of {worker_id}",
        nbytes=2**40,
        weight=1,
        rows=8,
        tokens=2**33,
        loss_sum=0.1 + 0.2,
        norm=1e-310,
        receipt=f"receipt of {worker_id}",
        accepted_wall=1_700_000_001.0,
    )
    return replace(record, **changes)  # type: ignore[arg-type]


# Changes only with `play` or with the tables; every engine must give this same value.
STATE_OF_PLAY = "a65511c584077f8d61e33d8fed74c0c67d3a9fe9021082a53ea5ae062901c887"


def play(ledger: Ledger) -> None:
    """A history that leaves rows in every table and leases in every state."""
    ledger.create_run(RUN, MANIFEST)
    ledger.set_credentials({"worker": "w" * 64, "admin": "a" * 64})
    for name in NAMES:
        ledger.register(name, f"key {name}", wall=-0.0)
    ledger.register("B", "new key", wall=7.125)
    ledger.deregister("b", 1, wall=0.0)
    ledger.begin(plan(1, [lease(1, name, 8 * n, 8 * n + 8) for n, name in enumerate(NAMES)]))
    ledger.accept(contribution("a"))
    ledger.accept(contribution("B", incarnation=2))
    ledger.freeze(1, plan(2, [lease(2, "a", 0, 8)], taken=(lease(1, "-dash", 0, 8),)))
    ledger.publish(1, PUBLISHED)
    ledger.extend(extension(2, [lease(2, "B", 100, 108)], cursor=108, taken=[]))
    ledger.accept(contribution("a", round=2))
    ledger.freeze(2, None)
    ledger.publish(2, replace(PUBLISHED, published_leaves=b"\x00\xff"))
    ledger.add_snapshot(SnapshotRecord(0, "m", "p", ()))
    ledger.add_snapshot(SnapshotRecord(2, "m2", "p2", (("momentum", "s1"), ("a", "s2"))))
    ledger.add_evaluation(EvaluationRecord(1, "a", 2.0 / 3.0, 10))
    ledger.set_control({"action": "pause", "number": "1"})
    ledger.add_datasets([DatasetRecord("d" * 16, "words", 2**40, 3)])
    queue = QueueRecord("d" * 16, 2**62, 0, 2**40, units=1000)
    units = replace(lease(3, "a", 2**39, 2**40), dataset_id="d" * 16, shuffle_seed=2**62, unit=500)
    ledger.begin(replace(plan(3, [units]), queues=(queue,)))
    ledger.accept(contribution("a", round=3))


# Moves of a ledger whose round 1 is open


def open_round(ledger: Ledger) -> None:
    """Leaves it as it is."""


def freeze_last(ledger: Ledger) -> None:
    ledger.freeze(1, None)


def publish_last(ledger: Ledger) -> None:
    freeze_last(ledger)
    ledger.publish(1, PUBLISHED)


def plan_second(ledger: Ledger) -> None:
    ledger.freeze(1, plan(2, [lease(2, "a", 16, 24)]))
