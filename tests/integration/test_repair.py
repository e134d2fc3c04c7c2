"""A damaged run is taken back to its last good round, nothing is deleted, and it goes on."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from atoll.cli.app import app
from atoll.errors import StateDamaged, StateHeld
from atoll.launch import repair, state
from atoll.launch.repair import RepairReport
from atoll.ledger import lock
from tests import damages
from tests.clusters import SMALL, one_thread  # noqa: F401
from tests.damages import Refused, Served

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
    run = cluster.ledger.run()
    assert run is not None
    [snapshot] = cluster.ledger.snapshots()
    blobs = {
        "initial": run.initial_sha256,
        "round 2": cluster.ledger.contributions(2)[0].sha256,
        "round 4": cluster.ledger.contributions(4)[0].sha256,
        "round 5": cluster.ledger.contributions(5)[0].sha256,
        "round 6": cluster.ledger.contributions(6)[0].sha256,
        "master": snapshot.master_sha256,
        "momentum": dict(snapshot.slots_sha256)["momentum"],
    }
    found = Original(home / "rest", killed, cluster.digests_by_round(), blobs)
    cluster.close()
    return found


def blob(home: Path, sha256: str) -> Path:
    return home / "blobs" / sha256[:2] / sha256


def look(home: Path) -> RepairReport:
    return repair.look(home, pid=1, wall=0.0)


def mend(home: Path) -> RepairReport:
    return repair.repair(home, pid=1, wall=0.0)


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

    with lock.hold(home, pid=77, wall=0.0), pytest.raises(StateHeld, match="process 77"):
        mend(home)


def cut(*_: object) -> None:
    raise KeyboardInterrupt


def replacing_all_but_the_ledger(source: Path, target: Path) -> None:
    if Path(target).name == LEDGER:
        raise KeyboardInterrupt
    os.rename(source, target)


POINTS = {
    "before the swap": ("atoll.launch.repair.os.replace", replacing_all_but_the_ledger),
    "after the swap": ("atoll.launch.repair._put_aside", cut),
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


def test_second_repair_has_a_directory_of_its_own(original, tmp_path):
    home = damages.copied(original.rest, tmp_path / "run")
    for name in ("round 5", "round 4"):
        flip_blob(name)(home, original)
        mend(home)

    assert (home / "damaged-1").is_dir() and (home / "damaged-2").is_dir()


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

    with pytest.raises(StateDamaged, match="was cut off"), state.at_rest(home, pid=1, wall=0.0):
        pass
