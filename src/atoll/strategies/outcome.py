"""What became of a round, for people: its outer step says what there is to say."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atoll.sums.digest import ParamsDigest


@dataclass(frozen=True, kw_only=True)
class Folded:
    """One contribution of a round."""

    worker_id: str
    sha256: str
    nbytes: int
    stamp: float | None = None  # its server's time of the object, where it lay in a bucket


@dataclass(frozen=True, kw_only=True)
class Left:
    """One that the round did without."""

    worker_id: str
    reason: str
    sentence: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A round that is computed and recorded."""

    round: int
    folded: Sequence[Folded]  # in order
    left: Sequence[Left]
    primaries: Sequence[str]  # workers that it was planned for
    reserves: Sequence[str]  # and those that step in for them
    digest: ParamsDigest  # of the published weights
    seconds: float  # that it took to compute


Measured = Mapping[str, float]  # by name: numbers to be shown
