"""Publishers, announcements, skips and artifacts in every ledger."""

from dataclasses import replace
from pathlib import Path

import pytest

from atoll.errors import Conflict, StoreError
from atoll.ledger import engines
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import AnnouncementRecord, PublisherRecord, SkipRecord
from atoll.ledger.sqlite import truncation
from tests import ledgers
from tests.ledgers import PUBLISHED, alone

KEYS = {name: name * 64 for name in "ab"}
ANNOUNCED = AnnouncementRecord(1, "a", '{"signature":""}', 1_700_000_000.125)


def skip(ledger: Ledger, worker_id: str, reason: str = "SIZE") -> SkipRecord:
    with ledger.writing() as t:
        return t.skips.add(1, worker_id, reason=reason, sentence="é", wall=1.5)


def test_publisher_stands_for_good(started: Ledger):
    mine = PublisherRecord("a", KEYS["a"], "main")
    alone(started).publishers.add(mine)
    alone(started).publishers.add(mine)

    for other in (replace(mine, public_key=KEYS["b"]), replace(mine, bucket="other")):
        with pytest.raises(Conflict, match="publishes into 'main'"):
            alone(started).publishers.add(other)

    assert alone(started).publishers.all() == [mine] == [alone(started).publishers.get("a")]


def test_key_is_that_of_one_worker(started: Ledger):
    alone(started).publishers.add(PublisherRecord("a", KEYS["a"], "main"))

    with pytest.raises(StoreError):
        alone(started).publishers.add(PublisherRecord("b", KEYS["a"], "main"))

    assert alone(started).publishers.get("b") is None


def test_announcement_comes_back_as_it_was(started: Ledger):
    untimed = replace(ANNOUNCED, worker_id="b", stamp=None)
    for made in (untimed, ANNOUNCED):
        alone(started).announcements.add(made)

    assert alone(started).announcements.get(1, "a") == ANNOUNCED
    assert alone(started).announcements.of_round(1) == [ANNOUNCED, untimed]
    assert alone(started).announcements.of_round(2) == []


def test_skips_of_a_worker_are_counted_on(started: Ledger):
    made = [skip(started, "b"), skip(started, "a", "NORM"), skip(started, "b")]

    assert [one.number for one in made] == [1, 1, 2]
    assert alone(started).skips.of_round(1) == [made[1], made[0], made[2]]
    assert alone(started).skips.by_reason() == {"NORM": 1, "SIZE": 2}


def test_round_keeps_the_hash_of_its_artifact(started: Ledger):
    alone(started).rounds.freeze(1, None, ended=[])
    alone(started).rounds.publish(1, replace(PUBLISHED, artifact_sha256="a" * 64))

    [found] = alone(started).rounds.all()

    assert found.artifact_sha256 == "a" * 64


def test_copy_has_all_of_it_and_is_sealed(started: Ledger, tmp_path: Path):
    alone(started).publishers.add(PublisherRecord("a", KEYS["a"], "main"))
    alone(started).announcements.add(ANNOUNCED)
    skip(started, "b")
    started.copy_to(str(tmp_path / "copy.sqlite"))

    copied = engines.open_ledger(tmp_path / "copy.sqlite")

    assert copied.damage() == []
    assert copied.state_hash() == started.state_hash()
    copied.close()


def test_going_back_before_a_round_forgets_what_was_pulled_for_it(tmp_path: Path):
    ledger = engines.open_ledger(tmp_path / "ledger.db")
    alone(ledger).run.create(ledgers.RUN, ledgers.MANIFEST)
    for name in "ab":
        alone(ledger).members.register(name, f"key {name}", wall=0.0)
    alone(ledger).rounds.begin([ledgers.plan(1, [ledgers.lease(1, "a", 0, 16)])])
    alone(ledger).announcements.add(ANNOUNCED)
    skip(ledger, "b")

    with ledger.writing() as t:
        truncation.truncate(t, last_round=0)

    assert alone(ledger).announcements.of_round(1) == []
    assert alone(ledger).skips.by_reason() == {}
    assert ledger.damage() == []
    ledger.close()


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE publishers SET bucket = 'x'",
        "UPDATE announcements SET stamp = 0",
        "DELETE FROM skips",
        "UPDATE rounds SET artifact_sha256 = 'x'",
    ],
)
def test_change_from_elsewhere_does_not_go_unseen(tmp_path: Path, change: str):
    ledger = engines.open_ledger(tmp_path / "ledger.db")
    alone(ledger).run.create(ledgers.RUN, ledgers.MANIFEST)
    alone(ledger).members.register("a", "key a", wall=0.0)
    alone(ledger).rounds.begin([ledgers.plan(1, [ledgers.lease(1, "a", 0, 16)])])
    alone(ledger).publishers.add(PublisherRecord("a", KEYS["a"], "main"))
    alone(ledger).announcements.add(ANNOUNCED)
    skip(ledger, "a")
    assert ledger.damage() == []

    with ledgers.bare(ledger) as connection:
        connection.change(change)

    assert len(ledger.damage()) == 1
    ledger.close()
