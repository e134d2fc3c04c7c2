"""A disk that is full or fails, call by call: one process, real files, strace in between.

A coordinator without room waits for it and goes on by itself; after a sync that failed the process
ends, syncs nothing again, and a restart goes on from what is durable. Points are those of
`test_crash_points`; ATOLL_DISK_POINTS says how many (`make storm`: all).
"""

import os
import re
from collections import Counter

import pytest

from tests import crashes
from tests.crashes import CrashRun, Point, Refused, Undisturbed

pytestmark = [pytest.mark.storm, pytest.mark.timeout(3600)]  # all points take minutes

POINTS = int(os.environ.get("ATOLL_DISK_POINTS", "12"))
TAKE_ROOM = {"write", "pwrite64", "fallocate"}
SYNC = {"fsync", "fdatasync"}
STORES = re.compile(r"home/(blobs|spool|ledger)")
ISLANDS = re.compile(r"home/island-")


def chosen(points: list[Point], names: set[str], place: re.Pattern[str]) -> list[Point]:
    """Points of these calls at that place."""
    found = [point for point in points if point.name in names and place.search(point.what)]

    def kind(point: Point) -> str:
        match = place.search(point.what)
        return f"{point.name} {match[0] if match else ''}"

    return crashes.spread(found, POINTS, kind=kind) if POINTS else found


def recovered(refused: Refused, undisturbed: Undisturbed) -> list[str]:
    """What does not hold after a restart."""
    if refused.recovery_code != 0:
        return [f"the restart did not complete: {refused.recovery_error}"]
    checks = {
        "the call was not made to fail": refused.is_injected,
        "rounds came out otherwise": refused.made["digests"] == undisturbed.digests,
        f"audit: {refused.audit}": not refused.audit,
    }
    return [text for text, holds in checks.items() if not holds]


def wrong_without_room(refused: Refused, undisturbed: Undisturbed) -> list[str]:
    """What must hold of a coordinator that waits for room, and does not."""
    went_on = refused.code == 0 and refused.digests == undisturbed.digests
    faults = [] if went_on else [f"did not go on: {refused.code}, {refused.error}"]
    return faults + recovered(refused, undisturbed)


def wrong_after_failed_sync(point: Point, refused: Refused, undisturbed: Undisturbed) -> list[str]:
    """What must hold of a coordinator whose disk did not confirm, and does not.

    While a ledger is made SQLite rolls back what failed, which syncs what it rewrote; from the
    first use of its log on it does not.
    """
    every = undisturbed.points
    begun = next(index for index, p in enumerate(every) if "ledger.sqlite-wal" in p.what)
    is_made = every.index(point) >= begun
    ended = refused.code == 1 and "DiskFailed" in refused.error
    checks = {
        f"ended with {refused.code}: {refused.error}": ended,
        f"synced again: {refused.later}": point.what not in refused.later or not is_made,
    }
    faults = [text for text, holds in checks.items() if not holds]
    return faults + recovered(refused, undisturbed)


def assert_all(failed: dict[str, list[str]]) -> None:
    found = {point: faults for point, faults in failed.items() if faults}
    assert not found, "\n".join(f"{point}: {'; '.join(said)}" for point, said in found.items())


def test_coordinator_without_room_goes_on_when_there_is_some(
    program: CrashRun, undisturbed: Undisturbed
) -> None:
    """Uploads, the outer step's spool, snapshots and the ledger: no restart, the same weights."""
    served = [point for point in undisturbed.points if point.thread != crashes.MAIN]
    points = chosen(served, TAKE_ROOM, STORES)
    failed = {}
    for index, point in enumerate(points):
        refused = program.refuse(point, "ENOSPC", times=1 + 2 * (index % 2))
        failed[str(point)] = wrong_without_room(refused, undisturbed)

    print(f"{len(points)} calls without room: {dict(Counter(p.name for p in points))}")
    assert_all(failed)
    kinds = {(p.name, match[1]) for p in points if (match := STORES.search(p.what))}
    assert kinds >= {
        ("fallocate", "blobs"),
        ("write", "blobs"),
        ("fallocate", "spool"),
        ("pwrite64", "spool"),
        ("pwrite64", "ledger"),
    }


def test_failed_sync_of_the_coordinator_ends_the_process(
    program: CrashRun, undisturbed: Undisturbed
) -> None:
    """With a sentence, without a second sync of the same file; a restart completes the run.

    At its start and end too. Not the directory of the ledger: SQLite syncs it and does not tell.
    """
    points = chosen(undisturbed.points, SYNC, STORES)
    failed = {}
    for point in points:
        refused = program.refuse(point, "EIO")
        failed[str(point)] = wrong_after_failed_sync(point, refused, undisturbed)

    print(f"{len(points)} syncs that fail: {dict(Counter(p.name for p in points))}")
    assert_all(failed)


@pytest.mark.parametrize(("names", "error"), [(SYNC, "EIO"), (TAKE_ROOM, "ENOSPC")])
def test_island_whose_disk_refuses_ends_with_a_sentence(
    program: CrashRun, undisturbed: Undisturbed, names: set[str], error: str
) -> None:
    """Its state is its own to repair; what it had whole is what its next life goes on from."""
    points = chosen(undisturbed.points, names, ISLANDS)[::3]
    failed = {}
    for point in points:
        refused = program.refuse(point, error)
        ended = refused.code == 1 and "start this island again" in refused.error
        faults = [] if ended else [f"ended with {refused.code}: {refused.error}"]
        failed[str(point)] = faults + recovered(refused, undisturbed)

    assert len(points) >= 2
    assert_all(failed)


def test_flaws_are_found(undisturbed: Undisturbed) -> None:
    """The control: a round computed on top of itself, and a sync that is repeated and believed."""
    spooled = [p for p in undisturbed.points if p.name == "pwrite64" and "home/spool" in p.what]
    synced = [p for p in undisturbed.points if p.name == "fdatasync" and "N.part" in p.what]
    point = next(p for p in synced if p.thread != crashes.MAIN)

    with CrashRun.started(flaw="weights_left_torn") as program:
        # The first tile of the second round's update: the weights have moved, the frame has not.
        torn = program.refuse(spooled[len(spooled) // 2], "ENOSPC")
    with CrashRun.started(flaw="sync_again") as program:
        believed = program.refuse(point, "EIO")

    assert wrong_without_room(torn, undisturbed) != []
    assert wrong_after_failed_sync(point, believed, undisturbed) != []
