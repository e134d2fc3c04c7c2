"""Who has the group's key can sign a record, but not for its peers: each lie is found by its name.

Every forgery is whole: sizes, hashes, factors, chain, digest and the group's signature are right.
The control is that without the check it is accepted.
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.blobs.bucket import Bucket
from atoll.blobs.memory_bucket import MemoryBucket
from atoll.errors import FrameError, StateDamaged
from atoll.gather import artifact as artifacts
from atoll.gather import clip, regrouped
from atoll.gather import statement as statements
from atoll.gather.artifact import Artifact
from atoll.gather.keys import SecretKey
from atoll.gather.partial import Accepted
from atoll.gather.rebuild import Trust
from atoll.layout import Span
from atoll.wire import frame
from tests import gather_reference as naive
from tests import gather_windows as windows
from tests import gathers
from tests.gather_late import Counted, Late, caught_up, content, copied
from tests.gather_windows import EMITTER, LAYOUT, World, same

UIDS = ("10", "7", "8", "9")
Peers = dict[str, tuple[Accepted, bytes]]  # each with its frame


@pytest.fixture(scope="module")
def gathered(tmp_path_factory) -> World:
    """One window, and the statements of the next."""
    world = World(tmp_path_factory.mktemp("group"))
    world.publish(*UIDS)
    world.run(2)
    world.publish("7")
    return world


@pytest.fixture
def bucket(gathered) -> Bucket:
    return copied(gathered.bucket)


def found_in(bucket: Bucket) -> Artifact:
    found = windows.archive(bucket).find(0)
    assert found is not None
    return found.artifact


def peers_of(bucket: Bucket) -> Peers:
    return {
        one.uid: (one, content(bucket, f"peers/{one.uid}/frames/{one.sha256}"))
        for one in found_in(bucket).accepted
    }


def reframed(data: bytes, payload: bytes) -> bytes:
    """A frame with another payload, whole."""
    before = data[: len(data) - frame.TRAILER_BYTES - len(payload)] + payload
    return before + hashlib.sha256(before).digest()


def told_of(one: Accepted, data: bytes) -> Accepted:
    """What an honest emitter would say of that frame."""
    payload = data[one.payload_start : -frame.TRAILER_BYTES]
    squares = tuple(naive.squares(payload, gathers.SIZES))
    return replace(one, sha256=hashlib.sha256(data).hexdigest(), squares=squares)


def signed(one: Accepted, key: SecretKey) -> Accepted:
    """With a statement of what it says, by `key`."""
    stated = statements.unverified(one.statement.encode())
    changed = replace(stated, uid=one.uid, sha256=one.sha256, nbytes=one.nbytes)
    return replace(one, statement=statements.signed(changed, key).decode())


def store(bucket: Bucket, made: Artifact, peers: Peers, digest: str) -> None:
    """Puts a forged artifact in place of the right one."""
    accepted = tuple(one for one, _ in peers.values())
    payloads = [data[one.payload_start : -frame.TRAILER_BYTES] for one, data in peers.values()]
    tile = [list(payload) for payload in payloads]
    whole = b"".join(data[: one.payload_start] for one, data in peers.values())
    whole += regrouped.flat(np.array(tile, np.uint8), Span(0, LAYOUT.size))
    forged = replace(
        made,
        accepted=accepted,
        weights=(*made.weights, 1)[: len(accepted)],
        factors=tuple(
            tuple(row) for row in clip.factors([one.squares for one in accepted]).tolist()
        ),
        digest=digest,
        body_bytes=len(whole),
        body_sha256=hashlib.sha256(whole).hexdigest(),
    )
    bucket.put(f"archive/bodies/{forged.body_sha256}", whole)
    bucket.put("archive/windows/00000000.json", artifacts.signed(forged, EMITTER))


# What a holder of the group's key may try; each gives the peers that its record has.


def other_payload(_: Bucket, peers: Peers) -> None:
    """Another payload, under the peer's old statement."""
    one, data = peers["7"]
    data = reframed(data, gathers.payload(99))
    peers["7"] = told_of(one, data), data


def other_bytes(_: Bucket, peers: Peers) -> None:
    """Another payload, and a record that still names the peer's own object."""
    one, data = peers["7"]
    forged = reframed(data, gathers.payload(99))
    peers["7"] = replace(told_of(one, forged), sha256=one.sha256), forged


def re_signed(_: Bucket, peers: Peers) -> None:
    """Another payload, with a statement by the group's key."""
    other_payload(_, peers)
    one, data = peers["7"]
    peers["7"] = signed(one, EMITTER), data


def of_another_window(bucket: Bucket, peers: Peers) -> None:
    """What the peer itself signed, for the next window."""
    document = content(bucket, "peers/7/statements/00000001.json")
    stated = statements.unverified(document)
    one, _ = peers["7"]
    data = content(bucket, f"peers/7/frames/{stated.sha256}")
    peers["7"] = replace(told_of(one, data), statement=document.decode()), data


def of_another_base(_: Bucket, peers: Peers) -> None:
    """What the peer itself signed for this window, on other weights than the group's."""
    elsewhere = MemoryBucket(windows.CLOCK)
    windows.put(elsewhere, "7", 0, "e" * 64, gathers.payload(99))
    document = content(elsewhere, "peers/7/statements/00000000.json")
    one = peers["7"][0]
    data = content(elsewhere, f"peers/7/frames/{statements.unverified(document).sha256}")
    peers["7"] = replace(told_of(one, data), statement=document.decode()), data


def of_another_peer(_: Bucket, peers: Peers) -> None:
    """One peer's object and statement under another's name."""
    one, data = peers["8"]
    peers["7"] = replace(one, uid="7"), data


