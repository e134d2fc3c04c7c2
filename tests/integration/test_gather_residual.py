"""Error feedback of a peer that publishes: no crash loses a residual, or adds it twice."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from atoll.blobs.directory_bucket import DirectoryBucket
from atoll.clock import SystemClock
from atoll.codecs.topk.codec import TopK
from atoll.errors import ConfigError, Conflict, NotFinite, StateDamaged
from atoll.gather import publish as publishing
from atoll.gather.keys import SecretKey
from atoll.launch import gather_publish, gather_residual
from atoll.launch.gather_file import ArchiveTable, GatherFile, GatherTable
from atoll.launch.gather_residual import Kept
from atoll.launch.gather_state import GatherState
from tests.gather_late import content

CLOCK = SystemClock()
KEY = SecretKey(bytes(range(32)))
SIZES = {"a": 9_000, "b": 77}  # three chunks, the last one short
SIZE = sum(SIZES.values())
DECAY = 0.95


def drawn(seed: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


class Peer:
    """A peer with its files, its bucket and its state."""

    def __init__(self, home: Path) -> None:
        self.home = home
        home.mkdir(exist_ok=True)
        self._save("start", torch.zeros(SIZE))
        if not (home / "key").exists():
            KEY.save(home / "key")
        listed = {"uid": "a", "key": KEY.public.hex, "bucket": "main", "prefix": "a"}
        other = SecretKey(bytes(32)).public.hex
        table = GatherTable(
            run_id="fed",
            start="start.safetensors",
            outer_lr=0.5,
            buckets={"main": "bucket"},
            archive=ArchiveTable(bucket="main", prefix="archive", key=other),
            primaries=[listed],
        )
        self.file = GatherFile(table, home)
        self.residual = home / "a.residual"

    def publish(self, seed: int | Tensor, *, uid: str = "a", with_residual: bool = True) -> None:
        values = seed if isinstance(seed, Tensor) else drawn(seed)
        gather_publish.publish(
            self.file,
            uid,
            self._save("displacement", values),
            secret=self.home / "key",
            sample_digest="0" * 64,
            clock=CLOCK,
            s3=None,
            residual=self.residual if with_residual else None,
        )

    def move_on(self) -> None:
        """The window is over; its weights happen to be the same."""
        state = GatherState(self.file.state, self.file.layout)
        replica = state.whole()
        replica.window += 1
        state.reserve(replica.window)
        state.write(replica.window, self.file.terms().owners(1)[0], replica.master)
        state.finish(replica)

    def payload(self, window: int) -> bytes | None:
        """What it published for a window."""
        bucket = DirectoryBucket(self.home / "bucket", CLOCK)
        stated = publishing.stated(bucket, "a", window, deadline=CLOCK.now() + 30)
        if stated is None:
            return None
        nbytes = TopK().encoded_bytes(SIZE)
        return content(bucket, publishing.frame_key("a", stated.sha256))[-32 - nbytes : -32]

    def _save(self, name: str, values: Tensor) -> Path:
        path, parts = self.home / f"{name}.safetensors", values.split(list(SIZES.values()))
        save_file({k: v.clone() for k, v in zip(SIZES, parts, strict=True)}, str(path))
        return path


def fed(seeds: list[int]) -> list[bytes]:
    """The payloads of windows, one after another, by the formula."""
    residual, made = torch.zeros(SIZE, dtype=torch.bfloat16), []
    for seed in seeds:
        v = residual.float() * DECAY + drawn(seed)
        payload = TopK().encode(v, noise=None, first_group=0)
        residual = (v - TopK().decode(payload, SIZE)).bfloat16()
        made.append(payload.numpy().tobytes())
    return made


def sequence(home: Path) -> list[bytes | None]:
    peer = Peer(home)
    for seed in (1, 2, 3):
        peer.publish(seed)
        peer.move_on()
    return [peer.payload(window) for window in range(3)]


def test_what_a_window_drops_is_part_of_the_next_ones(tmp_path):
    assert sequence(tmp_path) == fed([1, 2, 3])


@pytest.mark.parametrize("mutant", ["before", "after"])
def test_taking_always_the_same_residual_gives_other_payloads(tmp_path, monkeypatch, mutant):
    """The control: both, and which one counts, matter."""
    monkeypatch.setattr(
        gather_residual, "taken_in", lambda kept, **_: kept and getattr(kept, mutant)
    )
    if mutant == "before":
        assert sequence(tmp_path) != fed([1, 2, 3])
        return
    peer = crashed(tmp_path, monkeypatch, publishing, "_place_frame")
    peer.publish(2)

    assert peer.payload(1) != fed([1, 2])[1]


def crashed(home: Path, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> Peer:
    """A peer whose second window broke off where `name` begins."""
    peer = Peer(home)
    peer.publish(1)
    peer.move_on()

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, broken)
        with pytest.raises(RuntimeError, match="killed"):
            peer.publish(2)
    return peer


POINTS: list[tuple[object, str, bool]] = [  # where it breaks, and whether the statement is there
    (Kept, "write", False),
    (publishing, "_place_frame", False),
    (publishing, "_place_statement", False),
    (publishing, "remove_old", True),
]
points = pytest.mark.parametrize(("owner", "name", "is_stated"), POINTS, ids=lambda p: str(p)[-20:])


@points
def test_published_again_after_a_crash_it_is_as_if_nothing_had_been(
    tmp_path, monkeypatch, owner, name, is_stated
):
    peer = crashed(tmp_path, monkeypatch, owner, name)
    assert (peer.payload(1) is not None) == is_stated

    peer.publish(2)
    peer.move_on()
    peer.publish(3)

    assert [peer.payload(window) for window in range(3)] == fed([1, 2, 3])


@points
def test_crash_and_no_second_try_counts_as_sent_only_where_it_was_stated(
    tmp_path, monkeypatch, owner, name, is_stated
):
    peer = crashed(tmp_path, monkeypatch, owner, name)
    peer.move_on()

    peer.publish(3)

    wanted = fed([1, 2, 3]) if is_stated else fed([1, 3])
    assert peer.payload(2) == wanted[-1]
    assert fed([1, 2, 3])[-1] != fed([1, 3])[-1]


def test_another_displacement_of_a_crashed_window_takes_the_first_ones_place(tmp_path, monkeypatch):
    peer = crashed(tmp_path, monkeypatch, publishing, "_place_frame")

    peer.publish(5)
    peer.move_on()
    peer.publish(6)

    assert [peer.payload(window) for window in range(3)] == fed([1, 5, 6])


def refused(peer: Peer, kind: type[Exception], publish: Callable[[], None]) -> None:
    before = peer.residual.read_bytes()
    with pytest.raises(kind):
        publish()
    assert peer.residual.read_bytes() == before


def test_refusals_leave_the_residual_as_it_is(tmp_path):
    peer = Peer(tmp_path)
    peer.publish(1)

    refused(peer, Conflict, lambda: peer.publish(2))  # the window is stated already
    refused(peer, Conflict, lambda: peer.publish(2, with_residual=False))
    peer.move_on()
    broken = drawn(3).clamp(-1, 1) * 3e38
    refused(peer, NotFinite, lambda: peer.publish(broken))
    peer.publish(2)

    assert peer.payload(1) == fed([1, 2])[1]


def test_anothers_residual_and_one_of_a_later_window_are_refused(tmp_path):
    peer, other = Peer(tmp_path / "one"), Peer(tmp_path / "other")
    peer.publish(1)
    peer.move_on()
    peer.publish(2)
    other.residual = peer.residual
    with pytest.raises(StateDamaged, match="catch up first"):
        other.publish(1)

    kept = gather_residual.read(peer.residual, owner="fed/a", elements=SIZE)
    assert kept is not None and kept.window == 1
    for owner, elements in (("fed/b", SIZE), ("fed/a", SIZE + 1)):
        with pytest.raises(ConfigError, match="name its own file"):
            gather_residual.read(peer.residual, owner=owner, elements=elements)
    peer.residual.write_bytes(b"nothing of the kind")
    with pytest.raises(ConfigError, match="no residual"):
        peer.publish(3)
