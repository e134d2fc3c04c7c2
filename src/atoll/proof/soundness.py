"""Whether the durable state is what was written, and how far it holds where it is not.

`check_start` is what a coordinator asks before it serves: every record, and the blobs that the
weights of the next rounds come from. `examine` looks at every blob and finds the last good round.
Reads a ledger and blobs; changes neither.
"""

import logging
from collections.abc import Iterable
from contextlib import closing

from atoll.blobs.base import Blobs
from atoll.errors import AtollError, Exhausted, StateDamaged, StoreError
from atoll.layout import Layout
from atoll.ledger import chain
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import LedgerDamage, RoundRecord, RoundState, SnapshotRecord
from atoll.ledger.tables.transaction import Transaction
from atoll.proof import retention, whole_checkpoints
from atoll.proof.findings import Damage, Findings
from atoll.sums import digest as digests
from atoll.versions.manifests import Manifests
from atoll.versions.replay import Replay
from atoll.wire import frame

# Tables whose rows belong to a round: without them the round is not what it was.
OF_ROUNDS = ("rounds", "leases", "contributions", "checkpoints")
# Tables whose entries are each checked when they are read: a damaged one is named, others serve on.
BY_THEIR_READERS = ("queues",)

log = logging.getLogger(__name__)


def check_start(ledger: Ledger, blobs: Blobs) -> None:
    """StateDamaged when a record is not as it was written or a blob is of a lost round."""
    found = [Damage(str(d), "", _round_of(d)) for d in ledger.damage() if _matters(d)]
    if not found:
        with ledger.reading() as t:
            found = _records(t)
    if not found:
        found = _newer(ledger, blobs)
    if not found:
        with ledger.reading() as t:
            waiting = t.rounds.unpublished()  # their contributions are not folded yet
        found = _contribution_flaws(ledger, blobs, waiting) + _checkpoint_flaws(ledger, blobs)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise StateDamaged(f"{found[0]}{more}")


def examine(ledger: Ledger, blobs: Blobs, *, layout: Layout, told: int = 0) -> Findings:
    """Looks at every record and every blob that a record names.

    `told` is the newest round that was known before a repair cut the ledger short: blobs of rounds
    up to it do not mean that records were lost.
    """
    damages = [Damage(str(d), "", _round_of(d)) for d in ledger.damage()]
    with ledger.reading() as t:
        manifests, rounds = Manifests(t.manifests.all()), t.rounds.all()
        damages += _records(t)
        storage = retention.storage_of(t)
        kept = retention.kept_from(t, storage)
        # What an earlier repair had to do without is no news, and no less missing.
        known = retention.replay_start(t, storage)
    published = _published(rounds)
    if manifests.first.any_strategy.by_step:
        damages += _newer(ledger, blobs, told=told)
        return whole_checkpoints.examine(
            ledger, blobs, layout=layout, published=published, damages=damages
        )
    top = min([published, *(d.round - 1 for d in damages if d.round is not None)])
    flaws = _contribution_flaws(ledger, blobs, (r for r in rounds if r.round > kept))
    starts = _starts(ledger, blobs, manifests=manifests, layout=layout, start=kept)
    bad_rounds = {flaw.round for flaw in flaws}
    reach = {
        s: _reach(s, top, bad_rounds) for s, flaw in starts.items() if flaw is None and s <= top
    }
    last_good = max(reach.values(), default=None)
    damages += [flaw for flaw in flaws if (flaw.round or 0) > known]
    damages += _newer(ledger, blobs, told=told)
    damages += [flaw for s, flaw in starts.items() if flaw is not None and s >= known]
    is_open_sound = not any(d.round is not None and d.round > published for d in damages)
    return Findings(
        published=published,
        last_good=last_good,
        keeps_open=last_good == published and is_open_sound,
        replay_from=min((s for s, far in reach.items() if far == last_good), default=0),
        damages=damages,
        bad_blobs={flaw.blob for flaw in flaws},
        bad_snapshots={s for s, flaw in starts.items() if flaw is not None and s},
    )


def _published(rounds: Iterable[RoundRecord]) -> int:
    return max((r.round for r in rounds if r.state is RoundState.PUBLISHED), default=0)


def _matters(damage: LedgerDamage) -> bool:
    """False for tables whose entries are checked by whoever reads them; those are only logged."""
    if damage.place in BY_THEIR_READERS:
        log.warning("part of the ledger is damaged and not used", extra={"part": str(damage)})
        return False
    return True


def _round_of(damage: LedgerDamage) -> int | None:
    if damage.place not in OF_ROUNDS:
        return None
    return int(damage.key) if damage.key.isdigit() else 1


