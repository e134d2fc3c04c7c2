"""What the conversation wants done with buckets; whoever drives it does that.

Imports nothing that computes: islands of other runs have this module too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from atoll.gather.statement import Statement
from atoll.island.gather.signing import Signing
from atoll.island.link.base import FrameSource
from atoll.layout import Layout
from atoll.protocol.gather import WindowReply
from atoll.protocol.manifest import GatherSettings
from atoll.strategies.base import Strategy


@dataclass(frozen=True)
class Publish:
    """Puts a frame, and then what is stated of it, into the island's own bucket: an intent."""

    frame: FrameSource
    statement: Statement
    settings: GatherSettings


@dataclass(frozen=True)
class Collect:
    """The contributions of a published round, whose frame goes to `sink`: an intent.

    Nothing goes there before all of them are here and checked. An AtollError says which one is not;
    FrameError alone means that the sink has got a part of a frame, which nothing will follow.
    """

    window: WindowReply
    run_id: str
    manifest_sha256: str
    layout: Layout
    asked: Strategy  # that the round is under
    settings: GatherSettings
    sink: Callable[[bytes | memoryview], object]


class Buckets(Protocol):
    """Carries both out, and blocks meanwhile."""

    @property
    def signing(self) -> Signing: ...

    def told(self) -> dict[str, int]:
        """What an island says of them at its end."""
        ...

    def publish(self, wanted: Publish) -> None: ...

    def collect(self, wanted: Collect) -> None: ...

    def keep(self, version: int, digest: str, weights: memoryview) -> None:
        """Has a version on disk for a later life; what was fetched to make it may go."""
        ...

    def recall(self, weights: memoryview) -> tuple[int, str] | None:
        """Fills `weights` with what an earlier life kept; its version and digest, to be checked."""
        ...
