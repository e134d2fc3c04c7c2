"""A codec that no line of the package names: its one file is `tests/steps.py`."""

import json
from typing import Any

import pytest

from atoll import config
from atoll.codecs import registry
from atoll.codecs.settings import CodecSettings
from atoll.errors import ConfigError
from atoll.protocol.manifest import Manifest
from tests import clusters, tiny
from tests.clusters import Cluster
from tests.steps import Steps, StepsSettings
from tests.unit.test_config import table
from tests.unit.test_manifest import BASE

STEPS: dict[str, Any] = {"codec": "steps", "steps": 8192}


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if its module had been imported with those of the built-in codecs."""
    monkeypatch.setitem(CodecSettings.known, "steps", StepsSettings)


@pytest.mark.usefixtures("known")
def test_manifest_states_its_settings_and_reads_them_back():
    manifest = Manifest.model_validate({**BASE, "upload": STEPS})

    stated = {**STEPS, "error_feedback": True, "decay": 1.0}
    assert json.loads(manifest.body())["upload"] == stated
    assert Manifest.model_validate_json(manifest.body()) == manifest
    assert manifest.upload.build() == Steps(8192)
    assert registry.versions()["steps"] == 1


@pytest.mark.usefixtures("known")
def test_run_file_chooses_it_and_its_own_rules_are_kept():
    config.parse(table(upload=STEPS))

    with pytest.raises(ConfigError, match=r"^upload\.steps=0: .*greater than or equal to 1"):
        config.parse(table(upload={**STEPS, "steps": 0}))
    with pytest.raises(ConfigError, match=r"^upload\.block=64: is no setting of codec 'steps'"):
        config.parse(table(upload={**STEPS, "block": 64}))


def test_run_file_that_names_it_is_refused_where_it_is_not_known():
    with pytest.raises(ConfigError, match=r"^upload\.codec='steps': is not known; choose one of"):
        config.parse(table(upload=STEPS))


@pytest.mark.usefixtures("known")
def test_run_travels_in_it_both_ways_and_replays(tmp_path):
    cluster = Cluster(tmp_path, {"upload": STEPS, "download": {"codec": "steps"}})

    cluster.rounds(3, *cluster.pair())

    assert cluster.version == 3
    assert cluster.audit(with_replay=True).problems == []
    cluster.close()


@pytest.mark.usefixtures("known")
def test_islands_train_in_it_with_error_feedback(tmp_path):
    upload: dict[str, Any] = {"upload.codec": "steps", "upload.error_feedback": True}
    fed = tiny.simulate(directory=tmp_path / "fed", **upload)
    starved = tiny.simulate(**{**upload, "upload.error_feedback": False})

    report, _ = clusters.audited(tmp_path / "fed")
    assert report.clean
    assert report.digest == fed.digest != starved.digest
