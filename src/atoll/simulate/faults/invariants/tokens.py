"""Tokens: what the learning rate of a round starts from is settled by its plan, or by a lease."""

from atoll.protocol.messages import Assignment, AssignmentRequest
from atoll.simulate.faults.durable import View
from atoll.simulate.faults.invariants.base import Seen, check
from atoll.simulate.faults.scenario import BLOCK


class TokensCheck:
    """Counts once more what was folded, and what is leased in the rounds between."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen

    def changed(self, before: View, after: View) -> None:
        """Rounds were planned, or rows given to who asked."""
        if not after.differs(before, "rounds"):
            return
        for number, row in after.rounds.items():
            was = before.rounds.get(number)
            if was is None:
                right = _folded(after) + _between(before, after, number)
                check("tokens-by-plan", row.tokens == right, planned=row, right=right)
            elif was.tokens != row.tokens:
                asked = self._seen.call and isinstance(self._seen.call.message, AssignmentRequest)
                right = _folded(after)
                is_so = asked and row.tokens == right
                check("tokens-by-plan", is_so, was=was, became=row, right=right)

    def told(self, given: Assignment, view: View) -> None:
        """A worker was told to train."""
        recorded = view.rounds[given.round or 0].tokens
        is_so = given.global_tokens == recorded
        check("tokens-by-plan", is_so, told=given.global_tokens, recorded=recorded)


def _closed(view: View) -> int:
    """The newest round that is frozen or published."""
    closed = (n for n, row in view.rounds.items() if row.state in ("frozen", "published"))
    return max(closed, default=0)


def _folded(view: View) -> int:
    last = _closed(view)
    return sum(row.tokens for row in view.contributions.values() if row.applied <= last)


def _between(before: View, after: View, number: int) -> int:
    """Tokens of leases in rounds that are open, or planned with this one, before it."""
    found = 0
    for earlier in range(_closed(after) + 1, number):
        view = before if earlier in before.rounds else after
        leases = view.table("leases").grouped("round").get(earlier, ())
        held = [lease for lease in leases if lease.state in ("leased", "done")]
        found += sum(lease.stop - lease.start for lease in held) * BLOCK
    return found
