"""The lint refuses what runs bytes from elsewhere, and the source has none of it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

BANNED = {
    "pickle": "import pickle",
    "pickle by name": "from pickle import loads",
    "cloudpickle": "import cloudpickle",
    "marshal": "import marshal",
    "shelve": "import shelve",
    "torch.load": "torch.load('x')",
    "torch.load by name": "from torch import load",
    "torch.save": "torch.save({}, 'x')",
    "broadcast_object_list": "torch.distributed.broadcast_object_list([])",
    "all_gather_object": "from torch.distributed import all_gather_object",
    "gather_object": "from torch.distributed import gather_object",
    "scatter_object_list": "from torch.distributed import scatter_object_list",
}


def ruff(*arguments: str, text: str | None = None) -> str:
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "concise"]
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, input=text, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def flagged() -> set[str]:
    """The lines of a source file that the project's own lint refuses as banned."""
    lines = ["import torch", "import json", *BANNED.values(), "json.loads('1')"]
    found = ruff("--stdin-filename", "src/atoll/snippet.py", "-", text="\n".join(lines) + "\n")
    numbers = [line.split(":")[1] for line in found.splitlines() if "TID251" in line]
    return {lines[int(number) - 1] for number in numbers}


@pytest.mark.parametrize("name", BANNED)
def test_lint_refuses_apis_that_run_bytes_from_elsewhere(flagged: set[str], name: str) -> None:
    assert BANNED[name] in flagged


def test_lint_lets_other_apis_pass(flagged: set[str]) -> None:
    assert flagged == set(BANNED.values())


def test_source_has_no_api_that_runs_bytes_from_elsewhere() -> None:
    assert ruff("--ignore-noqa", "--select", "TID251,S301,S302", "src") == "All checks passed!\n"
