"""What `atoll gather` refuses before it does anything, and what it leaves as it was."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import ConfigError, Conflict, StateHeld
from atoll.launch import gather_file
from atoll.launch.gather_state import GatherState
from tests.e2e.test_gather_commands import LIMIT_SECONDS, UIDS, commanded, home, publish, written
from tests.processes import ATOLL

__all__ = ["home"]  # the fixture


def changed(home: Path, old: str, new: str, *, name: str = "group") -> str:
    """The gather file of the group with something else in it."""
    text = (home / f"{name}.toml").read_text()
    assert old in text
    path = home / "changed.toml"
    path.write_text(text.replace(old, new, 1))
    return str(path)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('run_id = "tiny"', 'run_id = "two words"', r"run_id='two words' must be"),
        ('prefix = "archive"', 'prefix = "../archive"', r"archive\.prefix='\.\./archive' must be"),
        ('bucket = "main"\nprefix = "b"', 'bucket = "mian"\nprefix = "b"', "bucket='mian' is none"),
        ('prefix = "b"', 'prefix = "a"', "prefix 'a' of bucket 'main' is listed for 'a' and 'b'"),
        ("[buckets]", "[weights]\nbb = 2\n[buckets]", r"\[weights\] has 'bb', which is no peer"),
        ("[buckets]", "[scores]\nbb = 2.0\n[buckets]", r"\[scores\] has 'bb', which is no peer"),
    ],
)
def test_file_that_cannot_work_is_refused_before_anything_is_made(home, old, new, told):
    with pytest.raises(ConfigError, match=told):
        commanded("window", changed(home, old, new))

    assert not (home / "group").exists() and not any((home / "bucket").iterdir())


@pytest.mark.parametrize("step", ["window", "catch-up"])
def test_bucket_that_is_no_directory_is_refused_and_not_made(home, step):
    misspelled = changed(home, 'main = "bucket"', 'main = "bukket"')

    with pytest.raises(ConfigError, match=r"bucket 'main' is '.*/bukket', which is no directory"):
        commanded(step, misspelled)

    assert not (home / "bukket").exists() and not (home / "group").exists()


def test_first_peer_that_publishes_makes_the_bucket(home):
    (home / "bucket").rmdir()

    publish(home, "a", 1)

    assert commanded("window", str(home / "group.toml"))["uids"] == ["a"]


def test_catch_up_does_not_go_back(home):
    for _ in range(2):
        commanded("window", str(home / "group.toml"))
    head = (home / "group" / "gather.json").read_bytes()

    with pytest.raises(ConfigError, match="--stop 1 lies before window 2"):
        commanded("catch-up", str(home / "group.toml"), "--stop", "1")

    assert (home / "group" / "gather.json").read_bytes() == head
    assert commanded("catch-up", str(home / "group.toml"), "--stop", "2")["applied"] == 0


@pytest.mark.parametrize("step", ["window", "catch-up", "publish"])
def test_state_of_another_run_is_refused_by_name(home, step):
    commanded("window", str(home / "group.toml"))
    head = (home / "group" / "gather.json").read_bytes()
    other = changed(home, "outer_lr = 0.5", "outer_lr = 0.25")
    words = [step, other]
    if step == "publish":
        words += ["a", str(written(home / "a.safetensors", 1)), "--key", str(home / "a.key")]

    with pytest.raises(ConfigError, match="outer_lr back"):
        commanded(*words)

    assert (home / "group" / "gather.json").read_bytes() == head
    assert not (home / "bucket" / "archive" / "windows" / "00000001.json").exists()


@pytest.mark.parametrize("step", ["window", "catch-up"])
def test_state_that_another_process_moves_is_refused_by_name(home, step):
    file = gather_file.load(home / "group.toml")
    state = GatherState(file.state, file.layout, file.manifest_sha256)
    state.begin(file.start)
    held = state.hold()
    try:
        with pytest.raises(StateHeld, match="only one gather window or catch-up"):
            commanded(step, str(home / "group.toml"))
    finally:
        held.close()

    assert commanded(step, str(home / "group.toml"))["digest"]


def test_publish_that_is_refused_leaves_no_frame(home):
    publish(home, "a", 1)
    with pytest.raises(Conflict):
        publish(home, "a", 2)

    assert [path.name for path in (home / "a").iterdir() if "frame" in path.name] == []


def test_ranks_log_as_loudly_as_asked_and_a_refusal_is_their_sentence_and_exit_code(home):
    for seed, uid in enumerate(UIDS):
        publish(home, uid, seed)

    def ran(file: str) -> Any:
        words = [*ATOLL, "gather", "window", file, "--ranks", "2", "--json"]
        return subprocess.run(
            [*words, "--log-level", "info"], capture_output=True, timeout=LIMIT_SECONDS, check=False
        )

    good = ran(str(home / "group.toml"))
    assert good.returncode == 0, good.stderr.decode()[-3000:]
    assert json.loads(good.stdout)["ranks"] == 2
    assert good.stderr.decode().count("window applied") == 1

    refused = ran(changed(home, "outer_lr = 0.5", "outer_lr = 0.25"))
    assert (refused.returncode, refused.stdout) == (2, b"")
    told = refused.stderr.decode().splitlines()
    assert told and all("outer_lr back" in line and line.endswith("[CONFIG]") for line in told)
