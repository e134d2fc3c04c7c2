"""Rounds of the whole model among those of fragments, each begun when the one before is there."""

import os
from pathlib import Path

from tests import distributions
from tests.outside.test_outside_strategy import ROUNDS, atoll, run_file

SOURCE = Path(__file__).with_name("whole_now_and_then.py")


def test_run_comes_to_its_end_and_every_snapshot_is_read_back(tmp_path, monkeypatch):
    """Who needs a later version than there is waits, instead of downloading the same one forever.

    A round of the whole model says what a fragment is only until a later round moves it.
    """
    target = "whole_now_and_then:WholeNowAndThen.of"
    site = distributions.write(tmp_path / "site", "whole", target, SOURCE.read_text())
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), before])))
    file = run_file(tmp_path / "run.toml", rounds=ROUNDS)
    file.write_text(
        file.read_text().replace('"relay"', '"whole"').replace("every = 3", "every = 1")
    )

    simulated = atoll("simulate", file, "--islands", "3", "--dir", tmp_path / "state")
    exported = [
        atoll("export", tmp_path / "state", "--round", str(n), "-o", tmp_path / "weights")
        for n in (3, 4, 5, ROUNDS)
    ]

    assert exported[-1]["atoll.digest"] == simulated["digest"]
