"""A damaged run is taken back to its last good round, nothing is deleted, and it goes on."""

import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from atoll.cli.app import app
from atoll.errors import ConfigError, StateDamaged, StateHeld, StorageFull
from atoll.island.conversation import adoption
from atoll.launch import repair, state
from atoll.launch.repair_report import RepairReport
from atoll.launch.state import Addresses
from atoll.ledger.sqlite import lock
from tests import damages, lives, mounts, servers
from tests.clusters import SMALL, Cluster, HandIsland
from tests.damages import Refused, Served
from tests.ledgers import alone

LEDGER = "ledger.sqlite"
CONTRIBUTIONS_PER_ROUND = 2


@dataclass(frozen=True)
class Original:
    """A run of five rounds, as it rests and as a killed process left it."""

    rest: Path
    killed: Path
    digests: list[str | None]  # of every version from 1 on
    blobs: dict[str, str]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Original:
    home = tmp_path_factory.mktemp("original")
    cluster = damages.play(home / "rest")
    killed = damages.copied(home / "rest", home / "killed")
    run = alone(cluster.ledger).run.get()
    assert run is not None
    [snapshot] = alone(cluster.ledger).snapshots.all()
    blobs = {
        "initial": run.initial_sha256,
        "round 2": alone(cluster.ledger).contributions.of_round(2)[0].sha256,
        "round 4": alone(cluster.ledger).contributions.of_round(4)[0].sha256,
        "round 5": alone(cluster.ledger).contributions.of_round(5)[0].sha256,
        "round 6": alone(cluster.ledger).contributions.of_round(6)[0].sha256,
        "master": snapshot.master_sha256,
        "momentum": dict(snapshot.slots_sha256)["momentum"],
    }
    found = Original(home / "rest", killed, cluster.digests_by_round(), blobs)
    cluster.close()
    return found


def blob(home: Path, sha256: str) -> Path:
    return home / "blobs" / sha256[:2] / sha256


def look(home: Path) -> RepairReport:
    return repair.look(home)


def mend(home: Path) -> RepairReport:
    return repair.repair(home)


def files(home: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(home)): path.read_bytes()
        for path in sorted(home.rglob("*"))
        if path.is_file() and path.name != lock.FILE_NAME
    }


# Damages: each changes a copy of the run


def flip_blob(name: str) -> Callable[[Path, Original], None]:
    return lambda home, original: damages.flip(blob(home, original.blobs[name]), 1000)


def lose_blob(name: str) -> Callable[[Path, Original], None]:
    return lambda home, original: blob(home, original.blobs[name]).unlink()


def by_hand(statement: str) -> Callable[[Path, Original], None]:
    return lambda home, _: damages.by_hand(home / LEDGER, statement)


def both(*harms: Callable[[Path, Original], None]) -> Callable[[Path, Original], None]:
    def harm(home: Path, original: Original) -> None:
        for one in harms:
            one(home, original)

    return harm


LONGER = by_hand("UPDATE datasets SET length = length + 1")

