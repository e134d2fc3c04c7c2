"""A test that this machine cannot run is skipped by hand and fails in CI."""

import re
from pathlib import Path

import pytest


def test_missing_thing_skips_the_test_outside_ci(skip, monkeypatch):
    monkeypatch.delenv("CI", raising=False)

    with pytest.raises(pytest.skip.Exception, match="no avx2"):
        skip("this CPU has no avx2")


def test_missing_thing_fails_the_test_in_ci(skip, monkeypatch):
    monkeypatch.setenv("CI", "true")

    with pytest.raises(pytest.fail.Exception, match="no avx2"):
        skip("this CPU has no avx2")


# The one test that may be skipped in CI too: on a kernel without IPv6, which no package brings.
WITHOUT_THE_FIXTURE = {"conftest.py": 1, "integration/test_tls.py": 1}


def test_no_test_is_skipped_past_the_fixture():
    tests = Path(__file__).parents[1]
    found = {
        str(path.relative_to(tests)): len(ways)
        for path in sorted(tests.rglob("*.py"))
        if path != Path(__file__)
        and (ways := re.findall(r"pytest\.skip\(|importorskip|mark\.skip|skipif", path.read_text()))
    }

    assert found == WITHOUT_THE_FIXTURE
