"""Mutants of the island's own code: what it says, keeps and makes of an answer."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from atoll.island.conversation import hand_in
from atoll.island.conversation.intents import Steps
from atoll.island.conversation.rounds import Rounds
from atoll.island.conversation.session import Session
from atoll.island.conversation.standing import Standing
from atoll.island.state.base import Saved
from atoll.island.state.continuity import Continuity
from atoll.simulate.faults.scenario import Scenario
from tests.faults.mutants.mutant import Mutant, Patch, adding_to, answering, having

MUTANTS: list[Mutant] = []
mutant = adding_to(MUTANTS)


def nothing(*_: Any, **__: Any) -> Steps[None]:
    """Steps that do nothing."""
    yield from ()


def feeding(*kinds: str) -> Callable[[Scenario], bool]:
    """Seeds whose islands carry what rounding lost, with these kinds of faults."""

    def wanted(scenario: Scenario) -> bool:
        upload = scenario.settings["upload"]
        return (
            having(*kinds)(scenario)
            and upload["codec"] != "fp32"
            and bool(upload["error_feedback"])
        )

    return wanted


@mutant("sends-what-it-was-given")
def a_contribution_is_made_for_the_round_after_its_own(patch: Patch) -> None:
    real = hand_in.header_of

    def header_of(*args: Any, **more: Any) -> Any:
        header = real(*args, **more)
        return replace(header, round=header.round + 1)

    patch.setattr(hand_in, "header_of", header_of)


@mutant("sends-what-it-was-given", having("outer lr"))
def an_old_manifest_is_kept(patch: Patch) -> None:
    def adopt(*_: Any) -> Steps[bool]:
        yield from ()
        return True

    patch.setattr(Rounds, "_adopt", adopt)


@mutant("pending-is-resent", having("kill worker"))
def a_pending_frame_is_dropped_before_its_receipt(patch: Patch) -> None:
    real = Continuity.resume

    def resume(self: Continuity, **known: int) -> Saved | None:
        real(self, **known)
        self._store.discard_pending()
        return None

    patch.setattr(Continuity, "resume", resume)


@mutant("pending-is-resent", having("kill worker"))
def what_an_earlier_life_left_is_not_taken_up(patch: Patch) -> None:
    patch.setattr(hand_in, "resume", nothing)


@mutant("residual-carried", feeding("stop worker"))
def a_residual_is_promoted_by_a_refusal(patch: Patch) -> None:
    real = Continuity.roll_back

    def roll_back(self: Continuity) -> None:
        after = None if self._next_residual is None else self._next_residual.clone()
        real(self)
        self._residual = after

    patch.setattr(Continuity, "roll_back", roll_back)


@mutant("residual-carried", feeding())
def a_receipt_promotes_no_residual(patch: Patch) -> None:
    patch.setattr(Continuity, "promote", lambda self, number: self._store.promote(number))


@mutant("residual-carried", feeding("kill worker"))
def a_residual_does_not_survive_its_process(patch: Patch) -> None:
    real = Continuity._adopt

    def adopt(self: Continuity, saved: Saved) -> None:
        real(self, replace(saved, meta={**saved.meta, "residual": False}))

    patch.setattr(Continuity, "_adopt", adopt)


@mutant("inner-state-kept", having("stop worker"))
def a_refusal_leaves_the_inner_state_as_it_is(patch: Patch) -> None:
    patch.setattr(Continuity, "roll_back", lambda self: self._store.discard_pending())


@mutant("inner-state-kept", having("kill worker"))
def a_restarted_island_begins_with_fresh_inner_state(patch: Patch) -> None:
    def resume(self: Continuity, **_: Any) -> Saved | None:
        return self._store.pending()

    patch.setattr(Continuity, "resume", resume)


@mutant("generation-adopted")
def a_stale_generation_is_never_adopted(patch: Patch) -> None:
    patch.setattr(Standing, "told", answering(None))


@mutant("evicted-comes-back")
def an_eviction_is_not_answered_by_registering_again(patch: Patch) -> None:
    patch.setattr(Session, "_come_back", nothing)
