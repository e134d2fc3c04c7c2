"""The package as others get it: a wheel that works, and the example script as an island."""

import os
import secrets
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from atoll.launch import local
from atoll.launch.local import Tokens
from tests.processes import BF16

ROOT = Path(__file__).parents[2]
MAX_BYTES = 3_000_000  # of what somebody fetches to get the source

pytestmark = pytest.mark.xdist_group("package")


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        env={**os.environ, **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the sdist, and the wheel that was built from it alone."""
    home = tmp_path_factory.mktemp("dist")
    done = run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(home))
    assert done.returncode == 0, done.stdout + done.stderr
    return home


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory into which the built wheel was installed."""
    [wheel] = built.glob("atoll-*.whl")
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    done = run(*pip, "--target", str(target), str(wheel))
    assert done.returncode == 0, done.stderr
    return target


def test_sdist_is_small_and_holds_nothing_that_git_ignores(built: Path) -> None:
    """Set up, test and build from it; nothing else that lies in somebody's checkout."""
    [sdist] = built.glob("atoll-*.tar.gz")
    tracked = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").stdout

    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    assert sdist.stat().st_size < MAX_BYTES, (
        f"the sdist has {sdist.stat().st_size} bytes and must stay below {MAX_BYTES}; see with "
        f"`tar tzvf` what does not belong, and leave it out in pyproject.toml"
    )
    assert names - {"PKG-INFO"} <= set(tracked.split("\0"))
    assert {"src/atoll/files.py", "tests/e2e/test_package.py", "constraints.txt"} <= names


def test_shallow_clone_fetches_little(tmp_path: Path) -> None:
    done = run("git", "clone", "--quiet", "--depth", "1", ROOT.as_uri(), str(tmp_path / "clone"))
    assert done.returncode == 0, done.stderr

    packs = (tmp_path / "clone" / ".git" / "objects" / "pack").glob("*.pack")

    assert 0 < sum(pack.stat().st_size for pack in packs) < MAX_BYTES


def test_wheel_gives_a_working_command(installed: Path) -> None:
    program = "import atoll, sys; print(atoll.__file__); from atoll.cli import main; main()"

    answered = run(
        sys.executable, "-c", program, "--version", PYTHONPATH=str(installed), PYTHONSAFEPATH="1"
    )

    where, version = answered.stdout.splitlines()
    assert where.startswith(str(installed))
    assert version == "atoll 0.1.0"


def test_wheel_simulates_a_run(installed: Path, tmp_path: Path) -> None:
    run_file = BF16.write(tmp_path / "run.toml")
    command = "import sys; from atoll.cli import main; sys.argv[0] = 'atoll'; main()"

    answered = run(
        sys.executable,
        "-c",
        command,
        "simulate",
        str(run_file),
        "--rounds",
        "1",
        PYTHONPATH=str(installed),
        PYTHONSAFEPATH="1",
    )

    assert answered.returncode == 0, answered.stderr
    assert "1 rounds in" in answered.stdout


def test_example_script_takes_part_in_a_run(tmp_path: Path) -> None:
    tokens = Tokens(secrets.token_urlsafe(32), secrets.token_urlsafe(32))
    run_file = BF16.write(tmp_path / "run.toml")
    coordinator = local.start_coordinator(run_file, tmp_path / "c", tokens=tokens)
    try:
        coordinator.wait_ready()
        words = [sys.executable, "examples/script.py", coordinator.url, tokens.worker]
        environment = {**os.environ, "HOME": str(tmp_path)}
        scripts = [
            subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]

        said = [script.communicate(timeout=120)[0].split() for script in scripts]

        assert [script.returncode for script in scripts] == [0, 0]
        assert said[0][-1] == said[1][-1]  # both end with the same params digest
        assert coordinator.wait(timeout_seconds=60) == 0
    finally:
        coordinator.kill()
