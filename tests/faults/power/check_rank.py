"""A rank after a power cut: pairs it told of are here and whole, and nothing else counts."""

from collections.abc import Sequence
from pathlib import Path

from atoll.strategies.sharded.saves import Saves
from tests.faults.power import machines, ranks
from tests.faults.power.promises import Broken, Mark, same, sha256_of, values


class RankCheck:
    """Knows the bytes of every pair that the recorded rank ever completed."""

    def __init__(self, marks: Sequence[Mark]) -> None:
        own = [mark for mark in marks if mark["machine"] == "rank" and "held" in mark]
        self._files: dict[str, dict[str, str]] = {mark["held"]: mark["files"] for mark in own}

    def __call__(self, root: Path, promised: Sequence[Mark]) -> None:
        kept = Saves(root / machines.RANK, run_id=ranks.RUN_ID)
        found = {ranks.name_of(held): held for held in kept.held}
        due = set(values(promised, "held"))
        due -= {name for dropped in values(promised, "dropping") for name in dropped}
        if missing := due - found.keys():
            raise Broken(f"pairs {sorted(missing)} were reported as held and are not here")
        for name, held in found.items():
            directory = kept.find(held.own).path.parent
            files = {file: sha256_of(directory / file) for file in ranks.FILES}
            same(f"the pair {name}", files, self._files[name])
