"""Malformed objects and statements through the whole accept path: none is taken, others go on."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import AtollError, LeftOut
from atoll.gather import publish
from atoll.gather import statement as statements
from atoll.protocol import gather
from atoll.wire import frame as frames
from tests import gather_objects as objects
from tests import hostile_objects as hostile
from tests.clusters import Frame
from tests.hostile_objects import Hostile
from tests.publishing import GatherCluster, PublishingIsland

pytestmark = pytest.mark.usefixtures("one_thread")

COUNT = 800


class Forgiving(GatherCluster):
    """Counts skips and does nothing about them."""

    skipped: Counter[str]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[tuple[Forgiving, PublishingIsland]]:
    """An island in a run whose skips leave it its rows: it may try as often as it likes."""
    cluster = Forgiving(tmp_path, layout=objects.SMALL)
    h, _, _ = cluster.islands("hij")
    rounds = cluster.coordinator.rounds

    def skip(*_: object, reason: str, **__: object) -> bool:
        skipped[reason] += 1
        rounds.__dict__["_announced"] = {}
        return True

    skipped: Counter[str] = Counter()
    rounds.__dict__["skip"] = skip
    cluster.skipped = skipped
    yield cluster, h
    cluster.close()


@pytest.fixture
def drawing(run, monkeypatch) -> Iterator[Hostile]:
    """Hostile objects as this very island would make them, for the round that is open."""
    _, h = run
    header = h.header(h.assignment())

    def header_of(_: object = None, **changes: Any) -> Any:
        return replace(header, **changes)

    def stated(data: bytes, _: object = None, **changes: Any) -> Any:
        told = {"sample_digest": gather.sample_digest(header.ranges), **changes}
        return right(data, **told)

    right = objects.stated
    monkeypatch.setattr(objects, "header_of", header_of)
    monkeypatch.setattr(hostile, "stated", stated)
    monkeypatch.setattr(hostile, "KEY", h.signing)
    good = objects.object_of(hostile.PAYLOAD)
    monkeypatch.setattr(hostile, "GOOD", good)
    monkeypatch.setattr(hostile, "HEADER", header.to_json())
    monkeypatch.setattr(hostile, "GOOD_DOCUMENT", statements.signed(stated(good), h.signing))
    return hostile.drawn(COUNT, seed=11)


def announced(h: PublishingIsland, one: Hostile) -> AtollError | str:
    """Publishes the object where the statement points, and announces both; what comes of it."""
    sha256, nbytes = hashlib.sha256(one.data).hexdigest(), len(one.data)
    try:
        told = statements.unverified(one.document)
        sha256, nbytes = told.sha256, told.nbytes
    except AtollError:
        pass
    prefix = gather.prefix_of(h.identity.run_id, h.name)
    key = publish.frame_key(prefix, sha256)
    h.place.inner.put(key, one.data)
    try:
        preamble = one.data[: frames.parse_preamble(one.data)[1]]
    except AtollError:
        preamble = hostile.GOOD[: frames.parse_preamble(hostile.GOOD)[1]]
    sent = Frame(preamble, len(preamble))
    document = one.document if len(one.document) <= 4096 else one.document[:4096]
    try:
        changes = {"sha256": sha256, "nbytes": min(nbytes, 2**53), "document": document}
        reply = h.announce(sent, **changes)
    except AtollError as error:
        return error
    finally:
        h.place.inner.remove(key)
    return reply.receipt or reply.waits_for


def test_malformed_objects_are_refused_each_by_name_and_change_nothing(run, drawing):
    cluster, h = run
    before = cluster.coordinator.state_hash()

    found = [(one, announced(h, one)) for one in drawing]

    assert [(one.kind, told) for one, told in found if not isinstance(told, AtollError)] == []
    left_out = sum(isinstance(told, LeftOut) for _, told in found)
    assert left_out >= 0.9 * COUNT, Counter(type(told) for _, told in found)
    assert cluster.coordinator.state_hash() == before
    assert cluster.drafts() == []
    met = {"SIZE", "SIGNATURE", "STATEMENT", "FRAME", "INDICES", "TABLE", "NORM"}
    assert met <= set(cluster.skipped)


def test_good_one_among_them_is_taken(run, drawing):
    """The control: what is refused is what was changed."""
    _, h = run
    for one, _ in zip(drawing, range(50), strict=False):
        announced(h, one)

    told = announced(h, Hostile("good", hostile.GOOD_DOCUMENT, hostile.GOOD))

    assert isinstance(told, str) and len(told) == 64
