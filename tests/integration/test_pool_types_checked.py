"""What mypy says about values of many ranks that are put where they do not belong."""

import contextlib
import re
from pathlib import Path

import pytest
from mypy import api

ROOT = Path(__file__).parents[2]
MARK = re.compile(r"# E: (\S+)$")
LINE = re.compile(r"^\S+?:(\d+): error: .*\[(\S+)\]$", re.MULTILINE)

SNIPPETS = '''"""Each line that is marked is an error, and no other one."""

from torch import Tensor

from atoll.collectives.base import Collectives, Key
from atoll.pools.provenance import Coverage
from atoll.pools.types import Mean, Partial, Replicated, Total, once, reduce


def right(p: Partial, r: Replicated, group: Collectives, key: Key) -> Tensor:
    both: Partial = p + once(r, group)
    total: Total = reduce(both, group, key)
    mean: Mean = total.mean()
    return mean.value


def added(p: Partial, r: Replicated, t: Total, m: Mean, x: Tensor) -> None:
    p + m  # E: operator
    p + r  # E: operator
    p + t  # E: operator
    p + x  # E: operator
    m + p  # E: operator
    r + p  # E: operator
    t + p  # E: operator
    m + m  # E: operator
    t + t  # E: operator
    r + r  # E: operator


def reduced(r: Replicated, t: Total, m: Mean, group: Collectives, key: Key) -> None:
    reduce(m, group, key)  # E: arg-type
    reduce(r, group, key)  # E: arg-type
    reduce(t, group, key)  # E: arg-type
    once(m, group)  # E: arg-type
    once(t, group)  # E: arg-type


def made(r: Replicated, t: Total, m: Mean, c: Coverage) -> None:
    Partial(m, 1, "rows", c)  # E: arg-type
    Partial(t, 1, "rows", c)  # E: arg-type
    Partial(r, 1, "rows", c)  # E: arg-type
    Partial(m.value, 1.5, "rows", c)  # E: arg-type
    Replicated(m, 1, "rows", c[0])  # E: arg-type


def divided(p: Partial) -> None:
    p.mean()
    print("never")  # E: unreachable
'''


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> set[tuple[int, str]]:
    """What mypy finds with the project's settings, and its cache where there is one."""
    file = tmp_path_factory.mktemp("snippets") / "snippets.py"
    file.write_text(SNIPPETS)
    settings = ["--config-file", str(ROOT / "pyproject.toml")]
    cache = ["--cache-dir", str(ROOT / ".mypy_cache")]
    with contextlib.chdir(ROOT):  # the settings say where sources are from there
        told, trouble, _ = api.run([*settings, *cache, str(file)])
    assert trouble == ""
    return {(int(line), code) for line, code in LINE.findall(told)}


def test_mypy_refuses_what_is_refused_at_run_time_and_nothing_else(found):
    lines = enumerate(SNIPPETS.splitlines(), 1)
    marked = {(number, mark[1]) for number, line in lines if (mark := MARK.search(line))}

    assert found == marked
    assert len(marked) == 21
