"""Settings of a gather run: its own are checked together, those of others refused by name."""

from pathlib import Path

import pytest

from atoll import config
from atoll.errors import ConfigError
from atoll.strategies import registry
from atoll.versions import manifest_change
from tests.clusters import SMALL, manifest_for
from tests.gather_runs import MAIN, manifest, table


def test_run_file_with_one_bucket_is_a_gather_run():
    found = manifest()

    assert found.gather.buckets["main"].url == "s3://atoll"
    assert registry.of(found).follows


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("mode", "async", "mode='async' is not a mode of strategy 'gather'"),
        ("upload__codec", "int8", "upload.codec='int8' is not built for strategy 'gather'"),
        ("download", {"codec": "bf16"}, "download.codec='bf16' is not built"),
        ("outer__optimizer", "nesterov", "outer.optimizer='nesterov' is not built"),
        ("delay_steps", 1, "delay_steps=1 needs mode 'streaming'"),
        ("gather__buckets", {}, "[gather.buckets] names no bucket"),
        ("gather__primaries", 1, "gather.primaries=1 is below membership.min_workers=2"),
    ],
)
def test_setting_that_is_not_for_it_is_refused_by_name(name, value, said):
    with pytest.raises(ConfigError) as refused:
        config.parse(table(**{"membership__min_workers": 2, name: value}))

    assert str(refused.value).startswith(said)


@pytest.mark.parametrize("url", ["", "s3://ab", "s3://name/folder", "ftp://name", "memory:x", "/"])
def test_bucket_that_is_nowhere_is_refused_by_name(url):
    with pytest.raises(ConfigError, match=r"^gather\.buckets\.main\.url="):
        config.parse(table(gather__buckets__main__url=url))


def test_unknown_setting_of_a_bucket_is_answered_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"\[gather.buckets.main\] knows endpoint, region, url"):
        config.parse(table(gather__buckets__main__secret="x"))


def test_directory_of_a_bucket_counts_from_the_run_file():
    found = config.parse(table(gather__buckets__main__url="shelf"), base=Path("/runs"))

    assert found.settings["gather"]["buckets"]["main"]["url"] == "/runs/shelf"


@pytest.mark.parametrize("strategy", ["diloco", "sharded"])
def test_own_section_is_refused_in_other_runs(strategy):
    keys = ("name", "stop", "model", "data", "gather")
    made = {key: value for key, value in table().items() if key in keys}
    made |= {"strategy": strategy} | ({"sync_every": 4} if strategy == "diloco" else {})

    with pytest.raises(ConfigError, match="gather"):
        config.parse(made)


def test_recorded_manifest_of_another_strategy_with_buckets_is_refused():
    own = manifest().gather
    other = manifest_for(SMALL).model_copy(update={"gather": own})

    with pytest.raises(ConfigError, match=r"\[gather\] is not for strategy='diloco'"):
        registry.of(other)


def test_version_of_a_manifest_may_add_a_bucket_and_change_none():
    run = manifest()
    more = manifest(gather__buckets__second={"url": "memory:"}, gather__keep=3)
    moved = manifest(gather__buckets__main__endpoint="http://127.0.0.1:9")
    renamed = manifest(gather__buckets={"other": MAIN})

    assert manifest_change.next_version(run, more).manifest_version == 2
    for changed in (moved, renamed):
        with pytest.raises(ConfigError, match=r"gather.buckets.main"):
            manifest_change.next_version(run, changed)