Case = tuple[str, Callable[[Path, Original], None], int, bool]
CASES: list[Case] = [
    # what is damaged, how, the last good round, whether the open round stays
    ("contribution to replay", flip_blob("round 5"), 4, False),
    ("missing contribution to replay", lose_blob("round 4"), 3, False),
    ("contribution to fold", flip_blob("round 6"), 5, False),
    ("snapshot", flip_blob("master"), 5, True),
    ("momentum of a snapshot", lose_blob("momentum"), 5, True),
    ("initial weights", flip_blob("initial"), 5, True),
    ("old contribution", flip_blob("round 2"), 5, True),
    ("snapshot and an old contribution", both(flip_blob("master"), flip_blob("round 2")), 1, False),
    ("a round's hash", by_hand("UPDATE rounds SET hash = 'f' WHERE round = 4"), 3, False),
    ("a norm", by_hand("UPDATE contributions SET norm = 9 WHERE round = 2"), 1, False),
    ("a lease", by_hand("UPDATE leases SET stop = stop + 1 WHERE round = 5"), 4, False),
    ("the open round's lease", by_hand("UPDATE leases SET stop = 99 WHERE round = 6"), 5, False),
    ("a lost round", by_hand("DELETE FROM rounds WHERE round = 3"), 2, False),
    ("a worker", by_hand("UPDATE workers SET key_sha256 = 'f' WHERE worker_id = 'a'"), 5, True),
    ("a lost worker", by_hand("DELETE FROM workers WHERE worker_id = 'a'"), 5, True),
    ("a token", by_hand("UPDATE credentials SET sha256 = 'f' WHERE role = 'admin'"), 5, True),
    ("an evaluation", by_hand("UPDATE evaluations SET tokens = 1"), 5, True),
    ("a snapshot's row", by_hand("UPDATE snapshots SET slots_sha256 = 'x'"), 5, True),
    ("a generation", by_hand("UPDATE generations SET members = '[' WHERE number = 3"), 5, True),
    ("a dataset", LONGER, 5, True),
    ("a lost dataset", by_hand("DELETE FROM datasets"), 5, True),
    (
        "a dataset and a round",
        both(LONGER, by_hand("DELETE FROM rounds WHERE round = 4")),
        3,
        False,
    ),
    ("a queue", by_hand("UPDATE queues SET issued = x'ff'"), 5, True),
    ("a lost queue", by_hand("DELETE FROM queues"), 5, True),
    (
        "a dataset and a lease",
        both(
            by_hand("UPDATE datasets SET length = 999"),
            by_hand("UPDATE leases SET stop = stop + 1 WHERE round = 5"),
        ),
        4,
        False,
    ),
    ("a seal", by_hand("DELETE FROM seals WHERE place = 'leases'"), 5, True),
]


@pytest.fixture(params=CASES, ids=[case[0] for case in CASES])
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


def test_repaired_run_starts_at_its_last_good_round_and_goes_on(original, tmp_path, case):
    _, harm, last_good, keeps_open = case
    home = damages.copied(original.rest, tmp_path / "run")
    harm(home, original)

    shown = look(home)
    report = mend(home)

    assert (shown.last_good, shown.keeps_open) == (last_good, keeps_open)
    assert shown.damages == report.damages != []
    assert report.audit is not None and report.audit["problems"] == []
    served = damages.start(home)
    assert isinstance(served, Served), served
    assert (served.version, served.digest) == (last_good, original.digests[last_good - 1])
    cluster = damages.rejoin(home, rounds=2)
    assert cluster.version > last_good
    assert cluster.audit(with_replay=True).problems == []
    cluster.close()


@pytest.mark.parametrize("harm", [CASES[0][1], CASES[8][1]], ids=["a blob", "the ledger"])
def test_looking_changes_nothing(original, tmp_path, harm):
    home = damages.copied(original.rest, tmp_path / "run")
    harm(home, original)
    before = files(home)

    look(home)

    assert files(home) == before


def test_looking_at_a_killed_run_changes_nothing(original, tmp_path):
    """Its log is not folded in."""
    home = damages.copied(original.killed, tmp_path / "run")
    before = files(home)

    report = look(home)

    assert report.sound
    assert files(home) == before


def test_repair_of_a_sound_run_changes_nothing(original, tmp_path):
    home = damages.copied(original.rest, tmp_path / "run")
    before = files(home)

    report = mend(home)

    assert report.sound and report.audit is None
    assert files(home) == before


def test_repair_keeps_every_byte(original, tmp_path):
    home = damages.copied(original.rest, tmp_path / "run")
    flip_blob("round 4")(home, original)
    before = files(home)

    report = mend(home)

    assert report.aside is not None
    kept = files(home)
    aside = {Path(name).name: data for name, data in kept.items() if "damaged-1" in name}
    assert aside[LEDGER] == before[LEDGER]
    gone = {name: data for name, data in before.items() if name not in kept}
    assert len(gone) == 2 * CONTRIBUTIONS_PER_ROUND + 1  # of rounds 4 and 5, and of the open one
    assert [name for name, data in gone.items() if aside[Path(name).name] != data] == []


