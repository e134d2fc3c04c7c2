"""The run file: what is refused, and how."""

from pathlib import Path
from typing import Any

import pytest

from atoll import config
from atoll.errors import ConfigError
from atoll.protocol.manifest import DataSettings, Manifest, ModelSettings, differences

TEXT = """
name = "run"
sync_every = 5
[model]
architecture = "gpt"
[data]
kind = "synthetic"
[stop]
rounds = 3
"""


def table(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "name": "run",
        "sync_every": 5,
        "model": {"architecture": "gpt"},
        "data": {"kind": "synthetic"},
        "stop": {"rounds": 3},
    }
    return {**base, **changes}


def manifest(**changes: Any) -> Manifest:
    parsed = config.parse(table(**changes))
    return parsed.manifest(
        ModelSettings(
            definition=dict(parsed.model), layout_digest="1" * 64, initial_digest="2" * 64
        ),
        DataSettings(definition=dict(parsed.data), identity={"rows": 3}),
    )


def written(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "run.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_run_file_becomes_settings(tmp_path):
    loaded = config.load(written(tmp_path, TEXT))

    assert loaded.settings == {"name": "run", "sync_every": 5, "stop": {"rounds": 3}}
    assert (loaded.model, loaded.data) == ({"architecture": "gpt"}, {"kind": "synthetic"})


def test_quickstart_is_a_run_file():
    loaded = config.load(Path(__file__).parents[2] / "examples" / "quickstart.toml")

    assert loaded.settings["membership"] == {"min_workers": 2}


def test_unknown_setting_lists_the_known_ones():
    with pytest.raises(ConfigError) as refused:
        config.parse(table(sync_evry=5))

    message = str(refused.value)
    assert message.startswith("sync_evry is not a setting; the run file knows ")
    expected = sorted(set(Manifest.model_fields) - set(config.NOT_IN_FILE))
    assert message.endswith(", ".join(expected))


@pytest.mark.parametrize(
    ("section", "key", "known"),
    [
        ("inner", "learning_rate", "batch, beta1, beta2, clip, eps, lr, momentum, optimizer"),
        ("membership", "min_worker", "grace_seconds, min_workers, quorum"),
        ("storage", "keep", "blobs, keep_snapshots, ledger, retain, snapshot_every"),
        ("stop", "round", "rounds, tokens"),
        ("evaluate", "each", "every"),
    ],
)
def test_unknown_key_of_a_section_lists_the_known_ones(section, key, known):
    with pytest.raises(ConfigError) as refused:
        config.parse(table(**{section: {key: 1}}))

    assert str(refused.value).startswith(f"{section}.{key} is not a setting; [{section}] knows ")
    assert known in str(refused.value)


def test_unknown_key_of_a_nested_section_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"inner\.schedule\.warmup is not a setting") as refused:
        config.parse(table(inner={"schedule": {"warmup": 1}}))

    assert "final_fraction, kind, total_tokens, warmup_tokens" in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"upload": {"codecs": 1}},
            "upload.codecs=1: is no setting of codec 'fp32', which has ",
        ),
        ({"upload": {"block": 64}}, "upload.block=64: is no setting of codec 'fp32', which has"),
        (
            {"download": {"codec": "sign", "rounding": "nearest"}},
            "download.rounding='nearest': is no setting of codec 'sign', which has block, codec, ",
        ),
        (
            {"upload": {"codec": "bf16", "block": 64}},
            "upload.block=64: is no setting of codec 'bf16', which has codec, decay, ",
        ),
        ({"upload": {"codec": "int2"}}, "upload.codec='int2': is not known; choose one of "),
        ({"download": {"codec": 4}}, "download.codec=4: is not known; choose one of "),
        (
            {"outer": {"optimizer": "sgd", "momentum": 0.9}},
            "outer.momentum=0.9: is no setting of optimizer 'sgd', which has lr, optimizer",
        ),
        ({"outer": {"beta1": 0.9}}, "outer.beta1=0.9: is no setting of optimizer 'nesterov', "),
        ({"outer": {"optimizer": "adamw"}}, "outer.optimizer='adamw': is not known; choose one"),
    ],
)
def test_setting_of_another_codec_or_optimizer_is_refused_with_those_it_has(changes, message):
    with pytest.raises(ConfigError) as refused:
        config.parse(table(**changes))

    assert str(refused.value).startswith(message)


@pytest.mark.parametrize("name", ["settings_authority", "protocol_version"])
def test_what_is_not_a_choice_cannot_be_set(name):
    with pytest.raises(ConfigError, match=f"{name} is not a setting"):
        config.parse(table(**{name: 1}))


def test_library_is_no_strategy_of_a_run():
    with pytest.raises(ConfigError) as refused:
        config.parse(table(strategy="pools"))

    assert str(refused.value).startswith("strategy='pools'")
    assert "needs no coordinator; it runs strategy" in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_fragments": 4}, "num_fragments=4 needs mode 'streaming'; .* leave it out"),
        ({"delay_steps": 1}, "delay_steps=1 needs mode 'streaming'; .* leave it out"),
        ({"local_weight": 0.5}, "local_weight=0.5 needs mode 'streaming'; .* leave it out"),
        ({"dylu": True}, "dylu=True needs mode 'async'"),
        ({"mode": "streaming", "dylu": True}, "dylu=True needs mode 'async'; in mode 'streaming'"),
        (
            {"mode": "streaming", "sync_every": 4, "num_fragments": 3},
            "sync_every=4 is not a multiple of num_fragments=3",
        ),
        (
            {"mode": "streaming", "sync_every": 4, "delay_steps": 4},
            "delay_steps=4 is not below sync_every=4",
        ),
    ],
)
def test_setting_of_another_mode_is_refused_by_name(changes, says):
    with pytest.raises(ConfigError, match=f"^{says}"):
        config.parse(table(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"mode": "sync"},
        {"mode": "streaming"},
        {"mode": "streaming", "num_fragments": 2, "sync_every": 4, "delay_steps": 3},
        {"strategy": "diloco"},
        {"num_fragments": 1},
        {"dylu": False},
    ],
)
def test_what_is_built_may_be_said(changes):
    assert config.parse(table(**changes)).settings.items() >= changes.items()


