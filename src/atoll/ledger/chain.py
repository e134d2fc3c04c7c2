"""The hash chain over published rounds: pure functions of records.

    genesis = H(run, first manifest, initial weights)
    hash_n  = H(hash_{n-1}, n, manifest, ordered contributions, digests of θ and θ̂)

The hash of a round also covers its fragment, unless that is the first one; and of a contribution
that was made for another round, or that holds rows of earlier ones, both round numbers. Where a
round has an artifact, its hash covers that too. Wall times and norms are left out, so that a
simulated and a real run of the same rounds have equal hashes.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from atoll import canonical
from atoll.ledger import records
from atoll.ledger.records import (
    CheckpointRecord,
    ContributionRecord,
    ManifestRecord,
    RoundRecord,
    RunRecord,
)

_PUBLISHED = records.RoundState.PUBLISHED


@dataclass(frozen=True, slots=True)
class Break:
    """The first place where the chain does not hold."""

    round: int  # 0: before the first round
    field: str
    reason: str


def genesis_hash(run: RunRecord, manifest_sha256: str) -> str:
    """What the first round's prev_hash is; the manifest is the run's first."""
    start = {"run": run.run_id, "manifest": manifest_sha256, "initial": run.initial_sha256}
    return canonical.sha256({"kind": "genesis", **start})


def round_hash(record: RoundRecord, contributions: Sequence[ContributionRecord]) -> str:
    """The hash that a round adds to the chain; it has its prev_hash and both digests already."""
    ordered = sorted(contributions, key=attrgetter("worker_id", "round"))
    hashed: dict[str, object] = {
        "kind": "round",
        "prev": record.prev_hash,
        "round": record.round,
        "manifest": record.manifest_sha256,
        "contributions": [_hashed(c, record.round) for c in ordered],
        "master": record.master_digest,
        "published": record.published_digest,
    }
    # Left out where there is none, so that runs of one fragment keep the hashes they have.
    if record.fragment:
        hashed["fragment"] = record.fragment
    if record.artifact_sha256 is not None:
        hashed["artifact"] = record.artifact_sha256
    return canonical.sha256(hashed)


def checkpoint_hash(record: RoundRecord, checkpoint: CheckpointRecord) -> str:
    """The hash that a round of a sharded run adds; it has its prev_hash and digest already."""
    hashed: dict[str, object] = {
        "kind": "checkpoint",
        "prev": record.prev_hash,
        "round": record.round,
        "manifest": record.manifest_sha256,
        "step": checkpoint.step,
        "group": checkpoint.group_number,
        "members": list(checkpoint.members),
        "parts": [list(pair) for pair in zip(checkpoint.parts, checkpoint.blobs, strict=True)],
        "rows": checkpoint.rows,
        "tokens": checkpoint.tokens,
        "master": record.master_digest,
    }
    late = [list(one) for one in checkpoint.late]
    return canonical.sha256(hashed | ({"late": late} if late else {}))


def _hashed(c: ContributionRecord, round_number: int) -> list[object]:
    """What the hash of the round that folds a contribution covers of it."""
    made = [c.round, c.first]
    own = made == [round_number, round_number]
    return [c.worker_id, c.sha256, c.weight, c.rows, c.tokens, *([] if own else [made])]


def check_chain(
    run: RunRecord,
    manifests: Sequence[ManifestRecord],
    rounds: Sequence[RoundRecord],
    contributions_of: Callable[[int], Sequence[ContributionRecord]],
    checkpoints: Iterable[CheckpointRecord] = (),
) -> Break | None:
    """The first break of the chain over all `rounds` of the run, or None when it holds.

    `manifests` and `rounds` come oldest first, as the ledger gives them; `checkpoints` are those of
    a sharded run, whose rounds end with one each.
    """
    whole = {checkpoint.round: checkpoint for checkpoint in checkpoints}
    if not manifests:
        return Break(0, "manifests", f"run {run.run_id!r} has no manifest; it must have one")
    for manifest in manifests:
        found = hashlib.sha256(manifest.body.encode()).hexdigest()
        if found != manifest.sha256:
            reason = (
                f"manifest version {manifest.version}, in force from round {manifest.from_round}, "
                f"hashes to {found!r}; recorded is sha256={manifest.sha256!r}"
            )
            return Break(manifest.from_round, "manifest body", reason)
    prev_hash = genesis_hash(run, manifests[0].sha256)
    for expected, record in enumerate(rounds, start=1):
        broken = _check_place(rounds, manifests, expected=expected)
        if broken is None and record.state is _PUBLISHED:
            folded, checkpoint = contributions_of(record.round), whole.get(record.round)
            broken = _check_hash(record, folded, checkpoint, prev_hash=prev_hash)
        if broken is not None:
            return broken
        prev_hash = record.hash or prev_hash
    return None


def in_order(
    contributions: Iterable[ContributionRecord],
) -> Callable[[int], list[ContributionRecord]]:
    """The `contributions_of` that `check_chain` takes, on top of `ContributionTable.every`.

    It reads on as rounds are asked for and keeps one round in memory, so rounds must be asked for
    in ascending order, each once.
    """
    groups = groupby(contributions, key=attrgetter("applied"))
    ahead = next(groups, None)

    def of_round(number: int) -> list[ContributionRecord]:
        nonlocal ahead
        while ahead is not None and ahead[0] < number:
            ahead = next(groups, None)
        return list(ahead[1]) if ahead is not None and ahead[0] == number else []

    return of_round


def _check_place(
    rounds: Sequence[RoundRecord], manifests: Sequence[ManifestRecord], *, expected: int
) -> Break | None:
    """Whether the round that should have number `expected` is where and what it must be."""
    record, last = rounds[expected - 1], expected - 1
    if record.round != expected:
        reason = f"round {expected} is missing; after round {last} comes {record.round}"
        return Break(expected, "round", reason)
    before = rounds[last - 1].state if last else _PUBLISHED
    if record.state is _PUBLISHED is not before:
        reason = f"round {expected} is published while round {last} is {before.value}"
        return Break(expected, "state", f"{reason}; rounds are published in order")
    in_force = [m.sha256 for m in manifests if m.from_round <= expected]
    if not in_force:
        reason = f"no manifest is in force in round {expected}; one must be"
        return Break(expected, "manifest_sha256", reason)
    return _differs(record, "manifest_sha256", in_force[-1])


def _check_hash(
    record: RoundRecord,
    contributions: Sequence[ContributionRecord],
    checkpoint: CheckpointRecord | None,
    *,
    prev_hash: str,
) -> Break | None:
    """Whether a published round's own fields give its hash."""
    broken = _differs(record, "prev_hash", prev_hash)
    if broken is not None:
        return broken
    for field in ("master_digest", "published_digest", "leaves"):
        if getattr(record, field) is None:
            reason = f"round {record.round} is published without {field}; every one has it"
            return Break(record.round, field, reason)
    right = (
        round_hash(record, contributions)
        if checkpoint is None
        else checkpoint_hash(record, checkpoint)
    )
    return _differs(record, "hash", right)


def _differs(record: RoundRecord, field: str, right: str) -> Break | None:
    found = getattr(record, field)
    if found == right:
        return None
    reason = f"round {record.round} records {field}={found!r}; what it follows from gives {right!r}"
    return Break(record.round, field, reason)
