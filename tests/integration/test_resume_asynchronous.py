"""What `test_resume` says, of asynchronous runs: deaths and lost replies do not show in the bits.

With a window that waits for both islands the order is fixed, so the bits are a calm run's. Without
one a fault changes who comes when; then the records must tell all that the bits depend on.
"""

from pathlib import Path
from typing import Any

import pytest

from atoll.simulate import follow
from tests import clusters
from tests.integration.test_resume import FAULTS
from tests.seas import Sea, killed_after, killed_before

ASYNC: dict[str, Any] = {
    "mode": "async",
    "outer.optimizer": "delayed_nesterov",
    "outer.delay": 2,
    "download.codec": "bf16",
}
TOGETHER = {**ASYNC, "membership.grace_seconds": 100.0}
APART = {**ASYNC, "stop.rounds": 6, "membership.min_workers": 1, "evaluate.every": 0}

# Of the faults of `test_resume`: those that leave the order, and those after which another island
# asks first and is given the rows that come first.
SAME_ORDER = (
    "receipt is lost three times",
    "killed in training",
    "killed twice in one round",
    "killed before an upload",
    "killed before the receipt",
    "killed while waiting",
    "both killed",
    "evicted in training",
    "evicted before an upload",
    "coordinator restarts before an upload",
    "coordinator restarts before a receipt",
)
OTHER_ORDER = (
    "assignment's reply is lost",
    "every receipt is lost",
    "coordinator restarts before a download",
)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of a run in which nothing goes wrong."""
    return Sea(tmp_path_factory.mktemp("calm"), **TOGETHER).run()


@pytest.mark.parametrize("name", SAME_ORDER)
def test_island_ends_in_the_bits_of_a_calm_run(tmp_path, calm, name):
    sea = Sea(tmp_path, **TOGETHER)
    sea.faults = FAULTS[name]

    assert sea.run() == calm
    assert all(sea.calls[island, method] >= n for island, method, n in sea.faults)


def followed(sea: Sea, scratch: Path) -> follow.Followed:
    """What the records of a run that is over come to, trained once more."""
    stores = clusters.stores_in(sea.home)
    try:
        return follow.follow(stores.ledger, stores.blobs, scratch)
    finally:
        stores.ledger.close()


@pytest.mark.parametrize("name", OTHER_ORDER)
def test_fault_that_changes_who_asks_first_is_told_by_the_records(tmp_path, calm, name):
    sea = Sea(tmp_path / "run", **TOGETHER)
    sea.faults = FAULTS[name]

    digest = sea.run()

    assert digest != calm
    assert followed(sea, tmp_path / "again").digest == digest


KILLS = {
    "in training": ("a", "step", 5),
    "before an upload": ("a", "upload", 3),
    "in a download": ("b", "download", 3),
    "while waiting": ("b", "assignment", 4),
}


@pytest.mark.parametrize("place", KILLS.values(), ids=KILLS.keys())
def test_killed_island_goes_on_from_its_last_receipt_whatever_the_order(tmp_path, place):
    """Inner state and residual continue: training the records once more gives the same bits."""
    sea = Sea(tmp_path / "run", **APART)
    sea.faults = {place: killed_before}

    digest = sea.run()

    assert followed(sea, tmp_path / "again").digest == digest
    assert sea.lives[place[0]] == 2


def test_island_killed_before_its_receipt_has_contributed_once(tmp_path):
    sea = Sea(tmp_path / "run", **APART)
    sea.faults = {("a", "upload", 2): killed_after}

    digest = sea.run()

    assert followed(sea, tmp_path / "again").digest == digest


def test_island_that_lost_its_directory_cannot_be_followed(tmp_path):
    """The control: what an island keeps is part of what the bits depend on."""

    def erased(sea: Sea, _: object) -> None:
        for path in (sea.home / "a").glob("*-[0-9]*"):
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
        killed_before(sea, lambda: None)

    sea = Sea(tmp_path / "run", **{**APART, "stop.rounds": 10})  # long enough to come back
    sea.faults = {("a", "step", 5): erased}

    digest = sea.run()

    assert followed(sea, tmp_path / "again").digest != digest
