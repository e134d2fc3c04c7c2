"""Mutants of the island's own code: what it says, keeps and makes of an answer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
from torch import Tensor

from atoll.codecs import feedback
from atoll.island.conversation import hand_in
from atoll.island.conversation.hand_in import Fresh, HandIn
from atoll.island.conversation.intents import Steps
from atoll.island.conversation.rounds import Rounds
from atoll.island.conversation.session import Session
from atoll.island.conversation.standing import Standing
from atoll.island.conversation.transfers import Settled, Transfers
from atoll.island.state import encoding
from atoll.island.state.base import Saved
from atoll.island.state.continuity import Captured, Continuity
from atoll.island.state.encoding import Encoded, Feedback
from atoll.island.state.local_weights import FlatWeights
from atoll.island.state.weights import IslandWeights, Staged
from atoll.layout import Span
from atoll.simulate.faults.scenario import Scenario
from tests.faults.mutants.mutant import (
    STREAMING,
    Mutant,
    Patch,
    adding_to,
    answering,
    feeding,
    having,
    streaming,
)

MUTANTS: list[Mutant] = []
mutant = adding_to(MUTANTS)


def nothing(*_: Any, **__: Any) -> Steps[None]:
    """Steps that do nothing."""
    yield from ()


def in_fragments(scenario: Scenario) -> bool:
    """Seeds whose islands hand in one fragment at a time, and carry what rounding lost."""
    return feeding()(scenario) and streaming(num_fragments=2)(scenario)


def ahead(*kinds: str, rounds: int = 1) -> Callable[[Scenario], bool]:
    """Seeds whose islands train on for so many whole rounds while a contribution travels."""

    def wanted(scenario: Scenario) -> bool:
        if not streaming(*kinds)(scenario):
            return False
        settings = scenario.settings
        steps = settings["sync_every"] // settings["num_fragments"]
        return bool(settings["delay_steps"] >= rounds * steps)

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

    def resume(self: Continuity, **known: int) -> list[Saved]:
        real(self, **known)
        self._store.discard_pending()
        return []

    patch.setattr(Continuity, "resume", resume)


@mutant("pending-is-resent", having("kill worker"))
def what_an_earlier_life_has_not_sent_is_left(patch: Patch) -> None:
    real = Continuity.resume

    def resume(self: Continuity, **known: int) -> list[Saved]:
        real(self, **known)
        return []

    patch.setattr(Continuity, "resume", resume)


@mutant("residual-carried", feeding("stop worker"))
def a_residual_is_promoted_by_a_refusal(patch: Patch) -> None:
    real = Continuity.roll_back

    def roll_back(self: Continuity) -> None:
        after = None if self._residual is None else self._residual.clone()
        real(self)
        self._residual = after

    patch.setattr(Continuity, "roll_back", roll_back)


@mutant("residual-carried", feeding())
def a_contribution_leaves_the_residual_as_it_was(patch: Patch) -> None:
    real = Continuity.feedback

    @contextmanager
    def fed(self: Continuity, path: Path, number: int) -> Iterator[Feedback | None]:
        with real(self, path, number) as feed:
            yield feed
        self._residual, self._next_residual = self._next_residual, self._residual

    patch.setattr(Continuity, "feedback", fed)


@mutant("residual-carried", feeding("kill worker"))
def a_residual_does_not_survive_its_process(patch: Patch) -> None:
    real = Continuity._adopt

    def adopt(self: Continuity, saved: Saved) -> None:
        real(self, replace(saved, meta={**saved.meta, "residual": False}))

    patch.setattr(Continuity, "_adopt", adopt)


@mutant("residual-stated", feeding())
def the_norm_is_of_the_residual_before_the_contribution(patch: Patch) -> None:
    real = encoding.encode

    def encode(*args: Any, feed: Feedback | None, **more: Any) -> Encoded:
        before = None if feed is None else feed.before.clone()
        with pytest.MonkeyPatch.context() as inner:
            norm = feedback.residual_norm
            inner.setattr(
                feedback, "residual_norm", lambda after: norm(after if before is None else before)
            )
            return real(*args, feed=feed, **more)

    patch.setattr(encoding, "encode", encode)


@mutant("residual-stated", in_fragments, STREAMING)
def the_norm_is_of_the_fragment_that_is_handed_in(patch: Patch) -> None:
    real = encoding.encode

    def encode(staged: Staged, *args: Any, **more: Any) -> Encoded:
        with pytest.MonkeyPatch.context() as inner:
            norm, part = feedback.residual_norm, staged.fragment
            inner.setattr(feedback, "residual_norm", lambda after: norm(part.of(after)))
            return real(staged, *args, **more)

    patch.setattr(encoding, "encode", encode)


@mutant("residual-stated", feeding())
def no_contribution_says_what_it_carries(patch: Patch) -> None:
    _carrying(patch, lambda _: 0)


@mutant("residual-stated", feeding("stop worker"))
def a_contribution_says_that_it_carries_the_round_before(patch: Patch) -> None:
    """Also after a round that it had no part in."""
    _carrying(patch, lambda number: number - 1)


@mutant("residual-stated", feeding("kill worker"))
def what_is_carried_is_forgotten_with_the_process(patch: Patch) -> None:
    real = Continuity._adopt

    def adopt(self: Continuity, saved: Saved) -> None:
        real(self, saved)
        self._carried = 0

    patch.setattr(Continuity, "_adopt", adopt)


@mutant("residual-stated", feeding("stop worker"))
def a_refused_contribution_counts_as_carried(patch: Patch) -> None:
    real = Continuity.roll_back

    def roll_back(self: Continuity) -> None:
        refused = self._carried
        real(self)
        self._carried = refused

    patch.setattr(Continuity, "roll_back", roll_back)


def _carrying(patch: Patch, said: Callable[[int], int]) -> None:
    """Of a contribution to a round, what it says that it carries."""
    real = Continuity.feedback

    @contextmanager
    def fed(self: Continuity, path: Path, number: int) -> Iterator[Feedback | None]:
        with real(self, path, number) as feed:
            yield None if feed is None else replace(feed, carried=said(number))

    patch.setattr(Continuity, "feedback", fed)


@mutant("inner-state-kept", having("stop worker"))
def a_refusal_leaves_the_inner_state_as_it_is(patch: Patch) -> None:
    patch.setattr(Continuity, "roll_back", lambda self: self._store.discard_pending())


@mutant("inner-state-kept", having("kill worker"))
def a_restarted_island_begins_with_fresh_inner_state(patch: Patch) -> None:
    def resume(self: Continuity, **_: Any) -> list[Saved]:
        return [self._store.pending(number) for number in self._store.rounds()[1]]

    patch.setattr(Continuity, "resume", resume)


@mutant("generation-adopted")
def a_stale_generation_is_never_adopted(patch: Patch) -> None:
    patch.setattr(Standing, "told", answering(None))


@mutant("evicted-comes-back")
def an_eviction_is_not_answered_by_registering_again(patch: Patch) -> None:
    patch.setattr(Session, "_come_back", nothing)


# Several hand-ins under way


@mutant("pending-is-resent", ahead("stop worker", rounds=2), STREAMING)
def a_refusal_keeps_later_hand_ins(patch: Patch) -> None:
    def send(self: Transfers, made: HandIn) -> Steps[None]:
        accepted = yield from hand_in.contribute(self._session, self._continuity, made)
        with self._changing():
            if self._queue and self._queue[0] is made:
                self._queue.popleft()
                self.under_way = self.under_way[1:]
                self._accepted += (made.round,) if accepted else ()
                self._is_refused = self._is_refused or not accepted

    patch.setattr(Transfers, "_send", send)


@mutant("pending-is-resent", streaming(), STREAMING)
def an_island_asks_on_whatever_is_under_way(patch: Patch) -> None:
    real = Transfers.settle

    def settle(self: Transfers, *, most: int) -> Steps[Settled]:
        return real(self, most=most + 9)

    patch.setattr(Transfers, "settle", settle)


@mutant("residual-carried", ahead(), STREAMING)
def training_moves_what_is_handed_in_already(patch: Patch) -> None:
    real = hand_in.prepare

    def prepare(*args: Any, **more: Any) -> Fresh:
        return real(*args, **{**more, "copies": False})

    patch.setattr(hand_in, "prepare", prepare)


@mutant("residual-carried", ahead(rounds=2), STREAMING)
def what_is_handed_in_behind_others_is_not_copied(patch: Patch) -> None:
    """It waits for them, and so does the training, but not until it is encoded."""
    real, init = hand_in.prepare, Transfers.__init__
    transfers: dict[int, Transfers] = {}

    def remembered(self: Transfers, session: Session, *args: Any) -> None:
        init(self, session, *args)
        transfers[id(session)] = self

    def prepare(session: Session, *args: Any, **more: Any) -> Fresh:
        waits = len(transfers[id(session)].under_way) >= session.adopted.asked.in_flight
        return real(session, *args, **{**more, "copies": not waits})

    patch.setattr(Transfers, "__init__", remembered)
    patch.setattr(hand_in, "prepare", prepare)


# Local weights that live on


@mutant("local-by-rule", streaming("kill worker", delay_steps=1), STREAMING)
def local_weights_are_saved_as_nothing(patch: Patch) -> None:
    real = Continuity.capture

    def capture(self: Continuity, *, local: Tensor | None = None, **more: Any) -> Captured:
        lost = None if local is None else local.zero_()
        return real(self, local=lost, **more)

    patch.setattr(Continuity, "capture", capture)


@mutant("local-by-rule", streaming("kill worker"), STREAMING)
def local_weights_of_an_earlier_life_are_not_taken_up(patch: Patch) -> None:
    def go_on_from(self: IslandWeights, _: Tensor | None, *, merged: int) -> None:
        self.merged = merged

    patch.setattr(IslandWeights, "go_on_from", go_on_from)


@mutant("sends-what-it-was-given", streaming("kill worker", num_fragments=2), STREAMING)
def a_restarted_island_forgets_where_it_set_out(patch: Patch) -> None:
    real = Continuity._adopt

    def adopt(self: Continuity, saved: Saved) -> None:
        real(self, saved)
        if self._course:
            self._course["began"] = self._course["trained"] + 1

    patch.setattr(Continuity, "_adopt", adopt)


@mutant("local-by-rule", streaming("stop worker"), STREAMING)
def a_refused_island_trains_on_from_its_own_weights(patch: Patch) -> None:
    real = IslandWeights.reset
    set_out: WeakSet[IslandWeights] = WeakSet()

    def reset(self: IslandWeights) -> None:
        if self not in set_out:
            set_out.add(self)
            real(self)

    patch.setattr(IslandWeights, "reset", reset)


@mutant("local-by-rule", streaming(), STREAMING)
def a_round_is_merged_one_too_late(patch: Patch) -> None:
    real = Rounds._merge_all
    patch.setattr(Rounds, "_merge_all", lambda self, last: real(self, last - 1))


@mutant("local-by-rule", streaming(local_weight=0.25), STREAMING)
def a_merge_weighs_its_own_values_as_the_published(patch: Patch) -> None:
    real = FlatWeights.merge

    def merge(self: FlatWeights, published: Tensor | None, span: Span, *, own: float) -> None:
        real(self, published, span, own=1.0 - own if own else own)

    patch.setattr(FlatWeights, "merge", merge)


@mutant("local-by-rule", streaming(num_fragments=2), STREAMING)
def a_merge_takes_the_whole_model_in(patch: Patch) -> None:
    real = FlatWeights.merge

    def merge(self: FlatWeights, published: Tensor | None, span: Span, *, own: float) -> None:
        real(self, published, Span(0, self._layout.size), own=own)
        assert len(span)

    patch.setattr(FlatWeights, "merge", merge)