def invented_peer(_: Bucket, peers: Peers) -> None:
    """A peer that the run does not have."""
    one, data = peers["9"]
    data = reframed(data, gathers.payload(99))
    peers["zz"] = signed(replace(told_of(one, data), uid="zz"), SecretKey(bytes(32))), data


def other_norms(_: Bucket, peers: Peers) -> None:
    """A quarter of a peer's norms: the median falls for all."""
    for uid in ("7", "8", "9"):
        one, data = peers[uid]
        peers[uid] = replace(one, squares=tuple(s / 4 for s in one.squares)), data


FORGERIES: list[tuple[Callable[[Bucket, Peers], None], str]] = [
    (other_payload, "signed an object"),
    (other_bytes, "has sha256"),
    (re_signed, "not signed by the key"),
    (of_another_window, "has window=1 where"),
    (of_another_base, "has base_digest='eeee"),
    (of_another_peer, "not signed by the key"),
    (invented_peer, "key is not known"),
    (other_norms, "does not give"),
]


def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("check_record", "check_frames"):
        monkeypatch.setattr(Trust, name, lambda *_, **__: None)


def forged_digest(bucket: Bucket, made: Artifact, peers: Peers, home: Path) -> str:
    """Of the weights that a forgery leads to, as a replica that checks nothing finds them."""
    store(bucket, made, peers, "0" * 64)
    with pytest.raises(StateDamaged) as found:
        caught_up(Late(home), bucket)
    told = re.search(r"weights of digest (\w+)", str(found.value))
    assert told is not None, found.value
    return told[1]


@pytest.mark.parametrize(
    ("forge", "why"), FORGERIES, ids=lambda value: getattr(value, "__name__", "")
)
def test_forged_artifact_is_refused_and_without_the_check_accepted(
    bucket, tmp_path, monkeypatch, forge, why
):
    made, peers = found_in(bucket), peers_of(bucket)
    forge(bucket, peers)
    with monkeypatch.context() as control:
        unchecked(control)
        digest = forged_digest(bucket, made, peers, tmp_path / "first")
        store(bucket, made, peers, digest)
        accepted = Late(tmp_path / "control")
        caught_up(accepted, bucket, size=2)
    late = Late(tmp_path / "late")

    with pytest.raises(FrameError, match=why):
        caught_up(late, bucket, size=2)

    assert late.window == 0 and same(late.master, gathers.start())
    assert not any(one.is_torn for one in late.replicas.values())
    assert accepted.window == 1 and accepted.digest == digest != made.digest


def test_weight_that_is_not_the_runs_is_refused(bucket, tmp_path, monkeypatch):
    made, peers = found_in(bucket), peers_of(bucket)
    forged = replace(made, weights=(made.weights[0] + 5, *made.weights[1:]))
    with monkeypatch.context() as control:
        unchecked(control)
        store(bucket, forged, peers, forged_digest(bucket, forged, peers, tmp_path / "first"))
        caught_up(Late(tmp_path / "control"), bucket)

    with pytest.raises(FrameError, match="weight 6"):
        caught_up(Late(tmp_path / "late"), bucket)


def test_restarted_group_checks_what_it_applies_too(gathered, bucket, tmp_path, monkeypatch):
    made, peers = found_in(bucket), peers_of(bucket)
    other_bytes(bucket, peers)
    with monkeypatch.context() as control:
        unchecked(control)
        store(bucket, made, peers, forged_digest(bucket, made, peers, tmp_path / "first"))
    group = World(tmp_path / "group", bucket)

    found: list[Any] = group.run(2)

    assert all(isinstance(one, FrameError) and "did not sign" in str(one) for one in found), found
    assert same(group.moved, gathers.start())


def test_forged_record_is_refused_before_its_body_is_asked_for(bucket, tmp_path):
    """By a group that starts again, and by late joiners."""
    made, peers = found_in(bucket), peers_of(bucket)
    re_signed(bucket, peers)
    store(bucket, made, peers, made.digest)
    counted = Counted(bucket)

    found: list[Any] = World(tmp_path / "group", bucket).run(2, archive_of=lambda _: counted)
    found += Late(tmp_path / "late").run(lambda _: windows.archive(counted), size=2)

    assert all("not signed by the key" in str(one) for one in found), found
    assert counted.body_bytes == 0


def test_former_peer_is_known_by_its_key(bucket, tmp_path):
    trust = windows.terms().trust
    left = {uid: key for uid, key in trust.keys.items() if uid != "8"}

    with pytest.raises(FrameError, match=r"\[former\]"):
        caught_up(Late(tmp_path / "a"), bucket, trust=replace(trust, keys=left))

    caught_up(Late(tmp_path / "b"), bucket, trust=trust)


def test_record_and_body_are_enough_to_rebuild_every_object(bucket):
    """By the bytes' places alone, without a line of what writes or reads them."""
    made = found_in(bucket)
    data = content(bucket, f"archive/bodies/{made.body_sha256}")
    count, group = len(made.accepted), 16 * 82
    payload_bytes = made.accepted[0].nbytes - made.accepted[0].payload_start - 32
    place = sum(one.payload_start for one in made.accepted)
    payloads = [bytearray() for _ in made.accepted]
    for start in range(0, payload_bytes, group):
        length = min(group, payload_bytes - start)
        for payload in payloads:
            payload += data[place : place + length]
            place += length
    assert place == len(data) and count == 4

    before = 0
    for one, payload in zip(made.accepted, payloads, strict=True):
        front = data[before : before + one.payload_start] + payload
        before += one.payload_start
        whole = front + hashlib.sha256(front).digest()
        assert hashlib.sha256(whole).hexdigest() == one.sha256
        assert whole == content(bucket, f"peers/{one.uid}/frames/{one.sha256}")
