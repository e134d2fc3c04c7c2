"""A window from publishing to the merged result: real threads, spools, frames and validator."""

import hashlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from atoll.blobs.bucket import Bucket
from atoll.blobs.directory_bucket import DirectoryBucket
from atoll.blobs.memory_bucket import MemoryBucket
from atoll.clock import SystemClock
from atoll.collectives.base import Collectives
from atoll.errors import Conflict
from atoll.gather.budget import Budget
from atoll.gather.errand import Pace
from atoll.gather.fetch import Fetcher
from atoll.gather.keys import SecretKey
from atoll.gather.merge import readable
from atoll.gather.peers import Peer, PeerList
from atoll.gather.publish import publish, statement_key
from atoll.gather.reserves import Gather
from atoll.gather.result import Merged
from atoll.gather.spool import Spool, SpoolSlices
from atoll.gather.statement import Statement
from atoll.gather.turns import Turns
from atoll.gather.validate import Expected, Validator
from atoll.gather.words import Reason
from tests import gather_objects as objects
from tests.rank_groups import threads

LAYOUT = objects.LARGE
CLOCK = SystemClock()
PRIMARIES = [f"p{k}" for k in range(5)]
RESERVES = ["r0", "r1"]
WINDOW = objects.header_of(LAYOUT).round
PACE = Pace(turn_seconds=5.0, patience_seconds=0.2)  # the machine may be busy; nothing is slow


def secret(uid: str) -> SecretKey:
    return SecretKey(hashlib.sha256(uid.encode()).digest())


def payload(uid: str) -> bytes:
    values = objects.values_for(LAYOUT, seed=PRIMARIES.index(uid) if uid in PRIMARIES else 77)
    return objects.payload_of(values)


def frame_of(uid: str) -> bytes:
    return objects.object_of(payload(uid), LAYOUT, worker_id=uid)


def expected(uid: str) -> Expected:
    return objects.expected(LAYOUT, uid=uid)


def validator_of(peer: Peer, statement: Statement) -> Validator:
    return Validator(expected(peer.uid), statement)


def filled(bucket: Bucket) -> Bucket:
    """`p1` published nothing, `p3` another's frame, re-signed; `r0` another window."""
    for uid in (*PRIMARIES, *RESERVES):
        data = frame_of("p0" if uid == "p3" else uid)
        told = objects.stated(data, LAYOUT, uid=uid)
        publish(bucket, f"peers/{uid}", data, told, secret(uid), keep=3, deadline=CLOCK.now() + 30)
    bucket.remove(statement_key("peers/p1", WINDOW))
    key = statement_key("peers/r0", WINDOW)
    tag = bucket.look(statement_key("peers/r1", WINDOW), deadline=CLOCK.now() + 5)
    assert tag is not None
    other = b"".join(
        bytes(piece)
        for piece in bucket.pieces(
            statement_key("peers/r1", WINDOW), tag, 0, tag.nbytes, deadline=CLOCK.now() + 5
        )
    )
    bucket.put(key, other)
    return bucket


def gathered(bucket: Bucket, home: Path, ranks: Collectives) -> Merged:
    budget = Budget.of(64 << 20, peers=7, ranks=ranks.size, layout=LAYOUT, codec=objects.CODEC)
    by = Fetcher(
        window=WINDOW,
        buckets={"main": bucket},
        validator_of=validator_of,
        spool=Spool(home / f"{ranks.size}-{ranks.rank}"),
        clock=CLOCK,
        slots=budget.slots,
        piece_bytes=budget.piece_bytes,
        rank=ranks.rank,
        pace=PACE,
    )

    def peer(uid: str) -> Peer:
        return Peer(uid, secret(uid).public, "main", f"peers/{uid}")

    lists = PeerList(tuple(map(peer, PRIMARIES)), tuple(map(peer, RESERVES)))
    gather = Gather(
        ranks=ranks,
        turns=Turns(1, WINDOW),
        clock=CLOCK,
        fetch=lambda peers, deadline: by.fetch(peers, deadline=deadline),
        layout=LAYOUT,
        sizes=dict.fromkeys((*PRIMARIES, *RESERVES), 1000),
    )
    return gather.run(lists, seconds=60.0)


@pytest.fixture(params=["memory", "directory"])
def bucket(request: Any, tmp_path: Path) -> Bucket:
    if request.param == "memory":
        return filled(MemoryBucket(CLOCK))
    return filled(DirectoryBucket(tmp_path / "bucket", CLOCK))


def test_window_is_the_same_at_every_number_of_ranks_and_has_the_validators_norms(bucket, tmp_path):
    found: list[Merged] = []
    for size in (1, 2, 3):
        found += threads(size, "direct", partial(gathered, bucket, tmp_path))

    first = found[0]
    assert all(one == first and one.digest == first.digest for one in found)
    assert first.uids == ("p0", "p2", "p4", "r1")
    assert first.reasons == {
        "p1": Reason.MISSING,
        "p3": Reason.FRAME,
        "r0": Reason.SIGNATURE,
    }
    assert first.success_rate == 4 / 5
    for one in first.accepted:
        data = frame_of(one.uid)
        alone = objects.fed(
            Validator(expected(one.uid), objects.stated(data, LAYOUT, uid=one.uid)), data, 999
        )
        assert (one.squares, one.sha256) == (alone.squares, alone.sha256)


def test_payloads_are_read_where_they_begin(bucket, tmp_path):
    [merged] = threads(1, "direct", partial(gathered, bucket, tmp_path))
    places = {one.uid: (one.sha256, one.payload_start) for one in merged.accepted}

    with SpoolSlices(Spool(tmp_path / "1-0"), places) as source:
        whole = {uid: source.read(uid, 0, len(payload(uid))) for uid in merged.uids}
        lists: Mapping[str, list[Any]] = readable(
            merged, layout=LAYOUT, codec=objects.CODEC, source=source
        ).state_dict
        sent = {
            uid: len(places) for uid, places in zip(merged.uids, lists["embedvals"], strict=True)
        }

    assert whole == {uid: payload(uid) for uid in merged.uids}
    assert min(sent.values()) > 4_000


def test_statement_is_never_replaced(bucket):
    """The peer's side of a conflict: what was stated first stands."""
    data = frame_of("p2")
    told = objects.stated(data, LAYOUT, uid="p2", sample_digest="6" * 64)

    with pytest.raises(Conflict):
        publish(bucket, "peers/p2", data, told, secret("p2"), keep=3, deadline=CLOCK.now() + 30)
