"""SIGKILL before every durable call of a three-round run, one call at a time, and a restart.

One process with a coordinator and two islands, real files, in-memory messages
(`tests/faults/crash_run.py`). A kill keeps what the kernel holds, so this shows atomicity; whether
the disk has it is another test's. ATOLL_CRASH_POINTS says how many points (`make storm`: all).
"""

import os
from collections import Counter

import pytest

from tests import crashes, strace
from tests.crashes import KILLED, Crashed, CrashRun, Point, Undisturbed

pytestmark = [pytest.mark.storm, pytest.mark.timeout(3600)]  # all points take minutes

POINTS = int(os.environ.get("ATOLL_CRASH_POINTS", "60"))
# What the issue names, in the spelling of this kernel; SQLite and this project use no link.
EXPECTED = {"fsync", "fdatasync", "rename", "write", "pwrite64", "ftruncate", "unlink"}


def wrong(point: Point, crashed: Crashed, undisturbed: Undisturbed) -> list[str]:
    """Everything that must hold of a crash and does not."""
    if crashed.code != KILLED or crashed.killed_at != point:
        return [f"the kill did not happen there: {crashed.code}, {crashed.killed_at}"]
    if crashed.recovery_code != 0:
        return [f"the restart did not complete: {crashed.error}"]
    found, made = crashed.found, crashed.made
    before_or_after = undisturbed.hashes[max(crashed.commits - 1, 0) : crashed.commits + 1]
    checks = {
        "the state is neither before nor after the commit": found["hash"] in before_or_after,
        "an acknowledged contribution is missing": {*crashed.acknowledged} <= {*found["receipts"]},
        "an acknowledged contribution is missing in the end": (
            {*crashed.acknowledged, *found["receipts"]} <= {*made["receipts"]}
        ),
        "some island counted twice or not": len(made["receipts"]) == len(undisturbed.receipts),
        "rounds came out otherwise": made["digests"] == undisturbed.digests,
        "published rounds changed": undisturbed.digests[: len(found["digests"])]
        == found["digests"],
        f"audit: {crashed.audit}": not crashed.audit,
    }
    return [text for text, holds in checks.items() if not holds]


def faults_of(
    program: CrashRun, undisturbed: Undisturbed, points: list[Point]
) -> dict[str, list[str]]:
    """What is wrong, by point; nothing where all holds."""
    found = {str(point): wrong(point, program.crash(point), undisturbed) for point in points}
    return {point: faults for point, faults in found.items() if faults}


def test_every_crash_point_recovers(program: CrashRun, undisturbed: Undisturbed) -> None:
    """Restarted, the run is what it would have been, and nothing acknowledged is lost."""
    every = undisturbed.points
    points = crashes.spread(every, POINTS) if POINTS else every

    faults = faults_of(program, undisturbed, points)

    print(f"{len(points)} of {len(every)} crash points: {dict(Counter(p.name for p in points))}")
    assert not faults, "\n".join(f"{point}: {'; '.join(said)}" for point, said in faults.items())
    assert len(points) >= 60


def test_every_kind_of_durable_call_is_among_them(undisturbed: Undisturbed) -> None:
    """The calls are those of the run's own files, by every thread that writes any."""
    found = Counter(point.name for point in undisturbed.points)
    threads = {point.thread for point in undisturbed.points}

    assert found.keys() >= EXPECTED
    assert {"main", "coordinator", "island-0", "island-1"} <= threads
    assert any("saves" in thread for thread in threads)
    assert [str(point) for point in undisturbed.points if "home" not in point.what] == []


@pytest.mark.parametrize(
    ("flaw", "name", "thread", "what", "fault"),
    [
        # Between the receipt and the commit that it spoke of.
        ("ack_before_commit", "rename", "island-0", "checkpoint-1", "acknowledged"),
        ("write_in_place", "write", "saves", "complete.json", "did not complete"),
    ],
)
def test_flaw_is_found(
    skip, undisturbed: Undisturbed, flaw: str, name: str, thread: str, what: str, fault: str
) -> None:
    """The control: a program that acknowledges too early, or writes in place, fails some point."""
    strace.require(skip)
    with CrashRun.started(flaw=flaw) as program:
        points = [
            point
            for point in program.undisturbed().points
            if point.name == name and thread in point.thread and what in point.what
        ]

        faults = faults_of(program, undisturbed, points[:1])

    assert len(points) >= 1
    assert [fault in said for [said] in faults.values()] == [True]
