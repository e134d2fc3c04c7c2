"""The strategy seam: pure questions about a run, which coordinator, island and proofs ask.

A strategy is a frozen value made from a manifest (`registry.of`). It decides who trains what, which
part of the model a round carries, when a round closes and how its contributions move the weights.
Every strategy answers `AnyStrategy`; those that train in rounds of contributions answer `Strategy`.
It knows no ledger, clock, network or file: what it needs to know is an argument, so the same
question has the same answer live, in replay and in a proof. Whoever asks must not look behind the
answer: no other module knows which strategy it is talking to.
"""

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from atoll.layout import Fragment, Layout, Span, cut
from atoll.strategies.bundle import Bundle
from atoll.strategies.outer import OuterStep
from atoll.wire.header import FrameHeader

ALL = -1  # in place of a fragment's number: the whole model


@dataclass(frozen=True, slots=True)
class RoundView:
    """What a closing rule may know about an open round."""

    round: int
    planned: Set[str]  # workers with a lease of the round, or an older one that it would fold
    accepted: Set[str]  # workers whose contribution this round will fold
    live: Set[str]
    ended: Set[str] = frozenset()  # whose lease of it ended without a contribution
    announced: Set[str] = frozenset()  # whose contribution is ready to be pulled, or was
    open_seconds: float = 0.0  # how long it has been open, as far as this process knows


Lease = tuple[int, str]  # the round it was given for, and the worker_id


class AnyStrategy(Protocol):
    """One way to train a model together: what is asked of every one."""

    @property
    def by_step(self) -> bool:
        """Whether ranks meet at every step; else islands hand in contributions round by round."""

    @property
    def lead(self) -> int:
        """How many rounds are open beyond the one that closes next; the same for the whole run.

        So rounds 1 to 1 + lead are open from the start, and publishing round r opens r + 1 + lead.
        """

    @property
    def dials(self) -> bool:
        """Whether islands dial each other; others only dial out, so they work behind NAT."""

    @property
    def gathers(self) -> bool:
        """Whether contributions lie in buckets, from which everybody folds them.

        Then islands publish there what they hand in, and a version travels as its contributions.
        """

    @property
    def fixed(self) -> Collection[str]:
        """Settings, by their dotted names, that no manifest version may change in such a run.

        Beside those that are fixed in every run.
        """

    @property
    def rows_each(self) -> int:
        """The most rows that a round leases in one worker's name."""

    def cut(self, layout: Layout) -> Sequence[Sequence[str]]:
        """The names of each fragment's tensors: a pure function of names and sizes.

        The run's layout holds its tensors in this order, whatever order the model has them in.
        """


