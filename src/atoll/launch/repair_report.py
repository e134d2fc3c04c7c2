"""What a repair found and did, as plain values."""

from dataclasses import asdict, dataclass, field
from typing import Any

from atoll.ledger.sqlite.salvage import Counts


@dataclass
class RepairReport:
    """What was found, and what a repair does or did about it."""

    directory: str
    run_id: str | None = None
    ledger_elsewhere: bool = False  # then it is looked at and never changed
    damages: list[str] = field(default_factory=list)
    published: int = 0  # the newest version that the ledger tells of
    last_good: int | None = None  # the newest version that can be rebuilt
    replay_from: int = 0  # audit replays from there
    keeps_open: bool = False
    dropped: Counts = field(default_factory=Counts)
    kept: Counts = field(default_factory=Counts)
    dropped_snapshots: list[int] = field(default_factory=list)
    put_aside: list[str] = field(default_factory=list)  # blobs
    weights: list[dict[str, Any]] = field(default_factory=list)  # blobs that hold whole weights
    aside: str | None = None  # the folder, once the repair is done
    audit: dict[str, object] | None = None

    @property
    def sound(self) -> bool:
        return not self.damages

    @property
    def repairable(self) -> bool:
        return self.last_good is not None

    def as_json(self) -> dict[str, object]:
        """The report as plain values."""
        return {**asdict(self), "sound": self.sound, "repairable": self.repairable}
