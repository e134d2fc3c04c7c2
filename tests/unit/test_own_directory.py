"""State directories: whose they are, who may write there, and that no link in them is followed."""

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from atoll import own_directory
from atoll.errors import StateHeld, StateUnsafe, StoreError
from atoll.island.state.store import IslandIdentity, IslandStore
from atoll.launch import state
from atoll.launch.state import Addresses
from atoll.ledger.sqlite import lock
from atoll.strategies.sharded.saves import Saves


def serve(directory: Path) -> None:
    with state.held(directory, Addresses()):
        pass


def look(directory: Path) -> None:
    with state.at_rest(directory):
        pass


def join(directory: Path) -> None:
    with closing(IslandStore(directory)) as store:
        store.set_identity(IslandIdentity("isle", "key"))


TAKERS = pytest.mark.parametrize("take", [serve, join])


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below `directory`, links as where they lead."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Somebody's files, by the very names that this program uses."""
    made = tmp_path / "victim"
    made.mkdir()
    for name in ("weights-1-1.frame", "update-2-1.frame", "complete.json", "thesis.txt"):
        (made / name).write_bytes(b"of somebody")
    return made


@pytest.mark.parametrize("is_fresh", [True, False])
@pytest.mark.parametrize(
    ("take", "name"),
    [
        *((serve, name) for name in ("spool", "blobs", "blob-cache")),
        *((serve, name) for name in ("coordinator.lock", "ledger.sqlite", "ledger.sqlite-wal")),
        *((serve, name) for name in ("telemetry.sqlite", "stores.json", "certificate.key")),
        *((look, name) for name in ("coordinator.lock", "ledger.sqlite", "blobs/aa", "blobs/tmp")),
        *((join, name) for name in ("lock", "identity.json", "checkpoint-3", "pending-4", "saves")),
        *(
            (join, name)
            for name in ("trash-pending-2", "spare-frame", "rank-1", "gather/published")
        ),
    ],
)
def test_link_in_a_state_directory_is_refused_by_name_and_nothing_behind_it_changes(
    take: Callable[[Path], None], name: str, is_fresh: bool, tmp_path: Path, victim: Path
):
    directory = tmp_path / "d"
    if is_fresh and take is not look:
        directory.mkdir()
    else:
        (join if take is join else serve)(directory)
    place = directory / name
    place.parent.mkdir(exist_ok=True)
    if place.is_dir():
        for path in sorted(place.rglob("*"), reverse=True):
            path.rmdir()
        place.rmdir()
    place.unlink(missing_ok=True)
    target = victim if "." not in name and name != "lock" else victim / "thesis.txt"
    place.symlink_to(target)
    before = contents(victim)

    with pytest.raises(StateUnsafe, match=f"{place.name}' is a symbolic link"):
        take(directory)

    assert contents(victim) == before
    assert place.is_symlink()


@TAKERS
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o720, 0o702, 0o777, 0o1777])
def test_directory_that_others_can_write_to_is_refused_with_its_mode_and_the_way_out(
    take: Callable[[Path], None], mode: int, tmp_path: Path
):
    (tmp_path / "d").mkdir()
    (tmp_path / "d").chmod(mode)

    if not mode & 0o022:
        take(tmp_path / "d")
        return
    with pytest.raises(StateUnsafe, match=rf"mode {mode:04o}.*chmod -R go-w"):
        take(tmp_path / "d")

    assert os.listdir(tmp_path / "d") == []


@TAKERS
def test_directory_that_others_can_read_alone_is_taken(
    take: Callable[[Path], None], tmp_path: Path
):
    """The control: an existing directory of mode 0755 is good enough."""
    (tmp_path / "d").mkdir(mode=0o755)

    take(tmp_path / "d")


def test_folder_inside_that_others_can_reach_and_write_to_is_refused(tmp_path: Path):
    serve(tmp_path / "d")
    (tmp_path / "d" / "spool").chmod(0o777)
    serve(tmp_path / "d")  # the control: nobody gets through 0700 above it

    (tmp_path / "d").chmod(0o755)
    with pytest.raises(StateUnsafe, match=r"spool' has mode 0777"):
        serve(tmp_path / "d")


