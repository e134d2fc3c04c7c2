"""What an island keeps on disk: pending until the receipt, then the checkpoint."""

from pathlib import Path

import pytest
import torch

from atoll.errors import StateHeld, StoreError
from atoll.island.state.store import IslandIdentity, IslandStore

WHOLE = b"\x00\xff0123456789"
META = {"preamble": "00ff", "sha256": "a" * 64, "numbers": {"optimizer/0/step": 3}}


@pytest.fixture
def store(tmp_path: Path):
    made = IslandStore(tmp_path / "island")
    yield made
    made.close()


def save(store: IslandStore, round_number: int, *, frame: bytes = b"frame") -> None:
    path = store.begin(round_number)
    (path / "frame").write_bytes(frame)
    store.complete(path, META, {"residual": torch.full((2,), float(round_number))})


def reopened(store: IslandStore) -> IslandStore:
    store.close()
    return IslandStore(store.directory)


def names(store: IslandStore) -> list[str]:
    return sorted(p.name for p in store.directory.iterdir() if p.is_dir())


def test_new_directory_holds_nothing(store):
    assert (store.identity(), store.checkpoint(), store.rounds()) == (None, None, (None, ()))


def test_identity_is_remembered(store):
    store.set_identity(IslandIdentity("a", "b" * 64))

    assert reopened(store).identity() == IslandIdentity("a", "b" * 64)


def test_pending_round_survives_a_restart(store):
    save(store, 4)

    again = reopened(store)

    pending = again.pending(4)
    assert again.rounds() == (None, (4,))
    assert (pending.round, pending.meta) == (4, META)
    assert torch.equal(pending.tensors["residual"], torch.full((2,), 4.0))


def test_frame_of_a_pending_round_reads_back_with_its_preamble(store):
    save(store, 4, frame=b"0123456789")

    frame = store.frame(store.pending(4))

    assert (frame.nbytes, frame.preamble, frame.sha256) == (12, b"\x00\xff", "a" * 64)
    assert [frame.read(0, 1), frame.read(1, 3), frame.read(0, 12)] == [b"\x00", b"\xff01", WHOLE]
    assert [frame.read(5, 4), frame.read(10, 100), frame.read(12, 1)] == [b"3456", b"89", b""]
    frame.close()
    frame.close()


def test_receipt_promotes_pending_to_the_checkpoint(store):
    save(store, 4)

    store.promote(4)

    assert store.rounds() == (4, ())
    checkpoint = store.checkpoint()
    assert checkpoint is not None and checkpoint.round == 4
    assert names(store) == ["checkpoint-4"]


def test_only_the_newest_checkpoint_is_kept(store):
    for round_number in (9, 10, 11):
        save(store, round_number)
        store.promote(round_number)

    assert names(store) == ["checkpoint-11"]


def test_refusal_leaves_the_last_checkpoint(store):
    save(store, 4)
    store.promote(4)
    save(store, 5)

    store.discard_pending()

    assert store.rounds() == (4, ())
    checkpoint = store.checkpoint()
    assert checkpoint is not None and checkpoint.round == 4


def test_several_rounds_are_pending_oldest_first(store):
    for round_number in (10, 9, 11):
        save(store, round_number)

    again = reopened(store)

    assert again.rounds() == (None, (9, 10, 11))
    assert [again.pending(n).tensors["residual"][0] for n in (9, 10, 11)] == [9, 10, 11]


def test_receipt_leaves_later_rounds_pending(store):
    for round_number in (4, 5, 6):
        save(store, round_number)

    store.promote(4)

    assert store.rounds() == (4, (5, 6))
    assert names(store) == ["checkpoint-4", "pending-5", "pending-6"]


def test_refusal_may_keep_what_was_pending_up_to_a_round(store):
    for round_number in (4, 5, 6):
        save(store, round_number)

    store.discard_pending(after=4)

    assert store.rounds() == (None, (4,))


def test_second_try_of_a_round_replaces_the_first(store):
    save(store, 4, frame=b"first")
    save(store, 5)

    save(store, 4, frame=b"second")

    assert (store.directory / "pending-4" / "frame").read_bytes() == b"second"
    assert store.rounds() == (None, (4, 5))


def test_state_without_its_last_file_does_not_count(store):
    """A crash while saving leaves nothing that looks whole."""
    save(store, 4)
    store.promote(4)
    path = store.begin(5)
    (path / "frame").write_bytes(b"frame")
    (path / "state.safetensors").write_bytes(b"half")

    again = reopened(store)

    assert again.rounds() == (4, ())
    assert names(again) == ["checkpoint-4"]


