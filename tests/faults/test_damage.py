"""Whatever is damaged, a coordinator serves what it served before or does not start.

One bit in every page of the ledger, its log and each kind of blob; pages of zeros, cut and missing
files. What is not refused must be harmless by proof: the served state is the same.
"""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from atoll.blobs.directory import DirectoryBlobs
from atoll.launch import repair
from atoll.ledger.sqlite import wal
from atoll.versions import weights
from tests import damages
from tests.clusters import SMALL, Cluster
from tests.damages import Refused, Served
from tests.ledgers import alone

pytestmark = pytest.mark.usefixtures("one_thread")

FLIPS_PER_PAGE = int(os.environ.get("ATOLL_DAMAGE_FLIPS", "1"))  # `make storm` asks for more
LOG_STEP = 5 if FLIPS_PER_PAGE == 1 else 1  # the log has many pages, all of one kind
LEDGER = "ledger.sqlite"


@dataclass(frozen=True)
class Original:
    """A run at rest and the same run as a killed process leaves it, with the blobs it names."""

    rest: Path
    killed: Path
    blobs: dict[str, str]
    served: Served


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Original:
    home = tmp_path_factory.mktemp("original")
    cluster = damages.play(home / "rest")
    killed = damages.copied(home / "rest", home / "killed")
    blobs = _kinds(cluster)
    cluster.close()
    served = damages.start(damages.copied(home / "rest", home / "started"))
    assert isinstance(served, Served)
    assert wal.path_of(killed / LEDGER).stat().st_size > 100 * damages.PAGE_BYTES
    return Original(home / "rest", killed, blobs, served)


def _kinds(cluster: Cluster) -> dict[str, str]:
    run = alone(cluster.ledger).run.get()
    assert run is not None
    [snapshot] = alone(cluster.ledger).snapshots.all()
    return {
        "initial weights": run.initial_sha256,
        "folded contribution": alone(cluster.ledger).contributions.of_round(1)[0].sha256,
        "contribution to replay": alone(cluster.ledger).contributions.of_round(5)[1].sha256,
        "contribution to fold": alone(cluster.ledger).contributions.of_round(6)[0].sha256,
        "snapshot master": snapshot.master_sha256,
        "snapshot published": snapshot.published_sha256,
        "snapshot momentum": dict(snapshot.slots_sha256)["momentum"],
    }


KINDS = (
    "initial weights",
    "folded contribution",
    "contribution to replay",
    "contribution to fold",
    "snapshot master",
    "snapshot published",
    "snapshot momentum",
)
# What a start does not read because a newer snapshot stands for it; audit still finds it.
NOT_NEEDED = ("initial weights", "folded contribution")


def used_bytes(path: Path, rng: random.Random) -> Iterator[tuple[int, int]]:
    """Bits to change in each page, of bytes that are not zero where there are any."""
    data = path.read_bytes()
    for start, size in damages.pages(path):
        used = [place for place in range(start, start + size) if data[place]]
        for _ in range(FLIPS_PER_PAGE):
            yield rng.choice(used or [start]), rng.randrange(8)


def outcomes(
    home: Path, tmp_path: Path, name: str, *, step: int = 1
) -> list[tuple[int, Served | Refused]]:
    """What a start makes of bits changed in every page, or in every `step`-th one."""
    rng = random.Random(12)
    found = []
    target = damages.copied(home, tmp_path / "damaged")
    for place, bit in list(used_bytes(home / name, rng))[::step]:
        for file in (LEDGER, f"{LEDGER}-wal"):
            (target / file).unlink(missing_ok=True)
            if (home / file).exists():
                shutil.copyfile(home / file, target / file)
        damages.flip(target / name, place, bit=bit)
        found.append((place, damages.start(target)))
    return found


def silent(original: Original, found: list[tuple[int, Served | Refused]]) -> list[object]:
    """Starts that serve something else than before, but for a queue that is named as damaged."""
    return [
        (place, served)
        for place, served in found
        if isinstance(served, Served)
        and (served if not served.named else _without_queue(served, original)) != original.served
    ]


def _without_queue(served: Served, original: Original) -> Served:
    assert [line for line in served.named if "queues" not in line] == []
    return replace(served, state=original.served.state, named=())