def test_repair_says_what_is_dropped_and_what_stays(original, tmp_path):
    home = damages.copied(original.rest, tmp_path / "run")
    flip_blob("round 4")(home, original)

    report = look(home)

    rounds, contributions = report.dropped.rounds, report.dropped.contributions
    assert (rounds, contributions) == (2, 2 * CONTRIBUTIONS_PER_ROUND + 1)
    assert (report.kept.rounds, report.kept.contributions) == (3, 3 * CONTRIBUTIONS_PER_ROUND)
    assert report.dropped.rows == contributions * 6
    assert report.published == 5


def test_sound_blobs_of_dropped_rounds_are_not_called_damaged(original, tmp_path):
    home = damages.copied(original.rest, tmp_path / "run")
    by_hand("UPDATE rounds SET hash = 'f' WHERE round = 2")(home, original)

    report = look(home)

    assert report.last_good == 1
    assert [damage for damage in report.damages if damage.startswith("blob ")] == []
    assert original.blobs["round 5"] in report.put_aside


def test_rows_of_dropped_rounds_are_given_out_again(original, tmp_path):
    """Those that a dropped round had taken over from an absent island, too."""
    home = damages.copied(original.rest, tmp_path / "run")
    flip_blob("round 4")(home, original)
    mend(home)

    cluster = damages.rejoin(home, rounds=6)

    rows = [
        row
        for lease in cluster.leases()
        if lease.state.value == "done"
        for row in range(lease.start, lease.stop)
    ]
    assert len(rows) == len(set(rows))
    assert cluster.audit(with_replay=True).problems == []
    cluster.close()


def test_damage_before_the_newest_snapshot_costs_no_round_and_audit_begins_there(
    original, tmp_path
):
    home = damages.copied(original.rest, tmp_path / "run")
    flip_blob("round 2")(home, original)

    report = mend(home)

    assert report.replay_from == 3
    assert report.audit is not None
    assert (report.audit["replayed_from"], report.audit["clean"]) == (3, True)


