"""The present generation, and the refusal of messages that were made in an earlier one.

The ledger makes generations; this is a copy of its newest one that is cheap to look at.
"""

from atoll.errors import StaleGeneration
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import GenerationRecord


class Generations:
    """A copy of the ledger's newest generation. Thread-safe: the copy is replaced whole."""

    def __init__(self, ledger: Ledger) -> None:
        with ledger.reading() as t:
            self._current = t.members.generation()

    @property
    def current(self) -> GenerationRecord:
        """Who is in, by rank."""
        return self._current

    def renew(self, current: GenerationRecord) -> None:
        """The membership has changed, and this is the ledger's newest generation."""
        self._current = current

    def check(self, number: int) -> GenerationRecord:
        """The present generation, if it is the message's; else StaleGeneration with its number."""
        current = self._current
        if number != current.number:
            raise StaleGeneration(
                f"generation={number} is not the present one, which is {current.number}: a worker "
                f"joined, left or was evicted; repeat the message in generation {current.number}, "
                f"and ask /training/ready where ranks and addresses matter",
                present=current.number,
            )
        return current
