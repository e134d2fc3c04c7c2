"""How a process of `atoll join` ends under torchrun, which starts a group again by exit codes."""

import os
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.cli import join as command
from atoll.cli.options import JoinOptions
from atoll.errors import GroupBroken
from atoll.island import trainer
from atoll.island.ranks.group import SOLO
from atoll.launch import joining, placement


class Exited(BaseException):
    """In place of the end of this process."""


class Played:
    """A run of one process that does nothing by itself."""

    group = SOLO
    worker_id = "island-0"
    manifest = SimpleNamespace(inner=SimpleNamespace(threads=1), name="played")

    def __init__(self) -> None:
        self.calls: list[str] = []

    def leave_now(self) -> None:
        self.calls.append("leave")

    def release(self) -> None:
        self.calls.append("release")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Played:
    made = Played()

    def leave(code: int) -> None:
        made.calls.append(f"exit {code}")
        raise Exited

    monkeypatch.setattr(joining, "join", lambda *_, **__: made)
    monkeypatch.setattr(command, "_heed_signals", lambda _: None)
    monkeypatch.setattr(os, "_exit", leave)
    return made


def joined(monkeypatch: pytest.MonkeyPatch, *, local_rank: int | None, ends: BaseException) -> None:
    def train(*_: Any, **__: Any) -> None:
        raise ends

    monkeypatch.setattr(placement, "local_rank", lambda: local_rank)
    monkeypatch.setattr(trainer, "train", train)
    command.join(JoinOptions(url="http://x", token="t"))


@pytest.mark.usefixtures("one_thread")
def test_broken_process_tells_why_and_ends_at_once_under_torchrun(run, monkeypatch, capsys):
    with pytest.raises(Exited):
        joined(monkeypatch, local_rank=0, ends=GroupBroken("group=3 is over"))

    assert run.calls[:2] == ["release", "exit 2"]  # nothing after what holds on is let go
    assert "group=3 is over [GROUP_BROKEN]" in capsys.readouterr().err


@pytest.mark.usefixtures("one_thread")
def test_interrupted_process_leaves_and_ends_at_once_under_torchrun(run, monkeypatch):
    with pytest.raises(Exited):
        joined(monkeypatch, local_rank=0, ends=KeyboardInterrupt())

    assert run.calls[:3] == ["leave", "release", "exit 130"]


@pytest.mark.usefixtures("one_thread")
def test_broken_process_by_itself_raises(run, monkeypatch):
    with pytest.raises(GroupBroken):
        joined(monkeypatch, local_rank=None, ends=GroupBroken("group=3 is over"))

    assert run.calls == ["release"]
