"""The one shape in which plans, leases, messages and frames name rows of a dataset."""

from dataclasses import dataclass

from atoll.errors import StateDamaged

# A step of a sharded run, a rank that is not in its sums, and of how many ranks it was one.
Late = tuple[int, int, int]


@dataclass(frozen=True, slots=True, order=True)
class RowRange:
    """Positions `[start, stop)` of a dataset's row sequence; sorts by dataset, then by place."""

    dataset_id: str
    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise StateDamaged(
                f"rows [{self.start}, {self.stop}) hold no row; a range must start at 0 or later "
                f"and end after its start; run `atoll audit` on the state directory"
            )

    def __len__(self) -> int:
        return self.stop - self.start