def test_round_being_saved_is_not_pending_yet(store):
    (store.begin(5) / "frame").write_bytes(b"frame")

    assert store.rounds() == (None, ())


def test_crash_between_two_checkpoints_leaves_the_newer(store):
    save(store, 4)
    store.promote(4)
    save(store, 5)
    (store.directory / "pending-5").rename(store.directory / "checkpoint-5")

    checkpoint = reopened(store).checkpoint()

    assert checkpoint is not None and checkpoint.round == 5


def test_round_of_nine_is_older_than_round_ten(store):
    for round_number in (9, 10):
        save(store, round_number)
        (store.directory / f"pending-{round_number}").rename(
            store.directory / f"checkpoint-{round_number}"
        )

    checkpoint = store.checkpoint()

    assert checkpoint is not None and checkpoint.round == 10


def test_forgetting_another_runs_state_keeps_the_identity(store):
    store.set_identity(IslandIdentity("a", "b" * 64))
    save(store, 4)
    store.promote(4)
    save(store, 5)

    store.forget()

    assert names(store) == []
    assert store.identity() == IslandIdentity("a", "b" * 64)


def test_directory_is_held_by_one_process(store):
    with pytest.raises(StateHeld, match="another --state directory"):
        IslandStore(store.directory)


def test_damaged_tensors_are_named_with_the_way_out(store):
    save(store, 4)
    (store.directory / "pending-4" / "state.safetensors").write_bytes(b"\xff" * 100)

    with pytest.raises(StoreError, match=r"pending-4.*the island starts from the run's weights"):
        store.pending(4)


@pytest.mark.parametrize("text", ["{", "[]", "nul\0"])
def test_damaged_description_is_named(store, text):
    save(store, 4)
    (store.directory / "pending-4" / "complete.json").write_text(text)

    with pytest.raises(StoreError, match=r"complete\.json"):
        store.pending(4)


def test_kill_right_after_the_promoting_rename_leaves_a_checkpoint(store, monkeypatch):
    save(store, 4)
    monkeypatch.setattr(IslandStore, "_spare", _killed)

    with pytest.raises(KeyboardInterrupt):
        store.promote(4)

    monkeypatch.undo()
    back = reopened(store)
    assert back.rounds() == (4, ())
    assert back.checkpoint() is not None


def test_frame_written_over_a_longer_one_ends_where_it_ends(store):
    for round_number, data in ((4, b"0123456789" * 1000), (5, b"short")):
        path = store.begin(round_number)
        with store.writing(path / "frame") as file:
            file.write(data)
        store.complete(path, META, {})
        written = (path / "frame").stat()
        assert (path / "frame").read_bytes() == data
        store.promote(round_number)
    first = store.begin(6) / "frame"

    assert first.stat().st_ino == written.st_ino, "the spare file is used again"
    assert store.checkpoint() is not None


def test_kill_while_a_spare_file_is_written_over_keeps_the_checkpoint(store):
    for round_number in (4, 5):
        path = store.begin(round_number)
        for name in ("frame", "residual"):
            with store.writing(path / name) as file:
                file.write(f"{name} {round_number}".encode())
        store.complete(path, META, {})
        store.promote(round_number)
    with store.writing(store.begin(6) / "residual") as file:
        file.write(b"torn")

    back = reopened(store)

    saved = back.checkpoint()
    assert saved is not None and back.rounds() == (5, ())
    found = bytearray(10)
    back.read_raw(saved, "residual", memoryview(found))
    assert found == b"residual 5"


def test_pending_round_without_its_frame_is_no_pending_round(store):
    save(store, 4)
    (store.directory / "pending-4" / "frame").unlink()

    assert reopened(store).rounds() == (None, ())


def test_promotion_replaces_a_checkpoint_of_the_same_round(store):
    save(store, 4)
    store.promote(4)
    save(store, 4)

    store.promote(4)

    assert names(store) == ["checkpoint-4"]


def test_kill_while_removing_leaves_no_half_directory(store, monkeypatch):
    save(store, 4)
    monkeypatch.setattr("shutil.rmtree", lambda path, **_: _killed() if path.exists() else None)

    with pytest.raises(KeyboardInterrupt):
        store.discard_pending()

    monkeypatch.undo()
    assert reopened(store).rounds() == (None, ())


def test_identity_is_readable_by_its_owner_only(store):
    store.set_identity(IslandIdentity("a", "b" * 64))

    mode = (store.directory / "identity.json").stat().st_mode & 0o777

    assert mode == 0o600


def _killed(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_state_that_is_a_file_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(StoreError, match=r"file' cannot be used .*choose another --state"):
        IslandStore(tmp_path / "file")
