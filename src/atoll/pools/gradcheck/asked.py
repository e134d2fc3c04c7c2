"""What a check is asked for, whatever it checks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from atoll.errors import ConfigError
from atoll.pools.gradcheck.crew import Crews
from atoll.pools.gradcheck.loading import Place
from atoll.pools.gradcheck.report import Report

Sizes = Mapping[str, int | tuple[int, int]]  # ranks, or (blocks, ranks of each), by name
Ranks = Literal["local", "gloo"]


def _silent(_: str) -> None:
    """Nobody is told of progress."""


@dataclass(frozen=True, slots=True)
class Asked:
    """`sizes` and `ranks` are None where the declaration's own are meant."""

    sizes: Sequence[Sizes] | None = None
    ranks: Ranks | None = None
    mutants: bool = False
    steps: int = 2
    progress: Callable[[str], None] = _silent

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"steps={self.steps} compares nothing; give one at least")


class Checker(Protocol):
    """Checks one kind of declaration; raises what it refuses."""

    def __call__(
        self, subject: object, place: Place | None, asked: Asked, crews: Crews
    ) -> Report: ...
