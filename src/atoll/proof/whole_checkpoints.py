"""How far a sharded run holds: the newest checkpoint whose blobs are all there and right.

A checkpoint is gone back to by itself, without those before it, so one that is damaged costs the
rounds after the newest whole one and no more.
"""

from collections.abc import Sequence

from atoll.blobs.base import Blobs
from atoll.errors import AtollError, Exhausted
from atoll.layout import Layout
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import CheckpointRecord, PartRecord
from atoll.proof import retention
from atoll.proof.findings import Damage, Findings
from atoll.strategies import registry
from atoll.versions.manifests import Manifests


def examine(
    ledger: Ledger, blobs: Blobs, *, layout: Layout, published: int, damages: Sequence[Damage]
) -> Findings:
    """Reads every blob of what is kept; `damages` are those of the records."""
    with ledger.reading() as t:
        manifests, run = Manifests(t.manifests.all()), t.run.get()
        storage = retention.storage_of(t)
        recorded, kept = t.checkpoints.all(), retention.kept_checkpoints(t, storage)
        # What an earlier repair had to do without is no news, and no less missing.
        known = retention.replay_start(t, storage)
        waiting = t.checkpoints.every_part()
    assert run is not None, "a run that is examined has a record"
    asked = registry.sharded(manifests.first.manifest)

    def sizes(checkpoint: CheckpointRecord) -> list[int]:
        count = len(checkpoint.blobs)
        return [asked.save_bytes(layout, rank, count) for rank in range(count)]

    flaws = {
        c.round: [
            flaw
            for blob, nbytes in zip(c.blobs, sizes(c), strict=True)
            if (flaw := _flaw(blobs, blob, nbytes, f"the checkpoint of step {c.step}", c.round))
        ]
        for c in kept
    }
    initial = _flaw(blobs, run.initial_sha256, None, "the initial weights", None)
    under_way = [flaw for part in waiting if (flaw := _part_flaw(blobs, part))]
    top = min([published, *(d.round - 1 for d in damages if d.round is not None)])
    whole = [number for number, found in flaws.items() if not found and number <= top]
    last_good = max(whole, default=None if initial else 0)
    news = [flaw for number, found in flaws.items() if number >= known for flaw in found]
    all_damages = [*damages, *news, *under_way, *([initial] if initial else [])]
    is_open_sound = not any(d.round is not None and d.round > published for d in all_damages)
    return Findings(
        published=published,
        last_good=last_good,
        keeps_open=last_good == published and is_open_sound,
        replay_from=_whole_from(recorded, flaws, last_good or 0),
        damages=all_damages,
        bad_blobs={flaw.blob for found in flaws.values() for flaw in found}
        | {flaw.blob for flaw in under_way},
        bad_snapshots=set(),
    )


def _whole_from(
    recorded: Sequence[CheckpointRecord], flaws: dict[int, list[Damage]], last_good: int
) -> int:
    """The round from which on every checkpoint that stays has its blobs; 0: all have.

    Those that were pruned count too: fewer checkpoints stay, and more of them would be kept.
    """
    gone = [c.round for c in recorded if c.round < last_good and flaws.get(c.round) != []]
    return max(gone, default=-1) + 1


def _flaw(
    blobs: Blobs, blob: str, nbytes: int | None, what: str, number: int | None
) -> Damage | None:
    """What is wrong with a blob, which is read whole; None: nothing."""
    part = f"blob {blob} of {what}"
    try:
        with blobs.open(blob) as reader:
            if nbytes is None or reader.nbytes == nbytes:
                return None
            said = f"it has {reader.nbytes} bytes, its shard makes {nbytes}"
    except Exhausted:
        raise  # says nothing about what is stored
    except AtollError as error:
        said = str(error)
    return Damage(part, said, number, blob)


def _part_flaw(blobs: Blobs, part: PartRecord) -> Damage | None:
    what = f"the part of {part.worker_id!r} of round {part.round}, which is under way"
    return _flaw(blobs, part.blob, part.nbytes, what, part.round)