class Strategy(AnyStrategy, Protocol):
    """One that trains in rounds of contributions."""

    @property
    def in_flight(self) -> int:
        """How many hand-ins of an island may be without an answer while it trains on."""

    @property
    def keeps_local(self) -> bool:
        """Whether an island's own weights live on from round to round.

        Then it saves them with every hand-in: killed, it needs them to go on as if it had paused.
        """

    @property
    def local_weight(self) -> float:
        """What an island's own values weigh in a merge, from 0 (takes the published) to below 1.

        local = local_weight * local + (1 - local_weight) * published
        """

    # The model

    def fragment(self, round_number: int, *, is_last: bool) -> int:
        """Which fragment the round carries, or ALL; asked when it is planned, then recorded.

        `is_last`: by what is known at the plan, the run ends with it.
        """

    def may_end(self, fragment: int) -> bool:
        """Whether a run may end with a round that carries `fragment`; else one more is planned."""

    # Who trains what

    def rows(
        self, round_number: int, live: Collection[str], speeds: Mapping[str, float]
    ) -> dict[str, int]:
        """How many rows each of the `live` islands is leased in the round; who is not named, none.

        `speeds` are tokens per second, of those whose speed is known.
        """

    def asked(
        self, version: int, open_rounds: Collection[int], folding: Collection[int]
    ) -> int | None:
        """The round of which an island that asks is given rows now; None: it is given none.

        It holds the newest `version` and has no rows to train; `folding` are the rounds that are to
        fold a contribution of it and are not published. One for the round that is said must be
        among them, if there is one: rows are never given twice for one contribution.
        """

    def piece(self, worker_id: str, speeds: Callable[[], Mapping[str, float]]) -> int:
        """How many rows an island is leased that asks; `speeds` gives those of live islands."""

    def abreast(self, holding: int) -> int:
        """How many islands' tokens an island's learning rate counts for each step of its own.

        `holding` islands have rows of its round by now.
        """

    def needs(self, round_number: int) -> int:
        """The version that an island must have merged before it begins the round."""

    def first(self, round_number: int, began: int) -> int:
        """The first round whose rows are in a contribution made for `round_number`.

        The island that made it set out from published weights at the start of round `began`.
        """

    def due(self, round_number: int, step: int) -> Sequence[int]:
        """Rounds that an island merges after `step` steps of the round, in this order.

        Asked after every step. The island waits until they are published, so what it computes
        depends on no clock.
        """

    # Rounds

    def destination(self, made_for: int, open_rounds: Sequence[int]) -> int | None:
        """The round that takes a contribution made for `made_for`; None: none does, it is stale.

        `open_rounds` are those that accept contributions, oldest first.
        """

    def weight(self, *, tokens: int) -> int:
        """The weight with which a mean takes in a contribution over so many tokens."""

    def factor(self, *, staleness: int, tokens: int) -> float:
        """What a step that takes contributions one by one multiplies this one by, an fp32 number.

        It was made so many rounds before the one that folds it, over so many tokens.
        """

    def has_quorum(self, view: RoundView) -> bool:
        """Whether enough contributions are in for the grace period of the round to run."""

    def is_due(self, view: RoundView, *, seconds: float) -> bool:
        """Whether the round closes now; it has had its quorum for so many `seconds`."""

    def waiting_for(self, view: RoundView) -> Set[str]:
        """Live workers whose contribution the round still waits for."""

    def reserves(self, view: RoundView) -> Sequence[str]:
        """Workers of the round that step in for others, in order; the others are its primaries.

        Where islands publish: only what `waiting_for` says now is pulled.
        """

    def places(self, view: RoundView) -> int:
        """How many more contributions the round takes, counting those being pulled."""

    def is_short(self, view: RoundView) -> bool:
        """Whether the round cannot close by itself, so that a live island must be added to it."""

    def ended(
        self, leases: Collection[Lease], *, closing: int, live: Collection[str]
    ) -> set[Lease]:
        """Which of the `leases` that no contribution has used end when round `closing` freezes."""

    # Weights

    def bundle(self, layout: Layout, contributions: int) -> Bundle | None:
        """What a version made of so many contributions travels in, where it travels as these.

        None: it travels as weights, or as an update of them.
        """

    def bundle_in(self, header: FrameHeader, layout: Layout) -> Bundle | None:
        """What the frame under `header` carries; None: no such one. FrameError where it cannot."""

    @property
    def follows(self) -> bool:
        """Whether islands come back several versions later, so that updates are kept for them."""

    def evaluators(
        self, asks: str, planned: Sequence[str], live: Collection[str], *, is_last: bool
    ) -> Sequence[str]:
        """Who shares the held-out rows of a version, for which `asks` is the first to ask.

        `planned` have rows of the newest round, by worker_id; `is_last`: the run ends with it, and
        only then `live` is filled in.
        """

    def outer(self, round_number: int, ticks_before: int) -> OuterStep:
        """The outer step of the round; `ticks_before` counts the contributions of rounds before."""


@dataclass(frozen=True)
class Fragments:
    """A run's layout with its fragments: what a round's number means in the flat buffer."""

    layout: Layout
    parts: tuple[Fragment, ...]

    @classmethod
    def of(cls, strategy: AnyStrategy, layout: Layout) -> "Fragments":
        """The fragments of a run's `layout`, which holds its tensors in their order."""
        return cls(layout, cut(layout, strategy.cut(layout)))

    def __getitem__(self, number: int) -> Fragment:
        """The fragment of that number; for ALL the whole layout."""
        if number == ALL:
            return Fragment(self.layout, Span(0, self.layout.size))
        return self.parts[number]


def run_layout(strategy: AnyStrategy, model: Layout) -> Layout:
    """The layout of a run over `model`: its tensors in the order of the strategy's fragments."""
    return model.ordered(name for part in strategy.cut(model) for name in part)
