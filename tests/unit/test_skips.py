"""A test that this machine cannot run is skipped by hand and fails in CI."""

import pytest


def test_missing_thing_skips_the_test_outside_ci(skip, monkeypatch):
    monkeypatch.delenv("CI", raising=False)

    with pytest.raises(pytest.skip.Exception, match="no avx2"):
        skip("this CPU has no avx2")


def test_missing_thing_fails_the_test_in_ci(skip, monkeypatch):
    monkeypatch.setenv("CI", "true")

    with pytest.raises(pytest.fail.Exception, match="no avx2"):
        skip("this CPU has no avx2")
