"""The hash chain over published rounds: pure functions of records.

    genesis = H(run, first manifest, initial weights)
    hash_n  = H(hash_{n-1}, n, manifest, ordered contributions, digests of θ and θ̂)

The hash of a round also covers its fragment, unless that is the first one; and of a contribution
that was made for another round, or that holds rows of earlier ones, both round numbers. Wall times
and norms are left out, so that a simulated and a real run of the same rounds have equal hashes.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from atoll import canonical
from atoll.ledger.records import (
    ContributionRecord,
    ManifestRecord,
    RoundRecord,
    RoundState,
    RunRecord,
)


@dataclass(frozen=True, slots=True)
class Break:
    """The first place where the chain does not hold."""

    round: int  # 0: before the first round
    field: str
    reason: str


def genesis_hash(run_id: str, manifest_sha256: str, initial_sha256: str) -> str:
    """What the first round's prev_hash is."""
    return canonical.sha256(
        {"kind": "genesis", "run": run_id, "manifest": manifest_sha256, "initial": initial_sha256}
    )


def round_hash(
    *,
    prev_hash: str,
    round_number: int,
    manifest_sha256: str,
    contributions: Sequence[ContributionRecord],
    master_digest: str,
    published_digest: str,
    fragment: int = 0,
) -> str:
    """The hash that a published round adds to the chain."""
    ordered = sorted(contributions, key=lambda c: (c.worker_id, c.round))
    hashed: dict[str, object] = {
        "kind": "round",
        "prev": prev_hash,
        "round": round_number,
        "manifest": manifest_sha256,
        "contributions": [_hashed(c, round_number) for c in ordered],
        "master": master_digest,
        "published": published_digest,
    }
    # Left out for the first fragment, so that runs of one fragment keep the hashes they have.
    return canonical.sha256(hashed | ({"fragment": fragment} if fragment else {}))


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
) -> Break | None:
    """The first break of the chain over all `rounds` of the run, or None when it holds.

    `manifests` and `rounds` come oldest first, as the ledger gives them.
    """
    if not manifests:
        return Break(0, "manifests", f"run {run.run_id!r} has no manifest; it must have one")
    for manifest in manifests:
        found = hashlib.sha256(manifest.body.encode()).hexdigest()
        if found != manifest.sha256:
            return Break(
                manifest.from_round,
                "manifest body",
                f"manifest version {manifest.version}, in force from round {manifest.from_round}, "
                f"hashes to {found!r}; recorded is sha256={manifest.sha256!r}",
            )
    prev_hash = genesis_hash(run.run_id, manifests[0].sha256, run.initial_sha256)
    for expected, record in enumerate(rounds, start=1):
        broken = _check_place(rounds, manifests, expected=expected)
        if broken is None and record.state is RoundState.PUBLISHED:
            broken = _check_hash(record, contributions_of(record.round), prev_hash=prev_hash)
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
    rest = iter(contributions)
    ahead = next(rest, None)

    def of_round(number: int) -> list[ContributionRecord]:
        nonlocal ahead
        found = []
        while ahead is not None and ahead.applied <= number:
            if ahead.applied == number:
                found.append(ahead)
            ahead = next(rest, None)
        return found

    return of_round


def _check_place(
    rounds: Sequence[RoundRecord], manifests: Sequence[ManifestRecord], *, expected: int
) -> Break | None:
    """Whether the round that should have number `expected` is where and what it must be."""
    record = rounds[expected - 1]
    if record.round != expected:
        return Break(
            expected,
            "round",
            f"round {expected} is missing; after round {expected - 1} comes {record.round}",
        )
    if record.state is RoundState.PUBLISHED and expected > 1:
        before = rounds[expected - 2].state
        if before is not RoundState.PUBLISHED:
            return Break(
                expected,
                "state",
                f"round {expected} is published while round {expected - 1} is {before.value}; "
                f"rounds are published in order",
            )
    in_force = [m.sha256 for m in manifests if m.from_round <= expected]
    if not in_force:
        return Break(
            expected, "manifest_sha256", f"no manifest is in force in round {expected}; one must be"
        )
    return _differs(record.round, "manifest_sha256", record.manifest_sha256, in_force[-1])


def _check_hash(
    record: RoundRecord, contributions: Sequence[ContributionRecord], *, prev_hash: str
) -> Break | None:
    """Whether a published round's own fields give its hash."""
    broken = _differs(record.round, "prev_hash", record.prev_hash, prev_hash)
    if broken is not None:
        return broken
    for field in ("master_digest", "published_digest", "leaves"):
        if getattr(record, field) is None:
            return Break(
                record.round,
                field,
                f"round {record.round} is published without {field}; every published round has one",
            )
    assert record.master_digest is not None
    assert record.published_digest is not None
    computed = round_hash(
        prev_hash=prev_hash,
        round_number=record.round,
        manifest_sha256=record.manifest_sha256,
        contributions=contributions,
        master_digest=record.master_digest,
        published_digest=record.published_digest,
        fragment=record.fragment,
    )
    return _differs(record.round, "hash", record.hash, computed)


def _differs(round_number: int, field: str, recorded: str | None, right: str) -> Break | None:
    if recorded == right:
        return None
    return Break(
        round_number,
        field,
        f"round {round_number} records {field}={recorded!r}; what it follows from gives {right!r}",
    )
