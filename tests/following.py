"""Training what a run's ledger records once more, as `atoll simulate --follow` does."""

from pathlib import Path
from typing import Any

import pytest

from atoll.blobs.directory import DirectoryBlobs
from atoll.ledger import engines
from atoll.protocol.messages import Assignment
from atoll.simulate import follow


def followed(home: Path, scratch: Path) -> follow.Followed:
    ledger = engines.open_ledger(home / "ledger.sqlite")
    try:
        return follow.follow(ledger, DirectoryBlobs(home / "blobs"), scratch)
    finally:
        ledger.close()


def tell_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a control: islands hear of more tokens than were trained, so their rates differ."""
    real = follow._Script.assignment  # noqa: SLF001  # what a coordinator would have said

    def otherwise(self: Any, worker_id: str, asked: Any) -> Assignment:
        given = real(self, worker_id, asked)
        return given.model_copy(update={"global_tokens": given.global_tokens + 100})

    monkeypatch.setattr(follow._Script, "assignment", otherwise)  # noqa: SLF001