def refused(found: list[tuple[int, Served | Refused]]) -> list[Refused]:
    return [r for _, r in found if isinstance(r, Refused)]


# The ledger


@pytest.mark.storm
@pytest.mark.timeout(3600)
def test_bit_in_any_page_of_the_ledger_is_refused_by_name_or_harmless(original, tmp_path):
    found = outcomes(original.rest, tmp_path, LEDGER)

    assert silent(original, found) == []
    assert len(refused(found)) > len(found) / 2
    assert [str(r) for r in refused(found) if LEDGER not in str(r)] == []


@pytest.mark.storm
@pytest.mark.timeout(3600)
def test_bit_in_any_page_of_the_log_is_refused_by_name(original, tmp_path):
    found = outcomes(original.killed, tmp_path, f"{LEDGER}-wal", step=LOG_STEP)

    assert len(refused(found)) == len(found)
    assert [str(r) for r in refused(found) if f"{LEDGER}-wal" not in str(r)] == []


def test_killed_run_without_damage_is_served(original, tmp_path):
    """The control of the claims about the log."""
    home = damages.copied(original.killed, tmp_path / "copy")

    assert damages.start(home) == original.served


def zeroed(path: Path) -> None:
    damages.zero_page(path, path.stat().st_size // damages.PAGE_BYTES // 2)


def halved(path: Path) -> None:
    damages.truncate(path, path.stat().st_size // 2)


def emptied(path: Path) -> None:
    damages.truncate(path, 0)


def missing(path: Path) -> None:
    path.unlink()


WAYS: list[Callable[[Path], None]] = [zeroed, halved, emptied, missing]


@pytest.mark.parametrize("harm", WAYS)
def test_ledger_that_is_harmed_is_refused(original, tmp_path, harm):
    home = damages.copied(original.rest, tmp_path / "copy")
    (home / "stores.json").write_text('{"ledger": null, "blobs": null}')
    harm(home / LEDGER)

    found = damages.start(home)

    assert isinstance(found, Refused), found


def test_table_whose_own_text_is_no_text_any_more_is_refused_by_name(original, tmp_path):
    """SQLite then quotes the bytes in its message, which the driver cannot decode."""
    home = damages.copied(original.rest, tmp_path / "copy")
    name = b"CREATE TABLE rounds"  # freed pages may hold it too
    data = (home / LEDGER).read_bytes().replace(name, b"CREATE TABL\xcc rounds")
    (home / LEDGER).write_bytes(data)

    found = damages.start(home)

    assert isinstance(found, Refused), found
    assert LEDGER in str(found)


@pytest.mark.parametrize("harm", [emptied, missing])
def test_log_without_its_ledger_is_kept_until_that_is_back(original, tmp_path, harm):
    """SQLite would delete it, and with it all that was committed since the last checkpoint."""
    home = damages.copied(original.killed, tmp_path / "copy")
    log = (home / f"{LEDGER}-wal").read_bytes()
    harm(home / LEDGER)

    refused = damages.start(home)

    assert isinstance(refused, Refused), refused
    assert f"{LEDGER}-wal" in str(refused)
    assert (home / f"{LEDGER}-wal").read_bytes() == log
    shutil.copyfile(original.killed / LEDGER, home / LEDGER)
    assert damages.start(home) == original.served


@pytest.mark.parametrize("harm", WAYS)
def test_log_that_lost_rounds_is_refused(original, tmp_path, harm):
    """Cut or missing it tells nothing by itself; blobs of rounds that the ledger lost do."""
    home = damages.copied(original.killed, tmp_path / "copy")
    harm(home / f"{LEDGER}-wal")

    found = damages.start(home)

    assert isinstance(found, Refused), found


@pytest.mark.parametrize(
    ("table", "change"),
    [
        ("contributions", "norm = norm + 1 WHERE round = 2 AND worker_id = 'b'"),
        ("contributions", "weight = 2 WHERE round = 2 AND worker_id = 'b'"),
        ("contributions", "receipt = 'other' WHERE round = 6"),
        ("rounds", "hash = 'f' WHERE round = 3"),
        ("rounds", "cursor = cursor + 1 WHERE round = 6"),
        ("rounds", "published_wall = 0 WHERE round = 1"),
        ("leases", "state = 'reopened' WHERE round = 6 AND worker_id = 'b'"),
        ("workers", "incarnation = 9 WHERE worker_id = 'a'"),
        ("credentials", "sha256 = 'f' WHERE role = 'admin'"),
        ("control", "value = '2.000'"),
        ("evaluations", "tokens = 8"),
        ("snapshots", "version = 2"),
        ("manifests", "from_round = 2"),
        ("runs", "created_wall = 5.0"),
        ("generations", "members = '[]' WHERE number = 2"),
        ("seals", "count = 9 WHERE place = 'runs'"),
    ],
)
def test_row_changed_by_hand_is_refused_by_its_table(original, tmp_path, table, change):
    home = damages.copied(original.rest, tmp_path / "copy")
    damages.by_hand(home / LEDGER, f"UPDATE {table} SET {change}")

    found = damages.start(home)

    assert isinstance(found, Refused), found
    assert f"table '{'runs' if table == 'seals' else table}'" in str(found)


@pytest.mark.parametrize("table", ["rounds", "leases", "contributions", "workers", "runs"])
def test_row_that_is_gone_is_refused(original, tmp_path, table):
    home = damages.copied(original.rest, tmp_path / "copy")
    damages.by_hand(home / LEDGER, f"DELETE FROM {table} WHERE rowid = 1")

    found = damages.start(home)

    assert isinstance(found, Refused), found
    assert f"table '{table}'" in str(found)


# Blobs


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in NOT_NEEDED])
def test_bit_in_any_page_of_a_needed_blob_is_refused_by_name(original, tmp_path, kind):
    sha256 = original.blobs[kind]
    home = damages.copied(original.rest, tmp_path / "copy")
    path = home / "blobs" / sha256[:2] / sha256
    rng = random.Random(3)
    found = []
    for start, size in list(damages.pages(path)):
        place, bit = start + rng.randrange(size), rng.randrange(8)
        damages.flip(path, place, bit=bit)
        found.append(damages.start(home))
        damages.flip(path, place, bit=bit)

    assert [str(r) for r in found if not isinstance(r, Refused) or sha256 not in str(r)] == []
    assert damages.start(home) == original.served