def test_log_damaged_in_the_middle_goes_back_to_what_was_before_it(original, tmp_path):
    home = damages.copied(original.killed, tmp_path / "run")
    log = home / f"{LEDGER}-wal"
    damages.flip(log, log.stat().st_size * 3 // 4)

    report = mend(home)

    assert report.last_good is not None and 0 < report.last_good < 5
    assert report.audit is not None and report.audit["problems"] == []
    assert (home / "damaged-1" / f"{LEDGER}-wal").exists()
    assert not log.exists()
    served = damages.start(home)
    assert isinstance(served, Served), served
    assert served.digest == original.digests[report.last_good - 1]


@pytest.mark.parametrize("page", [1, 3, 5, 7, 9, 12, 15, 18, 21])
def test_ledger_with_a_page_of_zeros_is_repaired_or_said_to_be_lost(original, tmp_path, page):
    home = damages.copied(original.rest, tmp_path / "run")
    damages.zero_page(home / LEDGER, page)

    report = mend(home)

    assert not report.sound
    served = damages.start(home)
    if report.repairable:
        assert report.audit is not None and report.audit["problems"] == []
        assert isinstance(served, Served), served
        assert served.version == report.last_good
    else:
        assert isinstance(served, Refused), served
        assert report.weights != []


def test_ledger_without_its_first_page_leaves_weights_to_export(original, tmp_path):
    home = damages.copied(original.rest, tmp_path / "run")
    damages.zero_page(home / LEDGER, 0)
    before = files(home)

    report = mend(home)

    assert not report.repairable
    assert files(home) == before
    assert {w["version"] for w in report.weights if w["kind"] == "weights"} == {0, 3}


def test_directory_in_use_is_refused(original, tmp_path):
    home = damages.copied(original.rest, tmp_path / "run")

    held = closing(lock.hold(home))
    with held, pytest.raises(StateHeld, match=f"process {os.getpid()}"):
        mend(home)


def cut(*_: object) -> None:
    raise KeyboardInterrupt


def replacing_all_but_the_ledger(source: Path, target: Path) -> None:
    if Path(target).name == LEDGER:
        raise KeyboardInterrupt
    os.rename(source, target)


POINTS = {
    "before the swap": ("atoll.launch.repair_swap.os.replace", replacing_all_but_the_ledger),
    "after the swap": ("atoll.launch.repair_swap._put_aside", cut),
}


@pytest.mark.parametrize("point", POINTS)
def test_repair_that_was_cut_off_is_refused_and_taken_up(original, tmp_path, monkeypatch, point):
    home = damages.copied(original.rest, tmp_path / "run")
    flip_blob("round 5")(home, original)

    with monkeypatch.context() as patched:
        patched.setattr(*POINTS[point])
        with pytest.raises(KeyboardInterrupt):
            mend(home)
    refused = damages.start(home)
    report = mend(home)

    assert isinstance(refused, Refused)
    assert "was cut off" in str(refused)
    assert (report.last_good, report.keeps_open) == (4, False)
    assert isinstance(damages.start(home), Served)


KILLED_REPAIR = """
import os, signal, sys
from pathlib import Path
from atoll.launch import repair, repair_swap
point = sys.argv[2]
whole = getattr(repair_swap, point)
def killed(*args):
    if point == "_put_aside":
        whole(*args)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(repair_swap, point, killed)
repair.repair(Path(sys.argv[1]))
"""


@pytest.mark.parametrize("point", ["install", "_put_aside", "end"])
def test_repair_that_was_killed_is_taken_up_and_leaves_nothing_behind(original, tmp_path, point):
    """Before it changed anything, with one blob aside, and with all done but the marker."""
    home = damages.copied(original.rest, tmp_path / "run")
    flip_blob("round 5")(home, original)
    before = files(home)

    ended = subprocess.run([sys.executable, "-c", KILLED_REPAIR, str(home), point], check=False)
    left = list(home.glob("repair-*"))
    refused = damages.start(home)
    report = mend(home)

    assert ended.returncode == -signal.SIGKILL
    assert len(left) == 1
    assert isinstance(refused, Refused)
    assert report.last_good == 4
    assert list(home.glob("repair*")) == []
    kept = set(files(home).values())
    lost = [name for name, data in before.items() if data not in kept]
    assert [name for name in lost if not name.startswith("spool/")] == []
    assert isinstance(damages.start(home), Served)


def test_second_repair_has_a_directory_of_its_own(original, tmp_path):
    home = damages.copied(original.rest, tmp_path / "run")
    for name in ("round 5", "round 4"):
        flip_blob(name)(home, original)
        mend(home)

    assert (home / "damaged-1").is_dir() and (home / "damaged-2").is_dir()


def test_second_repair_knows_what_the_first_had_to_do_without(original, tmp_path):
    """The snapshot that stood in for an old contribution is damaged later: as both at once."""
    home = damages.copied(original.rest, tmp_path / "run")
    flip_blob("round 2")(home, original)
    first = mend(home)
    at_rest = look(home)

    flip_blob("master")(home, original)
    shown = look(home)
    second = mend(home)

    assert (first.last_good, first.replay_from, at_rest.damages) == (5, 3, [])
    assert (shown.last_good, second.last_good, second.replay_from) == (1, 1, 0)
    assert second.audit is not None and second.audit["problems"] == []
    assert look(home).sound
    served = damages.start(home)
    assert isinstance(served, Served), served
    assert (served.version, served.digest) == (1, original.digests[0])


# Stores outside the directory


def blobs_elsewhere(home: Path, place: Path) -> Path:
    """Moves a run's blobs to a place that its ledger then claims."""
    (home / "blobs").rename(place)
    with state.held(home, Addresses(blobs=str(place))):
        return home


def test_repair_of_an_old_copy_takes_no_blob_from_the_run_it_was_copied_from(original, tmp_path):
    """To the copy, what came later looks like the remains of lost records."""
    place = tmp_path / "blobs"
    older = damages.play(tmp_path / "older", rounds=2)
    older.close()
    live = blobs_elsewhere(damages.copied(original.rest, tmp_path / "live"), place)
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copyfile(older.home / LEDGER, copy / LEDGER)
    shutil.copyfile(live / "stores.json", copy / "stores.json")
    before = files(place)

    shown = look(copy)
    with pytest.raises(ConfigError, match=r"belongs to the ledger '.*live' on "):
        mend(copy)

    assert shown.put_aside != []
    assert files(place) == before
    assert look(live).sound


def test_run_with_blobs_elsewhere_is_repaired_by_its_own_directory(original, tmp_path):
    """The control of the test above."""
    place = tmp_path / "blobs"
    home = blobs_elsewhere(damages.copied(original.rest, tmp_path / "live"), place)
    damages.flip(place / original.blobs["round 5"][:2] / original.blobs["round 5"], 1000)

    report = mend(home)

    assert report.last_good == 4
    assert report.audit is not None and report.audit["problems"] == []
    aside = {path.name for path in (home / "damaged-1" / "blobs").iterdir()}
    assert aside == set(report.put_aside) >= {original.blobs["round 5"]}


@pytest.mark.s3
def test_run_with_blobs_in_s3_is_repaired_and_keeps_every_byte(original, tmp_path, s3_server):
    s3 = lives.s3_access(s3_server)
    address = f"s3://{servers.BUCKET}/repair-{uuid.uuid4().hex}"
    home = damages.copied(original.rest, tmp_path / "run")
    local = {path.name: path.read_bytes() for path in (home / "blobs").glob("??/*")}
    shutil.rmtree(home / "blobs")
    with state.held(home, Addresses(blobs=address), s3=s3, adopt_blobs=True) as at:
        for data in local.values():
            writer = at.blobs.writer()
            writer.write(data)
            writer.commit()
        at.blobs.delete(original.blobs["round 5"])

    report = repair.repair(home, s3=s3)

    assert (report.last_good, report.keeps_open) == (4, False)
    assert report.audit is not None and report.audit["problems"] == []
    aside = {path.name: path.read_bytes() for path in (home / "damaged-1" / "blobs").iterdir()}
    assert aside.keys() == set(report.put_aside) != set()
    assert [name for name, data in aside.items() if data != local[name]] == []
    left = state.open_blobs(home, Addresses(blobs=address), s3=s3)
    assert {ref.sha256 for ref in left.stored()} == (
        local.keys() - aside.keys() - {original.blobs["round 5"]}
    )
    left.close()


@pytest.mark.parametrize("form", ["{}", "sqlite:///{}"])
def test_ledger_elsewhere_is_looked_at_there_and_not_changed(original, tmp_path, form):
    home = damages.copied(original.rest, tmp_path / "run")
    far = tmp_path / "far.sqlite"
    (home / LEDGER).rename(far)
    stores = {"ledger": form.format(far), "blobs": None}
    (home / "stores.json").write_text(json.dumps(stores))
    sound = look(home)
    damages.by_hand(far, "UPDATE contributions SET norm = 9 WHERE round = 5")
    before = far.read_bytes()

    shown = look(home)
    with pytest.raises(StateDamaged, match="not in its state directory"):
        mend(home)

    assert sound.damages == []
    assert (shown.last_good, shown.published) == (4, 5)
    assert far.read_bytes() == before


# A full disk


def free_bytes(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def test_repair_on_a_full_disk_changes_nothing_or_is_whole(original, tmp_path, skip):
    """Whatever the room: at some sizes the new ledger fits its log and not its file."""
    step, refused, done = 64 << 10, 0, 0
    with mounts.small_disk(tmp_path / "disk", skip, nbytes=8 << 20) as disk:
        home = disk.path / "run"
        shutil.copytree(original.rest, home)
        flip_blob("round 5")(home, original)
        before = files(home)
        for room in range(step, 4 << 20, step):
            disk.fill()
            with (disk.path / "filler").open("r+b") as filler:
                filler.truncate(filler.seek(0, os.SEEK_END) - room + free_bytes(disk.path))
            try:
                report = mend(home)
            except StorageFull:
                refused += 1
                if not (home / state.REPAIR_FILE).exists():
                    assert {n: d for n, d in files(home).items() if "damaged-" not in n} == before
            else:
                done = room
                assert report.audit is not None and report.audit["problems"] == []
                break
            finally:
                disk.free()
        served = damages.start(home)

    assert refused > 3
    assert done
    assert isinstance(served, Served), served
    assert served.version == 4


# The command


def command(home: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["repair", str(home), *options], catch_exceptions=False)
    return result.exit_code, result.output


def test_command_shows_and_then_does(original, tmp_path):
    home = damages.copied(original.rest, tmp_path / "run")
    flip_blob("round 5")(home, original)

    shown = command(home)
    done = command(home, "--yes")
    again = command(home)

    assert shown[0] == 1
    assert original.blobs["round 5"] in shown[1]
    assert "last good round: 4 of 5" in shown[1]
    assert "would be dropped: 1 rounds, 3 contributions" in shown[1]
    assert "nothing has been changed" in shown[1]
    assert done[0] == 0
    assert "audit with replay: clean" in done[1]
    assert again == (0, again[1])
    assert "nothing is damaged" in again[1]


def test_command_reports_as_json(original, tmp_path):
    home = damages.copied(original.rest, tmp_path / "run")
    flip_blob("round 5")(home, original)

    code, shown = command(home, "--json")

    assert code == 1
    assert json.loads(shown)["last_good"] == 4


def test_command_says_how_to_export_what_is_left(original, tmp_path):
    home = damages.copied(original.rest, tmp_path / "run")
    damages.zero_page(home / LEDGER, 0)

    code, shown = command(home, "--yes")

    assert code == 1
    assert "no round can be rebuilt" in shown
    [words] = [line for line in shown.splitlines() if "atoll export" in line]
    options = words.partition("atoll export ")[2].partition(";")[0].split()
    target = str(tmp_path / "m.safetensors")
    result = CliRunner().invoke(app, ["export", *options[:-1], target], catch_exceptions=False)
    assert result.exit_code == 0
    kept = {name: tensor for name, tensor in load_file(target).items()}
    assert sum(tensor.numel() for tensor in kept.values()) == SMALL.size


def test_audit_of_a_directory_under_repair_is_refused(original, tmp_path):
    home = damages.copied(original.rest, tmp_path / "run")
    (home / state.REPAIR_FILE).write_text('{"folder": "damaged-1"}')

    with pytest.raises(StateDamaged, match="was cut off"), state.at_rest(home):
        pass


def test_islands_follow_a_repair_that_goes_back_before_a_change_of_settings(tmp_path):
    """They have adopted a version, and take none that is older."""
    cluster = damages.play(tmp_path / "run")
    cluster.coordinator.set_outer_lr(0.5)
    HandIsland(cluster, "b").join().contribute()
    cluster.settle()
    adopted = cluster.coordinator.info()
    lost = (
        alone(cluster.ledger).contributions.of_round(5)[0].sha256,
        alone(cluster.ledger).snapshots.all()[-1].master_sha256,
    )
    cluster.close()
    for sha256 in lost:
        blob(tmp_path / "run", sha256).unlink()

    report = mend(tmp_path / "run")

    assert (adopted.manifest_version, report.last_good) == (2, 4)
    repaired = Cluster(tmp_path / "run", damages.SETTINGS)
    adoption.check(adopted, repaired.coordinator.info())
    islands = [HandIsland(repaired, name) for name in ("a", "b")]
    for island in islands:
        island.adopt(adopted)
        island.join()
    repaired.rounds(2, *islands)
    assert repaired.audit(with_replay=True).problems == []
    repaired.close()
