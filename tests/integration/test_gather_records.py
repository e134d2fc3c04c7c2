"""Records that are signed and still wrong, plans that differ in one thing, and copies in order."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from atoll import canonical
from atoll.collectives.base import Collectives
from atoll.errors import AtollError, FrameError, ProtocolError, StoreError
from atoll.gather import artifact as artifacts
from atoll.gather.artifact import Artifact
from atoll.gather.consume import Settings
from atoll.gather.replica import Replica
from atoll.gather.result import Merged
from atoll.gather.window import Window
from tests import gather_reference as naive
from tests import gather_windows as windows
from tests import gathers, rank_groups
from tests.gather_late import Late, caught_up
from tests.gather_windows import LAYOUT, World

UIDS = ("10", "7", "8", "9")
FIRST = "archive/windows/00000000.json"


@pytest.fixture
def world(tmp_path) -> World:
    """Two windows."""
    made = World(tmp_path / "group")
    for _ in range(2):
        made.publish(*UIDS)
        made.run(1)
    return made


def recorded(world: World, window: int = 0) -> Artifact:
    found = windows.archive(world.bucket).find(window)
    assert found is not None
    return found.artifact


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"factors": ((0.5,) * 6,) * 4}, "factors that its norms do not give"),
        ({"weights": (1, 1, 1)}, "not one weight for each peer"),
        ({"weights": (1, 1, 1, 0)}, "weights entry"),
        ({"body_bytes": 1}, "body_bytes=1"),
        ({"primaries": ("a b",)}, "primaries entry"),
    ],
)
def test_record_that_is_signed_and_wrong_is_refused(world, changes, told):
    document = artifacts.signed(replace(recorded(world), **changes), windows.EMITTER)

    with pytest.raises(FrameError, match=told):
        windows.archive(world.bucket).read(document, 0)


@pytest.mark.parametrize("name", ["run_id", "manifest_sha256"])
def test_record_of_another_run_is_refused_by_what_differs(world, name):
    document = windows.archive(world.bucket).document(0) or b""
    other = windows.archive(world.bucket, **{name: "b" * 64})

    with pytest.raises(FrameError, match=f"has {name}="):
        other.read(document, 0)


def test_signature_of_another_domain_is_refused(world):
    """What the key signs for another purpose is no record."""
    plain = recorded(world).plain()
    told = canonical.dumps(plain).encode()

    def signed(domain: bytes) -> bytes:
        signature = windows.EMITTER.sign(domain + told).hex()
        return canonical.dumps({"artifact": plain, "signature": signature}).encode()

    archive = windows.archive(world.bucket)
    assert archive.read(signed(b"atoll/gather/artifact/1\0"), 0).artifact == recorded(world)
    for domain in (b"", b"atoll/gather/statement/1\0", b"atoll/gather/artifact/2\0"):
        with pytest.raises(FrameError, match="not signed by"):
            archive.read(signed(domain), 0)


def test_whole_weights_of_another_digest_are_refused(world, tmp_path):
    world.bucket.put(f"archive/weights/{world.digest}", bytes(LAYOUT.nbytes))
    world.bucket.remove(FIRST)
    late = Late(tmp_path)

    with pytest.raises(FrameError, match="another digest"):
        caught_up(late, world.bucket)

    assert (late.window, late.digest) == (0, windows.root(gathers.start()))


def test_whole_weights_lead_to_the_window_after_theirs(world, tmp_path):
    world.bucket.put(f"archive/weights/{world.digest}", world.master.numpy().tobytes())
    world.bucket.remove(FIRST)
    late = Late(tmp_path)

    found = caught_up(late, world.bucket)

    assert (found.stop, late.window, late.prev) == (2, 2, world.prev)


# Plans


@pytest.mark.parametrize("changed", ["digest", "prev", "archive"])
def test_ranks_that_stand_elsewhere_are_different_plans(tmp_path, changed):
    """Found before anything is fetched: weights, chain or archive of one rank are others."""
    world = World(tmp_path)
    world.publish(*UIDS)

    def work(ranks: Collectives) -> Any:
        own = windows.terms().owners(2)[ranks.rank].of(gathers.start())
        told = {"digest": world.digest, "prev": world.prev}
        if ranks.rank:
            told |= {name: "d" * 64 for name in told if name == changed}
        has_archive = not (ranks.rank and changed == "archive")
        window = Window(
            ranks=ranks,
            buckets={"main": world.bucket},
            clock=windows.CLOCK,
            directory=tmp_path / str(ranks.rank),
            terms=windows.terms(),
            replica=Replica(master=own, window=0, **told),
            archive=windows.archive(world.bucket) if has_archive else None,
            key=windows.EMITTER,
        )
        try:
            return window.run(0)
        except AtollError as exc:
            return exc

    found = rank_groups.threads(2, "direct", work, chunk_bytes=1 << 16)

    assert all(isinstance(one, ProtocolError) and "different plans" in str(one) for one in found)
    assert windows.archive(world.bucket).windows() == []


# Results


def test_result_can_be_read_after_its_window(tmp_path):
    """Lists aligned with uids, decoded from this rank's spool, which stays until the next one."""
    world = World(tmp_path)
    world.publish(*UIDS)
    [found] = world.run(1)

    check_lists(found.state_dict, found.uids)
    check_lists(found.shared_state_dict, found.uids)


