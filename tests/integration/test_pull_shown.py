"""What a gather run shows and proves: status, Prometheus numbers, audit, HTTP."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from atoll.cli import output
from atoll.cli import status as shown
from atoll.clock import SystemClock
from atoll.coordinator.planes import access
from atoll.coordinator.planes import app as planes
from atoll.coordinator.planes.access import Access
from atoll.coordinator.shown import gathers, metrics
from atoll.errors import LeftOut, WrongRound
from atoll.gather import statement as statements
from atoll.ledger.ledger import Ledger
from tests import clusters
from tests.clusters import Cluster, tamper
from tests.ledgers import alone
from tests.publishing import GatherCluster, PublishingIsland


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[GatherCluster]:
    made = GatherCluster(tmp_path, {"gather.primaries": 2})
    yield made
    made.close()


def fail(island: PublishingIsland) -> None:
    sent = island.publish(island.frame())
    island.place.inner.remove(island.key_of(sent))
    with pytest.raises(LeftOut):
        island.announce(sent)


@pytest.fixture
def busy(cluster: GatherCluster) -> GatherCluster:
    """In round 2 of a, b, c and d: a is in, b is skipped, c has stepped in."""
    a, b, c, _ = cluster.islands("abcd")
    a.contribute_by_pull()
    fail(b)
    c.contribute_by_pull()
    return cluster


def test_numbers_are_exported(busy):
    busy.coordinator.counters.measured[gathers.OVERLAP] = 0.25
    lines = metrics.render(busy.coordinator.status()).decode().splitlines()

    pulled = sum(busy.held["main"].sent.values())
    assert "atoll_gather_accepted_total 4.0" in lines
    assert "atoll_gather_reserves_used_total 1.0" in lines
    assert f"atoll_gather_pulled_bytes_total {float(pulled)}" in lines
    assert 'atoll_gather_skipped_total{reason="MISSING"} 1.0' in lines
    assert "atoll_gather_overlap 0.25" in lines


def test_other_runs_export_none_of_them(tmp_path):
    plain = Cluster(tmp_path)

    lines = metrics.render(plain.coordinator.status()).decode()

    assert "atoll_gather" not in lines and plain.coordinator.status().gather is None
    plain.close()


def test_status_tells_primaries_reserves_and_skips(busy):
    with output.console.capture() as told:
        output.console.print(shown.view(busy.coordinator.status()), width=400)

    text = " ".join(told.get().split())
    assert "primaries a, b; reserves c, d; skipped in this round: 1 MISSING" in text


def test_skips_of_earlier_rounds_stay_counted(busy):
    assert busy.settle() == 1

    found = busy.coordinator.status().gather

    assert (found.skips, found.all_skips) == ({}, {"MISSING": 1})


# The proof


def test_audit_is_clean_and_reads_every_statement(busy):
    busy.settle()

    assert busy.audit(with_replay=True).problems == []


def forge(a: PublishingIsland, ledger: Ledger, **changes: object) -> str:
    """What another key signs in the place of a's statement."""
    found = alone(ledger).announcements.get(1, "a")
    assert found is not None
    before = statements.unverified(found.statement.encode())
    told: dict[str, Any] = {**before.plain(), **changes}
    key = a.signing if changes else PublishingIsland(a.cluster, "forger").signing
    return statements.signed(statements.Statement(**told), key).decode()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "is not signed by the key"),
        ({"sample_digest": "0" * 64}, "sample_digest='0000"),
        ({"window": 7}, "window=7 is stated, recorded is 1"),
        ({"base_digest": "0" * 64}, "base_digest"),
        ({"nbytes": 1}, "nbytes=1"),
    ],
)
def test_audit_finds_a_statement_that_was_forged_in_the_ledger(cluster, changes, told):
    a, b = cluster.islands("ab")
    for island in (a, b):
        island.contribute_by_pull()
    cluster.settle()
    forged = forge(a, cluster.ledger, **changes)
    where = {"round": 1, "worker_id": "a"}
    tamper(cluster.ledger, "announcements", where, statement=forged)

    [problem] = cluster.audit().problems

    assert (problem.round, problem.what) == (1, "statement")
    assert "of 'a': " in problem.detail and told in problem.detail


def test_audit_finds_a_contribution_that_nobody_stated(cluster):
    a, b = cluster.islands("ab")
    for island in (a, b):
        island.contribute_by_pull()
    cluster.settle()
    clusters.remove(cluster.ledger, "announcements", round=1, worker_id="b")

    [problem] = cluster.audit().problems

    assert "of 'b': none is recorded" in problem.detail


def test_audit_finds_a_key_that_was_changed(cluster):
    a, b = cluster.islands("ab")
    for island in (a, b):
        island.contribute_by_pull()
    cluster.settle()
    other = PublishingIsland(cluster, "other").signing.public.hex
    tamper(cluster.ledger, "publishers", {"worker_id": "b"}, public_key=other)

    assert [p.what for p in cluster.audit().problems] == ["statement"]


def test_window_is_refused_before_it_is_published(cluster):
    a, _ = cluster.islands("ab")

    with pytest.raises(WrongRound, match="round 9 is not published"):
        a.window(9)


# Over HTTP

HEADERS = {"authorization": "Bearer token", "content-type": "application/json"}


def test_reserve_that_waits_is_answered_when_its_turn_comes(cluster):
    """A long poll: it is woken by what becomes of others, and asks nobody again."""
    a, b, c, _ = cluster.islands("abcd")
    a.contribute_by_pull()
    said = c.announcement(c.publish(c.frame()), wait_seconds=30.0)
    has_announced = threading.Event()
    cluster.coordinator.on_change(has_announced.set)
    app = planes.create(
        cluster.coordinator, Access({"worker": access.token_hash("token")}), SystemClock()
    )
    replies: list[Any] = []

    with TestClient(app, headers=HEADERS) as client:

        def ask() -> None:
            replies.append(client.post(said.target(), content=said.model_dump_json()))

        asking = threading.Thread(target=ask)
        asking.start()
        assert has_announced.wait(30.0)
        fail(b)
        asking.join(30.0)
        again = client.post(said.target(), content=said.model_dump_json())

    assert [reply.status_code for reply in (*replies, again)] == [200, 200]
    assert replies[0].json() == again.json() and replies[0].json()["receipt"]


def test_what_a_round_goes_on_without_is_told_over_http(cluster):
    a, *_ = cluster.islands("abcd")
    sent = a.frame()
    app = planes.create(
        cluster.coordinator, Access({"worker": access.token_hash("token")}), SystemClock()
    )
    said = a.announcement(sent)

    with TestClient(app, headers=HEADERS) as client:
        reply = client.post(said.target(), content=said.model_dump_json())

    assert (reply.status_code, reply.json()["code"]) == (409, "LEFT_OUT")
