"""The part of the recorded program that is a rank of a sharded run: its saves, step by step.

Two lives of it in two groups: the first ends in the middle of a pair, the second begins where the
group went back to and makes that step's pair again. A pair is promised from the return of
`complete` until just before it may be dropped.
"""

import random
from pathlib import Path

from atoll.protocol.sharded import HeldSave
from atoll.strategies.sharded.saves import Chunks, Saves
from tests.faults.power import machines
from tests.faults.power.marks import Marks
from tests.faults.power.promises import sha256_of

RUN_ID = "simulated"
FILES = ("own", "own.chunks", "predecessor", "predecessor.chunks", "complete.json")
OWN_BYTES, PREDECESSOR_BYTES = 3 * 4096 + 100, 2 * 4096 + 8  # each on several pages


def save_steps(root: Path, marks: Marks) -> None:
    """Saves of steps 2 to 6 in group 1, and again from step 6 on in group 2."""
    kept = Saves(root / machines.RANK, run_id=RUN_ID)
    for step in (2, 4, 6):
        _complete(kept, step, 1, marks)
    _drop(kept, marks, consistent=4, group=1)
    _half(kept, 8, 1)

    kept = Saves(root / machines.RANK, run_id=RUN_ID)
    _discard(kept, marks, after=4)
    _complete(kept, 6, 2, marks)
    _drop(kept, marks, consistent=6, group=2)
    _half(kept, 8, 2)
    _complete(kept, 8, 2, marks)
    _drop(kept, marks, consistent=8, group=2)


def _half(kept: Saves, step: int, group: int) -> None:
    """A pair that is given up before the predecessor's shard came."""
    draft = kept.begin(step, group=group, rank=1)
    draft.write_own([_bytes("given up", step, group, OWN_BYTES)])
    draft.finish_own()


def _complete(kept: Saves, step: int, group: int, marks: Marks) -> None:
    draft = kept.begin(step, group=group, rank=1)
    draft.write_own([_bytes("own", step, group, OWN_BYTES)])
    draft.finish_own()
    theirs = _bytes("predecessor", step, group, PREDECESSOR_BYTES)
    draft.write_predecessor(Chunks.of([theirs]), lambda start, stop: [theirs[start:stop]])
    held = kept.complete(draft)
    files = {name: sha256_of(draft.directory / name) for name in FILES}
    marks.write(machine="rank", held=name_of(held), files=files)


def _drop(kept: Saves, marks: Marks, *, consistent: int, group: int) -> None:
    """What is let go is no promise any more, from just before."""
    over = [name_of(held) for held in kept.held if held.step < consistent]
    marks.write(machine="rank", dropping=over)
    kept.keep(consistent=consistent, group=group)


def _discard(kept: Saves, marks: Marks, *, after: int) -> None:
    """The same of steps that will be made again."""
    over = [held for held in kept.held if held.step > after]
    marks.write(machine="rank", dropping=[name_of(held) for held in over])
    for held in over:
        kept.discard(held.own)


def name_of(held: HeldSave) -> str:
    """Of a pair, as its directory is called."""
    return f"save-{held.step}-{held.group}"


def _bytes(what: str, step: int, group: int, count: int) -> bytes:
    return random.Random(f"{what} {step} {group}").randbytes(count)