def _records(t: Transaction) -> list[Damage]:
    """What the records say about each other: the chain, and the leaves outside it."""
    run = t.run.get()
    if run is None:
        return []
    manifests, rounds = t.manifests.all(), t.rounds.all()
    # Not round by round: a restart has seconds, whatever its history.
    with closing(t.contributions.every()) as contributions:
        broken = chain.check_chain(
            run, manifests, rounds, chain.in_order(contributions), t.checkpoints.all()
        )
    found = []
    if broken is not None:
        part = f"the ledger's hash chain, {broken.field}"
        found.append(Damage(part, broken.reason, broken.round))
    for record in rounds:
        if record.state is RoundState.PUBLISHED:
            root = digests.root_of(record.leaves or b"")
            if root != record.master_digest:
                reason = f"they hash to {root}, its digest is {record.master_digest}"
                found.append(Damage(f"the leaves of round {record.round}", reason, record.round))
    return found


def newer_blobs(ledger: Ledger, blobs: Blobs) -> set[str]:
    """Blobs of rounds that the ledger has not come to."""
    return {flaw.blob for flaw in _newer(ledger, blobs)}


def _newer(ledger: Ledger, blobs: Blobs, *, told: int = 0) -> list[Damage]:
    """Blobs of rounds that the ledger has not come to: it has lost what it once recorded."""
    with ledger.reading() as t:
        run, rounds = t.run.get(), t.rounds.all()
        known = set() if run is None else retention.referenced(t, None)
    latest = rounds[-1].round if rounds else 0
    published = _published(rounds)
    found = []
    for ref in blobs.stored():
        if ref.sha256 in known:
            continue
        try:
            with blobs.open(ref.sha256) as reader:
                header, _ = frame.read_preamble(reader)
        except Exhausted:
            raise  # says nothing about what is stored
        except AtollError:
            continue  # nothing depends on it
        limit = latest if header.kind == "contribution" else published
        if run is not None and header.run_id != run.run_id:
            limit = 0  # a creation that was cut off leaves its initial weights
        if header.round > max(limit, told):
            what = f"a {header.kind} of round {header.round} of run {header.run_id!r}"
            end = "holds no run" if run is None else f"ends with round {latest}"
            reason = f"it is {what}, and the ledger {end}; records have been lost"
            found.append(Damage(f"blob {ref.sha256}", reason, blob=ref.sha256))
    return found


def _contribution_flaws(
    ledger: Ledger, blobs: Blobs, rounds: Iterable[RoundRecord]
) -> list[Damage]:
    """Contributions that `rounds` fold and whose blob is missing or changed."""
    with ledger.reading() as t:
        folded = [c for record in rounds for c in t.contributions.of_round(record.round)]
    found = []
    for c in folded:
        try:
            blobs.open(c.sha256).close()
        except Exhausted:
            raise  # says nothing about what is stored
        except StoreError as error:
            part = f"the contribution of {c.worker_id!r} to round {c.round}"
            found.append(Damage(part, str(error), c.applied, blob=c.sha256))
    return found


def _checkpoint_flaws(ledger: Ledger, blobs: Blobs) -> list[Damage]:
    """Blobs of the newest checkpoint, and parts of the next one, that are not there.

    By their names and sizes: each is hashed when it is first read.
    """
    with ledger.reading() as t:
        newest, parts = t.checkpoints.newest(), t.checkpoints.every_part()
    wanted = [] if newest is None else [(blob, newest.round) for blob in newest.blobs]
    wanted += [(part.blob, part.round) for part in parts]
    if not wanted:
        return []
    stored = {ref.sha256 for ref in blobs.stored()}
    return [
        Damage(f"blob {blob} of the checkpoint of round {number}", "it is missing", blob=blob)
        for blob, number in wanted
        if blob not in stored
    ]


def _starts(
    ledger: Ledger, blobs: Blobs, *, manifests: Manifests, layout: Layout, start: int
) -> dict[int, Damage | None]:
    """Versions that replay could begin at, and what is wrong with each."""
    candidates: list[SnapshotRecord | None] = [] if start else [None]
    with ledger.reading() as t:
        candidates += t.snapshots.all()
    replay = Replay(ledger, blobs, manifests=manifests, layout=layout)
    found: dict[int, Damage | None] = {}
    for snapshot in candidates:
        version = 0 if snapshot is None else snapshot.version
        part = "the initial weights" if snapshot is None else f"the snapshot of version {version}"
        found[version] = None
        try:
            replay.restore(snapshot)
        except Exhausted:
            raise  # says nothing about what is stored
        except AtollError as error:
            found[version] = Damage(part, str(error))
    return found


def _reach(start: int, top: int, bad_rounds: set[int | None]) -> int:
    """The newest version that replay from `start` comes to."""
    return next((v - 1 for v in range(start + 1, top + 1) if v in bad_rounds), top)
