"""Who is told that the coordinator's state has moved."""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Changes:
    """Who is told, from any thread, that a waiting worker may have something to do."""

    listeners: list[Callable[[], None]] = field(default_factory=list)

    def __call__(self) -> None:
        for listener in self.listeners:
            listener()
