"""What an examination of the durable state finds, as plain values."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Damage:
    """One part of the state that is not what was written."""

    part: str
    detail: str
    round: int | None = None  # the first round that needs it; None: no round is lost by it
    blob: str = ""  # its sha256, where the part is a blob

    def __str__(self) -> str:
        return f"{self.part}: {self.detail}" if self.detail else self.part


@dataclass(frozen=True)
class Findings:
    """What holds and what does not."""

    published: int  # the newest version by the ledger
    last_good: int | None  # the newest version that can be rebuilt; None: not one
    keeps_open: bool  # whether the round after it, if any, stands as it is
    replay_from: int  # the version that replay can begin at
    damages: list[Damage]
    bad_blobs: set[str]
    bad_snapshots: set[int]
