"""What an audit checked and what it found, as values."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from atoll.proof.balance import EpochBalance
from atoll.proof.pairs import FragmentBalance
from atoll.proof.residuals import LostResidual

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Problem:
    """One thing that does not hold."""

    round: int
    what: str
    detail: str


@dataclass
class AuditReport:
    """What was checked and what was found."""

    run_id: str
    rounds: int = 0
    contributions: int = 0
    pruned: int = 0  # contributions whose blobs retention removed; their rows are in the chain
    rows: int = 0
    tokens: int = 0
    staleness: int = 0  # the highest: rounds from the one a contribution was made for to its own
    replayed_from: int | None = None
    replayed_rounds: int = 0
    checkpoints_read: int | None = None  # of a sharded run: whose weights were read and compared
    digest: str | None = None
    balance: list[EpochBalance] = field(default_factory=list)
    fragments: list[FragmentBalance] = field(default_factory=list)  # empty: there is one
    residuals: list[LostResidual] = field(default_factory=list)  # no problem: islands may die
    problems: list[Problem] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not self.problems

    def add(self, round_number: int, what: str, detail: str) -> None:
        """Something does not hold in that round."""
        self.problems.append(Problem(round_number, what, detail))

    def as_json(self) -> dict[str, object]:
        """The report as plain values."""
        return {**asdict(self), "clean": self.clean}
