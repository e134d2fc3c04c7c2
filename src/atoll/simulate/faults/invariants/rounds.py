"""Rounds: their order, what a freeze leaves behind, and when one may close."""

from atoll.simulate.faults.asked import Asked
from atoll.simulate.faults.durable import View
from atoll.simulate.faults.invariants.base import ROUNDING_SECONDS, Seen, Violation
from atoll.strategies.base import Lease, RoundView

_ORDER = ("planned", "open", "frozen", "published")


class RoundsCheck:
    """Follows every round through its life."""

    def __init__(self, seen: Seen, asked: Asked) -> None:
        self._seen = seen
        self._asked = asked
        self._quorum_at: dict[int, float] = {}

    def restarted(self, view: View, *, now: float) -> None:
        """Grace periods are in memory: they run anew."""
        self._quorum_at.clear()
        self._note_quorum(view, now=now)

    def changed(self, before: View, after: View, *, now: float) -> None:
        """The rounds moved as they may."""
        if after.differs(before, "rounds"):
            self._check_together(after)
            self._check_order(before, after)
            self._check_fragments(after)
            for number, row in after.rounds.items():
                was = before.rounds.get(number)
                if row["state"] == "frozen" and (was is None or was["state"] != "frozen"):
                    self._check_freeze(after, number, before.holding(number), now=now)
                    self._check_ended(before, after, number, now=now)
        self._note_quorum(after, now=now)

    def _note_quorum(self, view: View, *, now: float) -> None:
        for number, row in view.rounds.items():
            if row["state"] == "open":
                seen = self._seen_of(view, number, view.holding(number), now=now)
                if self._asked.strategy_of(view, number).has_quorum(seen):
                    self._quorum_at.setdefault(number, now)

    def _seen_of(self, view: View, number: int, held: set[str], *, now: float) -> RoundView:
        """The round as a closing rule sees it: live is who was heard in time."""
        timeout = self._asked.manifest(view, number).heartbeat_timeout - ROUNDING_SECONDS
        live = {
            worker_id
            for worker_id, row in view.workers.items()
            if row["active"] and self._seen.silence(worker_id, now=now) < timeout
        }
        accepted = {row["worker_id"] for row in view.accepted(number)}
        return RoundView(round=number, planned=held, accepted=accepted, live=live)

    def _check_order(self, before: View, after: View) -> None:
        numbers = sorted(after.rounds)
        if numbers != list(range(1, len(numbers) + 1)):
            raise Violation("round-order", f"the ledger has rounds {numbers}")
        for number, was in before.rounds.items():
            row = after.rounds.get(number)
            if row is None:
                raise Violation("round-order", f"round {number} vanished")
            steps = _ORDER.index(row["state"]) - _ORDER.index(was["state"])
            if not (steps in (0, 1) and row["cursor"] >= was["cursor"]):
                raise Violation(
                    "round-order",
                    f"round {number} went from {was['state']} to {row['state']}, its cursor from "
                    f"{was['cursor']} to {row['cursor']}",
                )
        self._check_states([after.rounds[number]["state"] for number in numbers], after)

    def _check_states(self, states: list[str], view: View) -> None:
        """Published rounds, at most one frozen, those open, and one planned while one is frozen."""
        lead = self._asked.strategy_of(view, max(1, len(states))).lead
        count = {state: states.count(state) for state in _ORDER}
        in_order = [state for state in reversed(_ORDER) for _ in range(count[state])]
        if not (
            states == in_order
            and count["planned"] <= count["frozen"] <= 1
            and count["open"] <= 1 + lead - count["frozen"]
        ):
            raise Violation("round-order", f"the rounds are {states}")

    def _check_together(self, view: View) -> None:
        for number, row in view.rounds.items():
            digests = (row["hash"], row["master_digest"], row["published_digest"], row["leaves"])
            is_published = row["state"] == "published"
            if any((digest is not None) != is_published for digest in digests):
                raise Violation(
                    "moves-together", f"round {number} is {row['state']} with digests {digests[:3]}"
                )

    def _check_fragments(self, view: View) -> None:
        for number, row in view.rounds.items():
            right = self._asked.strategy_of(view, number).fragment(number)
            if row["fragment"] != right:
                raise Violation(
                    "fragment-by-rule",
                    f"round {number} records fragment {row['fragment']}, the strategy says {right}",
                )

    def _check_ended(self, before: View, after: View, closing: int, *, now: float) -> None:
        """What was leased and is not any more, though no contribution has used it, has ended."""
        leased, left = _leased(before), _leased(after)
        seen = self._seen_of(after, closing, before.holding(closing), now=now)
        strategy = self._asked.strategy_of(after, closing)
        right = strategy.ended(leased, closing=closing, live=seen.live)
        if leased - left != right:
            raise Violation(
                "ends-by-rule",
                f"the freeze of round {closing} ended {sorted(leased - left)}, named are "
                f"{sorted(right)}",
            )

    def _check_freeze(self, view: View, number: int, held: set[str], *, now: float) -> None:
        seen = self._seen_of(view, number, held, now=now)
        strategy, manifest = (
            self._asked.strategy_of(view, number),
            self._asked.manifest(view, number),
        )
        last = number + 1 + strategy.lead
        if (0 < manifest.stop.rounds < last) == (last in view.rounds):
            raise Violation(
                "next-is-planned",
                f"round {number} of {manifest.stop.rounds} froze, the ledger has "
                f"{sorted(view.rounds)}",
            )
        seconds = now - self._quorum_at.get(number, now)
        if not strategy.is_due(seen, seconds=seconds + ROUNDING_SECONDS):
            raise Violation(
                "closes-by-rule",
                f"round {number} closed with {seen}, after {seconds:.3f} s with a quorum, under "
                f"{manifest.membership}",
            )


def _leased(view: View) -> set[Lease]:
    """Leases that are still to be used."""
    return {(row["round"], row["worker_id"]) for row in view.leases if row["state"] == "leased"}
