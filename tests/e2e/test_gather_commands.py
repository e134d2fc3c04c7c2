"""`atoll gather …` as typed: a directory bucket, two ranks as processes, a late joiner."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import save_file
from typer.testing import CliRunner

from atoll.cli.app import app
from atoll.errors import AtollError, ConfigError, StateDamaged
from tests.processes import ATOLL

UIDS = ("a", "b", "c")
SHAPES = {"first": (300, 500), "second": (17,)}
LIMIT_SECONDS = 120


def commanded(*words: str) -> Any:
    """What a command prints, in this process."""
    found = CliRunner().invoke(app, ["gather", *words, "--json"])
    if isinstance(found.exception, AtollError):
        raise found.exception
    assert found.exit_code == 0, (found.output, found.exception)
    return json.loads(found.output)


def written(path: Path, seed: int) -> Path:
    made = torch.Generator().manual_seed(seed)
    values = {name: torch.randn(shape, generator=made) for name, shape in SHAPES.items()}
    save_file(values, str(path))
    return path


def filed(home: Path, keys: dict[str, str], *, state: str) -> Path:
    """The gather file of a machine."""
    lists = "".join(
        f'[[primaries]]\nuid = "{uid}"\nkey = "{keys[uid]}"\nbucket = "main"\nprefix = "{uid}"\n'
        for uid in UIDS
    )
    path = home / f"{state}.toml"
    path.write_text(
        f'run_id = "tiny"\nstart = "start.safetensors"\nstate = "{state}"\nouter_lr = 0.5\n'
        f"seconds = 20.0\npatience_seconds = 0.2\n"
        f'[buckets]\nmain = "bucket"\n[archive]\nbucket = "main"\n'
        f'prefix = "archive"\nkey = "{keys["group"]}"\nsecret = "group.key"\n{lists}'
    )
    return path


@pytest.fixture
def home(tmp_path: Path) -> Path:
    written(tmp_path / "start.safetensors", 0)
    (tmp_path / "bucket").mkdir()
    keys = {
        uid: commanded("keygen", str(tmp_path / f"{uid}.key"))["public_key"]
        for uid in (*UIDS, "group")
    }
    for state in ("group", "late", *UIDS):
        filed(tmp_path, keys, state=state)
    return tmp_path


def publish(home: Path, uid: str, seed: int) -> Any:
    data = written(home / f"{uid}.safetensors", seed)
    key = str(home / f"{uid}.key")
    return commanded("publish", str(home / f"{uid}.toml"), uid, str(data), "--key", key)


def ranked(command: str, file: Path) -> subprocess.CompletedProcess[bytes]:
    """A command on two ranks, as processes."""
    ran = subprocess.run(
        [*ATOLL, "gather", command, str(file), "--ranks", "2", "--json"],
        capture_output=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr.decode()[-3000:]
    return ran


def samples(path: Path) -> dict[str, float]:
    """A file of metrics, as Prometheus reads it."""
    return {
        " ".join((sample.name, *sample.labels.values())): sample.value
        for family in text_string_to_metric_families(path.read_text())
        for sample in family.samples
    }


def test_two_ranks_gather_and_a_late_joiner_ends_in_the_same_bits(home):
    for seed, uid in enumerate(UIDS):
        assert publish(home, uid, seed)["window"] == 0

    ran = ranked("window", home / "group.toml")
    first = json.loads(ran.stdout)
    assert (first["uids"], first["ranks"], first["window"]) == (list(UIDS), 2, 0)

    caught = commanded("catch-up", str(home / "a.toml"))
    assert (caught["stop"], caught["digest"]) == (1, first["digest"])
    publish(home, "a", 7)
    before = shutil.copytree(home / "group", home / "before")
    metrics = home / "gather.prom"
    second = commanded("window", str(home / "group.toml"), "--metrics", str(metrics))  # by one rank
    shown = samples(metrics)
    assert (shown["atoll_gather_window"], shown["atoll_gather_actual_peers"]) == (1.0, 1.0)
    assert shown["atoll_gather_skips MISSING"] == shown["atoll_gather_skips_by_fault peer"] == 2.0
    assert shown["atoll_gather_download_bytes"] == second["download_bytes"]
    assert shown["atoll_gather_replayed"] == 0.0 and metrics.stat().st_mode & 0o777 == 0o644
    assert (second["window"], second["uids"]) == (1, ["a"])
    assert {why[0] for why in second["skipped"].values()} == {"MISSING"}

    # As after a crash between the artifact and the saved weights: it is applied, nothing fetched.
    shutil.rmtree(home / "group")
    shutil.copytree(before, home / "group")
    shutil.rmtree(home / "bucket" / "a")
    again = commanded("window", str(home / "group.toml"), "--metrics", str(metrics))
    assert samples(metrics)["atoll_gather_replayed"] == 1.0
    told = ("digest", "artifact", "uids", "skipped")
    assert [again[name] for name in told] == [second[name] for name in told]

    ran = ranked("catch-up", home / "late.toml")
    late = json.loads(ran.stdout)
    assert (late["applied"], late["digest"], late["ranks"]) == (2, second["digest"], 2)
    weights = [home / state / "weights" / "00000002.f32" for state in ("group", "late")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_refusals_say_what_to_do(home):
    with pytest.raises(ConfigError, match="list it in the gather file"):
        commanded("publish", str(home / "a.toml"), "zz", "none", "--key", str(home / "a.key"))
    with pytest.raises(ConfigError, match="sign with that one"):
        commanded("publish", str(home / "a.toml"), "b", "none", "--key", str(home / "a.key"))
    with pytest.raises(ConfigError, match="exists and may be the only copy"):
        commanded("keygen", str(home / "a.key"))
    broken = home / "broken.toml"
    broken.write_text((home / "a.toml").read_text().replace("outer_lr = 0.5", "outer_lr = -1.0"))
    with pytest.raises(ConfigError, match="outer_lr"):
        commanded("window", str(broken))


def test_damaged_weights_are_refused_before_anything_is_fetched(home):
    group, late = home / "group", home / "late"
    commanded("window", str(home / "group.toml"))
    commanded("catch-up", str(home / "late.toml"))
    for state in (group, late):
        path = state / "weights" / "00000001.f32"
        path.write_bytes(b"\1" + path.read_bytes()[1:])

    for words in (("window", "group.toml"), ("catch-up", "late.toml")):
        with pytest.raises(StateDamaged, match="catch up"):
            commanded(words[0], str(home / words[1]))

    assert not (home / "bucket" / "archive" / "windows" / "00000001.json").exists()


def test_signing_key_that_is_missing_is_named(home):
    (home / "group.key").unlink()

    with pytest.raises(ConfigError, match=r"group\.key"):
        commanded("window", str(home / "group.toml"))
