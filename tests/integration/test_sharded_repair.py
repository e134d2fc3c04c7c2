"""`atoll repair` of a sharded run: back to the newest checkpoint whose blobs are whole."""

from pathlib import Path

import pytest

from atoll.errors import StateDamaged
from atoll.launch import repair
from atoll.ledger.records import LeaseState
from tests.clusters import tamper
from tests.hand_ranks import Sea
from tests.ledgers import alone


def run(home, *, rounds=3, **changes):
    """A run with so many checkpoints, stopped; its ranks, who keep their disks."""
    sea = Sea(home, changes)
    ranks = sea.formed(*sea.ranks("a", "b", "c"))
    for number in range(1, rounds + 1):
        sea.trained(ranks, number)
        assert sea.settle() == 1
    return sea, ranks


@pytest.fixture
def stopped(tmp_path):
    sea, ranks = run(tmp_path)
    yield sea, ranks
    sea.close()


def blobs_of(sea, number):
    return alone(sea.ledger).checkpoints.all()[number - 1].blobs


def file_of(sea, blob):
    return sea.home / "blobs" / blob[:2] / blob


def spoil(sea, *numbers, rank=1):
    for number in numbers:
        path = file_of(sea, blobs_of(sea, number)[rank])
        data = bytearray(path.read_bytes())
        data[30] ^= 1
        path.write_bytes(data)


def checkpoints(sea):
    return [c.round for c in alone(sea.ledger).checkpoints.all()]


def test_look_names_the_blob_and_the_last_good_round_and_changes_nothing(stopped):
    sea, _ = stopped
    before, blob = sea.state_hash(), blobs_of(sea, 3)[1]
    spoil(sea, 3)
    sea.close()

    report = repair.look(sea.home)

    assert (report.published, report.last_good, report.repairable) == (3, 2, True)
    [damage] = report.damages
    assert f"blob {blob} of the checkpoint of step 18" in damage
    assert (report.dropped.rounds, report.dropped.rows) == (1, 30)
    sea.open_stores()
    assert sea.ledger.state_hash() == before


def test_repaired_run_goes_on_from_the_whole_checkpoint(stopped):
    sea, ranks = stopped
    spoil(sea, 3)
    lost, group = set(blobs_of(sea, 3)), sea.group.number
    sea.close()

    report = repair.repair(sea.home)

    assert report.audit is not None and report.audit["clean"]
    assert lost <= set(report.put_aside)
    aside = {path.name for path in Path(str(report.aside)).rglob("*")}
    assert lost | {"ledger.sqlite"} <= aside  # nothing is deleted
    sea.restart()
    assert checkpoints(sea) == [1, 2]
    formed = sea.formed(*(rank.join() for rank in ranks))
    found = formed[0].formed
    assert found.group > group
    # Saves of steps that are gone are on all disks, and nobody goes back to them.
    assert (found.restore.source, found.restore.step) == ("checkpoint", 12)
    assert [i.round for i in found.intervals] == [3, 4]
    for number in (3, 4):
        sea.trained(formed, number)
        assert sea.settle() == 1
    assert checkpoints(sea) == [1, 2, 3, 4]
    assert sea.audit().clean
    done = [x for x in alone(sea.ledger).leases.of_round(3) if x.state is LeaseState.DONE]
    assert sum(x.stop - x.start for x in done) == 30


def test_damaged_older_checkpoint_costs_no_round(stopped):
    sea, ranks = stopped
    spoil(sea, 1)
    assert not sea.audit().clean
    sea.close()

    report = repair.repair(sea.home)

    assert (report.last_good, report.replay_from, report.dropped.rounds) == (3, 2, 0)
    assert report.audit is not None and report.audit["clean"]
    assert repair.look(sea.home).sound
    sea.restart()
    found = sea.formed(*(rank.join() for rank in ranks))[0].formed.restore
    assert (found.source, found.step) == ("save", 18)


def test_run_without_a_whole_checkpoint_goes_back_to_its_start(stopped):
    sea, ranks = stopped
    spoil(sea, 1, 2, 3)
    sea.close()

    report = repair.repair(sea.home)

    assert (report.last_good, report.dropped.rounds) == (0, 3)
    assert report.audit is not None and report.audit["clean"]
    sea.restart()
    found = sea.formed(*(rank.join() for rank in ranks))[0].formed
    assert (found.restore.source, found.intervals[0].round) == ("initial", 1)


def test_checkpoints_that_were_pruned_are_not_missed_after_a_cut(tmp_path):
    pruned = {"storage.retain": "snapshots", "storage.keep_snapshots": 2}
    sea, _ = run(tmp_path, rounds=4, **pruned)
    spoil(sea, 4)
    sea.close()

    report = repair.repair(sea.home)

    assert report.last_good == 3
    assert report.audit is not None and report.audit["clean"]


def test_missing_part_of_a_checkpoint_under_way_costs_what_is_open(stopped):
    sea, ranks = stopped
    for rank in ranks:
        rank.save(21)
        rank.save(24)
    ranks[0].hand_in(4)
    [part] = alone(sea.ledger).checkpoints.every_part()
    file_of(sea, part.blob).unlink()
    with pytest.raises(StateDamaged, match=part.blob):
        sea.restart()
    sea.close()

    report = repair.repair(sea.home)

    assert report.last_good == 3
    assert report.audit is not None and report.audit["clean"]
    sea.restart()
    assert checkpoints(sea) == [1, 2, 3]


@pytest.mark.parametrize(
    ("table", "where", "change", "last_good"),
    [
        ("checkpoints", {"round": 2}, {"rows": 31}, 1),
        ("saves", {"step": 18, "rank": 1}, {"own": "f" * 64}, 3),
        ("groups", {"is_over": False}, {"step": 3}, 3),
    ],
)
def test_changed_records_of_a_sharded_run_are_cut_away(stopped, table, where, change, last_good):
    sea, ranks = stopped
    tamper(sea.ledger, table, where, **change)
    sea.close()

    report = repair.repair(sea.home)

    assert (report.last_good, len(report.damages) > 0) == (last_good, True)
    assert report.audit is not None and report.audit["clean"]
    sea.restart()
    found = sea.formed(*(rank.join() for rank in ranks))[0].formed.restore
    assert (found.source, found.step) == ("checkpoint", 6 * last_good)
