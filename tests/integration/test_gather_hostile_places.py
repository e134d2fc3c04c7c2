"""What peers may leave where their objects belong costs nobody else a window."""

import os
from pathlib import Path

import pytest

from atoll.blobs.directory_bucket import DirectoryBucket
from atoll.gather.publish import statement_key
from atoll.gather.words import Reason
from tests import gather_windows as windows
from tests.gather_windows import World, same

HONEST = ("10", "8", "9")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.mkdir()


def link(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("what", [pipe, folder, link])
@pytest.mark.parametrize("which", ["statement", "frame"])
def test_peer_that_leaves_no_file_is_skipped_and_nobody_waits(tmp_path, what, which):
    root = tmp_path / "bucket"
    world = World(tmp_path, DirectoryBucket(root, windows.CLOCK))
    world.publish("7", *HONEST)
    wanted = world.expected(HONEST)
    if which == "statement":
        path = root / statement_key("peers/7", 0)
    else:
        [path] = (root / "peers" / "7" / "frames").iterdir()
    path.unlink()
    what(path)
    terms = windows.terms(peers=windows.terms().peers.__class__(windows.terms().peers.primaries))

    found = world.run(2, terms_of=lambda _: terms)

    assert [one.uids for one in found] == [HONEST] * 2, found
    assert found[0].reasons["7"] in (Reason.MISSING, Reason.SERVER_AWAY)
    assert same(world.master, wanted)
