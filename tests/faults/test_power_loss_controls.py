"""Each sync of ours, left out of a recorded run, breaks a promise on some disk; so do SQLite's."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.power import search, sites
from tests.faults.power.check import Checker
from tests.faults.power.recording import Recording, record, scratch
from tests.faults.power.sites import Site

pytestmark = pytest.mark.timeout(600)  # for a busy machine; it takes half a minute

SITES = sites.enumerate_sites()
# Syncs that the recorded run cannot show to matter, as "file function" with the reason. A sync
# without an effect is taken out, and one that is not reached gets its use recorded.
EXCUSED: dict[str, str] = {
    # Shows only where a cut keeps the next repair's marker and loses both the name of its folder
    # and that of the ledger just put back: too rare among the drawn disks to be found each time.
    "launch/repair_swap.py resume": "needs three names of one directory to fare differently",
    # The recorded repair renames blobs that were on the disk long before.
    "launch/repair_swap.py _put_aside": "matters for blobs on another disk or in S3",
}


@pytest.fixture(scope="module")
def checker(recording: Recording) -> Checker:
    return Checker(recording.marks)


@pytest.fixture
def disks() -> Iterator[Path]:
    with scratch() as path:
        yield path


def test_every_sync_of_the_trace_belongs_to_a_known_site(recording: Recording) -> None:
    told = {event.site for event in recording.events if event.site is not None}

    assert {name for name in told if not any(site.includes(name) for site in SITES)} == set()


def test_excused_syncs_exist() -> None:
    assert EXCUSED.keys() <= {site.place for site in SITES}


@pytest.mark.parametrize("site", [s for s in SITES if s.place not in EXCUSED], ids=str)
def test_leaving_out_a_sync_breaks_a_promise(
    site: Site, recording: Recording, checker: Checker, disks: Path
) -> None:
    left_out = [event for event in recording.events if site.includes(event.site)]

    broken = search.find_broken(
        recording.events, checker, disks, drops=lambda event: site.includes(event.site)
    )

    assert left_out, f"{site} is never reached; let tests/faults/power/program.py do what needs it"
    assert broken is not None, (
        f"nothing breaks without the sync at {site}; take it out, or let the recorded program "
        f"promise what it is for"
    )


def test_sqlite_without_its_syncs_breaks_a_promise(
    tmp_path: Path, recording: Recording, disks: Path
) -> None:
    unsynced = record(tmp_path, synchronous="OFF")

    broken = search.find_broken(
        unsynced.events, Checker(unsynced.marks), disks, drops=lambda _: False
    )

    assert _ledger_syncs(recording) > 0
    assert _ledger_syncs(unsynced) == 0
    assert broken is not None
    assert "coordinator" in broken


def _ledger_syncs(recording: Recording) -> int:
    """Of the serving coordinator's ledger; a repair and a reset open theirs by themselves."""
    live = "coordinator/state/ledger.sqlite"
    return sum(
        event.name == "sync" and event.paths[0].startswith(live) for event in recording.events
    )