@pytest.mark.parametrize("interval", [10.0, 11.0])
def test_heartbeat_interval_not_below_the_timeout_is_refused(interval):
    with pytest.raises(ConfigError, match="every worker would be taken for dead"):
        config.parse(table(heartbeat_interval=interval, heartbeat_timeout=10.0))


@pytest.mark.parametrize("name", ["model", "data"])
@pytest.mark.parametrize("value", [None, 3])
def test_section_that_is_missing_is_named(name, value):
    changed = table()
    changed[name] = value

    with pytest.raises(ConfigError, match=rf"no \[{name}\] section"):
        config.parse(changed)


@pytest.mark.parametrize("name", ["name", "sync_every", "stop"])
def test_setting_that_is_missing_is_named(name):
    changed = table()
    del changed[name]

    with pytest.raises(ConfigError, match=f"{name} is missing; every run file sets it"):
        config.parse(changed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sync_every": 0}, "sync_every=0: "),
        ({"seed": "one"}, "seed='one': "),
        ({"inner": {"lr": -1.0}}, "inner.lr=-1.0: "),
        ({"inner": 3}, "inner=3: "),
        ({"storage": 3}, "storage=3: "),
        ({"membership": {"min_workers": 3, "quorum": 2}}, "membership: quorum=2 is below"),
        ({"stop": {}}, "stop: neither rounds nor tokens"),
    ],
)
def test_value_that_breaks_its_rule_is_named_with_it(changes, message):
    with pytest.raises(ConfigError) as refused:
        config.parse(table(**changes))

    assert str(refused.value).startswith(message)


def test_places_of_this_machine_are_not_in_the_manifest(tmp_path):
    """Two machines agree on content, never on a path."""
    loaded = config.parse(
        table(
            model={"architecture": "gpt", "start_from": "weights.safetensors"},
            data={"kind": "text", "path": "corpus"},
            storage={"ledger": "postgresql://h/d", "blobs": "s3://bucket", "snapshot_every": 3},
        ),
        base=tmp_path,
    )

    assert loaded.start_from == tmp_path / "weights.safetensors"
    assert loaded.data_location == str(tmp_path / "corpus")
    assert (loaded.ledger, loaded.blobs) == ("postgresql://h/d", "s3://bucket")
    assert loaded.model == {"architecture": "gpt"}
    assert loaded.data == {"kind": "text"}
    assert loaded.settings["storage"] == {"snapshot_every": 3}


def test_absolute_path_stays_absolute(tmp_path):
    loaded = config.parse(table(data={"kind": "text", "path": "/corpus"}), base=tmp_path)

    assert loaded.data_location == "/corpus"


def test_parsing_leaves_the_table_as_it_was():
    given = table(data={"kind": "text", "path": "corpus"}, storage={"blobs": "b"})

    config.parse(given)

    assert given == table(data={"kind": "text", "path": "corpus"}, storage={"blobs": "b"})


def test_file_that_is_absent_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read run file .*absent\.toml.*No such file"):
        config.load(tmp_path / "absent.toml")


@pytest.mark.parametrize("text", ["name = ", b"\xff\xfe", "a = 1\na = 2"])
def test_file_that_is_not_toml_is_named(tmp_path, text):
    with pytest.raises(ConfigError, match=r"run\.toml' is not TOML"):
        config.load(written(tmp_path, text))


def test_file_without_bounds_is_not_read(tmp_path):
    path = written(tmp_path, "#" * (config.MAX_RUN_FILE_BYTES + 1))

    with pytest.raises(ConfigError, match="larger than"):
        config.load(path)


def changed(**changes: Any) -> list[str]:
    """What differs between the run file and the same with `changes`."""
    mine, theirs = (made.model_dump(mode="json") for made in (manifest(), manifest(**changes)))
    return [str(difference) for difference in differences(mine, theirs)]


def test_differences_name_each_changed_field_with_both_values():
    """A restart with another file is noticed, field by field."""
    found = changed(sync_every=6, inner={"schedule": {"warmup_tokens": 9}})

    assert found == ["inner.schedule.warmup_tokens: 0 -> 9", "sync_every: 5 -> 6"]


def test_equal_manifests_have_no_differences():
    assert changed() == []


def test_differences_see_a_key_that_one_side_lacks():
    found = changed(model={"architecture": "gpt", "width": 8})

    assert found == ["model.definition.width: 'absent' -> 8"]


@pytest.mark.parametrize(
    ("section", "name"),
    [
        ("storage", "ledger"),
        ("storage", "blobs"),
        ("model", "start_from"),
        ("model", "fingerprint_of"),
    ],
)
@pytest.mark.parametrize("value", [5, "", ["a"]])
def test_place_that_is_no_text_is_refused_by_name(section, name, value):
    given = {**table().get(section, {}), name: value}

    with pytest.raises(ConfigError, match=rf"{section}\.{name}=.* must be a path"):
        config.parse(table(**{section: given}))
