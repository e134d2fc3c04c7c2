"""Mutants that no invariant can catch, each with the reason."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from atoll.ledger.tables.members import MemberTable
from tests.faults.mutants.mutant import Patch


@dataclass(frozen=True)
class Survivor:
    """A mutant that no invariant tells apart from the real thing, and why."""

    apply: Callable[[Patch], None]
    reason: str


SURVIVORS: dict[str, Survivor] = {}


def survivor(reason: str) -> Callable[..., Any]:
    """Adds a mutant that stays unnoticed, with the reason."""

    def add(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
        SURVIVORS[apply.__name__.replace("_", " ")] = Survivor(apply, reason)
        return apply

    return add


@survivor(
    "the registry refuses the earlier life before the ledger is asked, in the same event; the "
    "ledger's own check is for a second holder of the database, which other tests have"
)
def the_ledger_does_not_check_the_incarnation(patch: Patch) -> None:
    patch.setattr(MemberTable, "check_incarnation", lambda self, name, _: self.check_known(name))