def check_lists(lists: Mapping[str, list[Any]], uids: Sequence[str]) -> None:
    """They are what the peers sent, by the reference."""
    for row, uid in enumerate(uids):
        sent = naive.sent(windows.payload(uid, 0), LAYOUT.size)
        for spec in LAYOUT.tensors:
            places, codes = (lists[spec.name + name][row] for name in ("idxs", "vals"))
            listed = dict(zip((places + spec.offset).tolist(), codes.tolist(), strict=True))
            assert listed == {
                place: code
                for place, (code, _) in sent.items()
                if spec.span.start <= place < spec.span.stop
            }


def test_result_of_several_ranks_is_read_by_all_of_them_together(tmp_path):
    """By itself a rank is told who has the rest; what one of them meets reaches all."""
    world = World(tmp_path)
    world.publish(*UIDS)
    name = LAYOUT.tensors[0].name + "vals"

    def read(ranks: Collectives, found: Merged) -> Any:
        other = next(one for one in found.accepted if one.rank != ranks.rank)
        with pytest.raises(StoreError, match=f"spool of rank {other.rank}, not of rank"):
            found.state_dict[name]
        check_lists(found.shared_state_dict, found.uids)
        if ranks.rank == found.holders["8"]:
            spool = world.home / "a" / f"3-{ranks.rank}" / "spool" / "00000000"
            next(spool / one.sha256 for one in found.accepted if one.uid == "8").write_bytes(b"")
        with pytest.raises(AtollError, match=f"rank {found.holders['8']}: "):
            found.shared_state_dict[name]
        return "read"

    assert world.run(3, after=read) == ["read"] * 3


# Copies


def test_copy_before_its_original_in_order_takes_its_own_weight_with_it():
    """Those that stay have their own weights, wherever the copy stood; its worst pair is told."""
    given = gathers.peers(4)
    chunks = 82 * 31  # of 65: both its originals are found in it
    mixed = given["5"].payload[:chunks] + given["6"].payload[chunks:]
    given["0copy"] = naive.Peer(given["5"].payload, 7, 99.0)
    given["1near"] = naive.Peer(mixed, 5, 98.0)
    wanted, weights = gathers.expected(given, gathers.start(), skip_copies_from=0.4)
    master = gathers.start()

    [done] = gathers.window(given, gathers.Setting(settings=Settings(overlap_skip=True)), master)

    assert wanted.copies == ["0copy", "1near"] and list(done.uids) == wanted.uids
    assert gathers.bits(master) == gathers.bits(weights)
    assert "of the places of '5', 100.0%" in done.copies["0copy"]
    assert "of the places of '6'" in done.copies["1near"]
