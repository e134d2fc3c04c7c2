"""Several datasets as one: their rows are planned by weight, each in its own row sequence.

Owns that they fit together and how their rows take turns in a round. Which rows a round has is
`plan`'s matter.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from atoll.data import base, numbered
from atoll.data.base import Dataset, Identity, Row
from atoll.data.parts import MIXTURE
from atoll.errors import ConfigError, StateDamaged
from atoll.rows import RowRange

MAX_PARTS = 256


@dataclass(frozen=True)
class NamedDataset:
    """One dataset of a mixture."""

    name: str
    weight: int
    dataset: Dataset


class Mixture:
    """Datasets of the same block and vocabulary; fulfils `base.Dataset`.

    Numbered as a whole, its rows are those of the first part, then those of the second, and so on;
    held-out rows likewise. With a stream among the parts it has no last row, and no row of a part
    after the stream has a number. Training does not use these numbers: it takes rows of each part.
    """

    def __init__(self, named: Sequence[NamedDataset]) -> None:
        if not 1 <= len(named) <= MAX_PARTS:
            raise ConfigError(f"[[data]] stands {len(named)} times; it must be 1 to {MAX_PARTS}")
        first = named[0]
        for one in named:
            for field in ("block", "vocab"):
                mine, theirs = getattr(one.dataset, field), getattr(first.dataset, field)
                if mine != theirs:
                    raise ConfigError(
                        f"data.{field}={mine} of {one.name!r} is not {theirs}, which "
                        f"{first.name!r} has; datasets of one run share block and vocab"
                    )
        self.named = tuple(named)
        self.block, self.vocab = first.dataset.block, first.dataset.vocab
        counts = [one.dataset.rows for one in named]
        self.rows = sum(counts) if all(counts) else 0
        self.held_out_rows = sum(one.dataset.held_out_rows for one in named)
        self.parts = {base.dataset_id(one.dataset.identity()): one.dataset for one in named}
        if len({one.name for one in named}) < len(named) or len(self.parts) < len(named):
            raise ConfigError(
                f"datasets {[one.name for one in named]} are not all different in name and data"
            )

    def identity(self) -> Identity:
        return {
            "kind": MIXTURE,
            **base.shape(self),
            "datasets": [
                {"name": one.name, "weight": one.weight, "identity": one.dataset.identity()}
                for one in self.named
            ],
        }

    def row(self, index: int) -> Row:
        if self.rows:
            base.check_index(index, self.rows, what="row")
        for one in self.named:
            if not one.dataset.rows or index < one.dataset.rows:
                return one.dataset.row(index)
            index -= one.dataset.rows
        raise AssertionError(index)

    def held_out(self, index: int) -> Row:
        base.check_index(index, self.held_out_rows, what="held-out row")
        for one in self.named:
            if index < one.dataset.held_out_rows:
                return one.dataset.held_out(index)
            index -= one.dataset.held_out_rows
        raise AssertionError(index)


def turns(dataset: Dataset, ranges: Sequence[RowRange]) -> Iterator[tuple[Dataset, int]]:
    """The positions of `ranges`, each with its dataset, in the order of `numbered.in_turn`."""
    if not isinstance(dataset, Mixture):
        yield from ((dataset, place) for span in ranges for place in range(span.start, span.stop))
        return
    for span in ranges:
        if span.dataset_id not in dataset.parts:
            raise StateDamaged(
                f"rows of dataset {span.dataset_id!r} are assigned, which is none of the run's "
                f"{sorted(dataset.parts)}; the coordinator's data is not this island's"
            )
    for name, place in numbered.in_turn(ranges):
        yield dataset.parts[name], place