@TAKERS
def test_directory_of_another_user_is_refused_with_both_numbers(
    take: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "d").mkdir()
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)

    with pytest.raises(StateUnsafe, match=f"belongs to user {owner}, this process runs as"):
        take(tmp_path / "d")

    assert os.listdir(tmp_path / "d") == []


def test_link_of_another_user_on_the_way_to_a_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    own_directory.check_way(tmp_path / "link" / "d")  # the control: a link of one's own leads on
    found = Path.lstat

    def of_another(path: Path) -> os.stat_result:
        values = list(found(path))
        if path.name == "link":
            values[4] = os.geteuid() + 1
        return os.stat_result(values)

    monkeypatch.setattr(Path, "lstat", of_another)

    with pytest.raises(StateUnsafe, match="link' is a symbolic link of user"):
        own_directory.check_way(tmp_path / "link" / "d")
    with pytest.raises(StateUnsafe, match="link' is a symbolic link of user"):
        own_directory.check_place(tmp_path / "link")


def test_default_place_that_others_can_write_to_is_refused_and_a_missing_one_is_not(
    tmp_path: Path,
):
    own_directory.check_place(tmp_path / ".atoll")
    (tmp_path / ".atoll").mkdir()
    own_directory.check_place(tmp_path / ".atoll")

    (tmp_path / ".atoll").chmod(0o777)
    with pytest.raises(StateUnsafe, match="mode 0777"):
        own_directory.check_place(tmp_path / ".atoll")


@TAKERS
def test_fresh_directory_and_what_is_made_in_it_is_its_owners_alone(
    take: Callable[[Path], None], tmp_path: Path
):
    umask = os.umask(0)
    try:
        take(tmp_path / "above" / "d")
    finally:
        os.umask(umask)

    made = [tmp_path / "above", tmp_path / "above" / "d"]
    made += [path for path in (tmp_path / "above" / "d").rglob("*") if path.is_dir()]
    assert {path.stat().st_mode & 0o777 for path in made} == {0o700}


def test_what_is_no_directory_is_refused_as_such(tmp_path: Path):
    (tmp_path / "d").write_bytes(b"")

    with pytest.raises(StoreError, match="not a directory"):
        lock.hold(tmp_path / "d")


def test_held_directory_is_still_named_as_held(tmp_path: Path):
    with state.held(tmp_path / "d", Addresses()), pytest.raises(StateHeld):
        serve(tmp_path / "d")


# What is removed


def test_island_removes_only_names_of_its_own(tmp_path: Path):
    own = ("pending-7", "checkpoint-7", "trash-pending-3")
    others = ("pending-notes", "checkpoint-7-copy", "trash-can", "my-pending-7", "spare-parts")
    join(tmp_path / "d")
    for name in (*own, *others):
        (tmp_path / "d" / name).mkdir()
        (tmp_path / "d" / name / "kept").write_bytes(b"")

    with closing(IslandStore(tmp_path / "d")) as store:
        store.begin(1)
        store.discard_pending()
        store.forget()

    assert sorted(os.listdir(tmp_path / "d")) == sorted((*others, "identity.json", "lock"))


def test_saves_removes_only_names_of_its_own(tmp_path: Path):
    for name in ("save-3-1", "save-mine", "notes"):
        (tmp_path / name).mkdir()

    Saves(tmp_path, run_id="run")

    assert sorted(os.listdir(tmp_path)) == ["notes", "save-mine"]


def test_sweep_of_drafts_removes_only_names_of_its_own(tmp_path: Path):
    serve(tmp_path / "d")
    drafts = tmp_path / "d" / "blobs" / "tmp"
    for name in ("12-3.part", "a" * 64, "thesis.part", "notes"):
        (drafts / name).write_bytes(b"")

    with state.held(tmp_path / "d", Addresses()) as stores:
        stores.blobs.sweep()

    assert sorted(os.listdir(drafts)) == ["notes", "thesis.part"]