@pytest.mark.parametrize("harm", WAYS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in NOT_NEEDED])
def test_needed_blob_that_is_harmed_is_refused_by_name(original, tmp_path, kind, harm):
    sha256 = original.blobs[kind]
    home = damages.copied(original.rest, tmp_path / "copy")
    harm(home / "blobs" / sha256[:2] / sha256)

    found = damages.start(home)

    assert isinstance(found, Refused), found
    assert sha256 in str(found)


@pytest.mark.parametrize("kind", NOT_NEEDED)
def test_blob_that_a_newer_snapshot_stands_for_is_harmless_and_found_by_looking(
    original, tmp_path, kind
):
    sha256 = original.blobs[kind]
    home = damages.copied(original.rest, tmp_path / "copy")
    damages.flip(home / "blobs" / sha256[:2] / sha256, 100)

    assert damages.start(home) == original.served
    report = repair.look(home)
    assert [sha256 in damage for damage in report.damages] == [True]
    assert (report.last_good, report.dropped.rounds) == (damages.ROUNDS, 0)


def test_initial_weights_without_a_snapshot_are_refused_by_name(tmp_path):
    cluster = damages.play(tmp_path / "run", rounds=2)
    run = alone(cluster.ledger).run.get()
    assert run is not None
    cluster.close()
    damages.flip(cluster.blob_path(run.initial_sha256), 4000)

    found = damages.start(tmp_path / "run")

    assert isinstance(found, Refused), found
    assert run.initial_sha256 in str(found)


def test_weights_of_a_creation_that_was_cut_off_are_no_damage(original, tmp_path):
    """Stored, and the process ended before it recorded the run; the next one made another."""
    home = damages.copied(original.rest, tmp_path / "copy")
    blobs = DirectoryBlobs(home / "blobs")
    header = weights.weights_header(
        SMALL, run_id="never-recorded", manifest_sha256="0" * 64, version=0, digest="0" * 64
    )
    weights.store(blobs, header, SMALL.zeros(), layout=SMALL)
    blobs.close()

    assert damages.start(home) == original.served
