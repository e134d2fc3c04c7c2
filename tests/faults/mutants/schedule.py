"""Mutants of the strategies' own answers: what is merged when, contained, carried and taken.

Coordinator, island and proofs ask the same strategy, so only rules that are written down a second
time see that it answers wrongly.
"""

from collections.abc import Sequence
from typing import Any

from atoll.island.state.weights import IslandWeights
from atoll.simulate.faults.scenario import Scenario
from atoll.strategies.base import ALL
from atoll.strategies.diloco.asynchronous import Asynchronous
from atoll.strategies.diloco.streaming import Streaming
from atoll.strategies.diloco.sync import Sync
from tests.faults.mutants.mutant import (
    ASYNC,
    STREAMING,
    Mutant,
    Patch,
    adding_to,
    having,
    streaming,
)

MUTANTS: list[Mutant] = []
mutant = adding_to(MUTANTS)


def _has_two_in_flight(scenario: Scenario) -> bool:
    settings = scenario.settings
    return bool(settings["delay_steps"] * settings["num_fragments"] > settings["sync_every"])


def _due(patch: Patch, later: int) -> None:
    """A round is merged so many steps too late."""
    real = Streaming.due

    def due(self: Streaming, round_number: int, step: int) -> Sequence[int]:
        return real(self, round_number, step - later)

    patch.setattr(Streaming, "due", due)


@mutant("local-by-rule", streaming(delay_steps=1), STREAMING)
def a_round_is_merged_a_step_too_early(patch: Patch) -> None:
    _due(patch, -1)


@mutant("local-by-rule", streaming(delay_steps=1), STREAMING)
def a_round_is_merged_a_step_too_late(patch: Patch) -> None:
    _due(patch, 1)


@mutant("local-by-rule", streaming(delay_steps=1), STREAMING)
def a_round_is_merged_when_it_arrives(patch: Patch) -> None:
    real = IslandWeights.arrived

    def arrived(self: IslandWeights, header: Any, number: int, found: Any) -> None:
        real(self, header, number, found)
        if number != ALL and header.round == self.merged + 1:
            self.merge(header.round)

    patch.setattr(IslandWeights, "arrived", arrived)


@mutant("local-by-rule", streaming(delay_steps=1), STREAMING)
def a_round_is_merged_at_the_end_of_the_next(patch: Patch) -> None:
    patch.setattr(Streaming, "due", Sync.due)


@mutant("sends-what-it-was-given", streaming("kill worker", num_fragments=2), STREAMING)
def a_contribution_claims_rows_from_before_its_island_set_out(patch: Patch) -> None:
    real = Streaming.first
    patch.setattr(Streaming, "first", lambda self, number, _: max(1, real(self, number, 0)))


@mutant("fragment-by-rule", streaming(num_fragments=2), STREAMING)
def the_last_round_carries_one_fragment(patch: Patch) -> None:
    real = Streaming.fragment
    patch.setattr(
        Streaming, "fragment", lambda self, number, **_: real(self, number, is_last=False)
    )
    patch.setattr(Streaming, "may_end", lambda *_: True)


@mutant("next-is-planned", _has_two_in_flight, STREAMING)
def one_round_too_few_is_open(patch: Patch) -> None:
    patch.setattr(Streaming, "lead", property(lambda _: 1))


@mutant("accepted-in-open-round", having("slow worker"), ASYNC)
def the_newest_open_round_takes_what_comes(patch: Patch) -> None:
    real = Asynchronous.destination

    def destination(self: Asynchronous, made_for: int, open_rounds: Sequence[int]) -> int | None:
        return real(self, made_for, open_rounds[-1:])

    patch.setattr(Asynchronous, "destination", destination)
