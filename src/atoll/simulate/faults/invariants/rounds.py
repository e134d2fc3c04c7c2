"""Rounds: their order, what a freeze leaves behind, and when one may close."""

from dataclasses import asdict, replace

from atoll.simulate.faults.durable import View
from atoll.simulate.faults.invariants.base import ROUNDING_SECONDS, Seen, check
from atoll.strategies.base import Lease, RoundView

_ORDER = ("planned", "open", "frozen", "published")


class RoundsCheck:
    """Follows every round through its life."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._quorum_at: dict[int, float] = {}
        self._open_at: dict[int, float] = {}

    def restarted(self, view: View) -> None:
        """Grace periods, and how long rounds are open, are in memory: they run anew."""
        self._quorum_at.clear()
        self._open_at.clear()
        self._note_quorum(view)

    def changed(self, before: View, after: View) -> None:
        """The rounds moved as they may."""
        if after.differs(before, "rounds"):
            self._check_together(after)
            self._check_order(before, after)
            self._check_fragments(after)
            for number, row in after.rounds.items():
                was = before.rounds.get(number)
                if row.state == "frozen" and (was is None or was.state != "frozen"):
                    seen = self._seen_of(after, number, before)
                    perhaps = self._seen.live(after, number)[1]
                    self._check_freeze(after, seen, replace(seen, live=perhaps))
                    self._check_ended(before, after, seen, perhaps)
        self._note_quorum(after)

    def _note_quorum(self, view: View) -> None:
        for number, row in view.rounds.items():
            if row.state == "open":
                self._open_at.setdefault(number, self._seen.now)
                seen = self._seen_of(view, number, view)
                if view.terms(number).asked.has_quorum(seen):
                    self._quorum_at.setdefault(number, self._seen.now)

    def _seen_of(self, view: View, number: int, before: View) -> RoundView:
        """The round as a closing rule sees it: live is who was heard in time."""
        live, _ = self._seen.live(view, number)
        accepted = {row.worker_id for row in view.accepted(number)}
        given = {row.worker_id for row in before.table("leases").grouped("round").get(number, ())}
        announced = before.table("announcements").grouped("round").get(number, ())
        now = self._seen.now
        return RoundView(
            round=number,
            planned=self._holders(before, number),
            accepted=accepted,
            live=live,
            ended=given - before.holding(number),
            announced={row.worker_id for row in announced},
            open_seconds=now - self._open_at.get(number, now) + ROUNDING_SECONDS,
        )

    def _check_order(self, before: View, after: View) -> None:
        numbers = sorted(after.rounds)
        has_all = before.rounds.keys() <= after.rounds.keys()
        has_no_gap = numbers == list(range(1, len(numbers) + 1))
        check("round-order", has_all and has_no_gap, was=[*before.rounds], became=numbers)
        for number, was in before.rounds.items():
            row = after.rounds[number]
            steps = _ORDER.index(row.state) - _ORDER.index(was.state)
            goes_on = steps in (0, 1) and row.cursor >= was.cursor
            check("round-order", goes_on, was=was, became=row)
        self._check_states([after.rounds[number].state for number in numbers])

    def _check_states(self, states: list[str]) -> None:
        """Published rounds, at most one frozen, those open, and one planned while one is frozen."""
        lead = self._seen.reference.rules.lead
        count = {state: states.count(state) for state in _ORDER}
        in_order = [state for state in reversed(_ORDER) for _ in range(count[state])]
        is_planned = count["planned"] <= count["frozen"] <= 1
        are_few = count["open"] + count["frozen"] <= 1 + lead
        check("round-order", states == in_order and is_planned and are_few, rounds=states)

    def _check_together(self, view: View) -> None:
        for row in view.rounds.values():
            digests = (row.hash, row.master_digest, row.published_digest, row.leaves)
            are_there = {digest is not None for digest in digests}
            check("moves-together", are_there == {row.state == "published"}, round=row)

    def _check_fragments(self, view: View) -> None:
        for number, row in view.rounds.items():
            right = self._seen.reference.carried(number)
            check("fragment-by-rule", row.fragment == right, round=row, right=right)

    def _check_ended(self, before: View, after: View, seen: RoundView, perhaps: set[str]) -> None:
        """What was leased and is not any more, though no contribution has used it, has ended."""
        leased = _leased(before)
        ended = leased - _leased(after)
        strategy = after.terms(seen.round).asked
        right, least = (
            strategy.ended(leased, closing=seen.round, live=live) for live in (seen.live, perhaps)
        )
        if seen.round == max(after.rounds):
            right = least = leased  # nothing is left to fold what they would bring
        is_so = least <= ended <= right
        check("ends-by-rule", is_so, frozen=seen.round, ended=ended, named=right)

    def _check_freeze(self, view: View, *seen_as: RoundView) -> None:
        seen = seen_as[0]
        terms = view.terms(seen.round)
        rounds = terms.manifest.stop.rounds
        last = seen.round + 1 + self._seen.reference.rules.lead
        is_there = last in view.rounds
        is_right = is_there != (0 < rounds < last)
        check("next-is-planned", is_right, frozen=seen.round, next=last, of=rounds)
        seconds = self._seen.now - self._quorum_at.get(seen.round, self._seen.now)
        held = seconds + ROUNDING_SECONDS
        is_due = any(terms.asked.is_due(view_of, seconds=held) for view_of in seen_as)
        rule = terms.manifest.membership
        check("closes-by-rule", is_due, **asdict(seen), seconds_with_quorum=seconds, rule=rule)

    def _holders(self, view: View, number: int) -> set[str]:
        """Workers that hold a lease of an open round, or an older one that the round would fold."""
        open_rounds, rules = view.open_rounds, self._seen.reference.rules
        older = {
            worker_id
            for made_for, worker_id in _leased(view)
            if made_for < number and rules.destination(made_for, open_rounds) == number
        }
        return view.holding(number) | older


def _leased(view: View) -> set[Lease]:
    """Leases that are still to be used."""
    leased = view.table("leases").grouped("state").get("leased", ())
    return {(row.round, row.worker_id) for row in leased}
