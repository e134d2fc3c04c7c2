"""Settings of a sharded run: its own are checked together, those of others refused by name."""

from typing import Any

import pytest

from atoll import config
from atoll.errors import ConfigError
from atoll.layout import Layout
from atoll.protocol.manifest import Manifest
from atoll.strategies import registry
from atoll.strategies.sharded import settings
from tests import run_tables
from tests.clusters import SMALL, manifest_for


def table(**changes: Any) -> dict[str, Any]:
    """A sharded run file; `changes` by dotted name with `__` for the dot."""
    return run_tables.table({"strategy": "sharded"}, changes)


def manifest(**changes: Any) -> Manifest:
    return run_tables.manifest(table(**changes))


def test_run_file_needs_no_setting_of_another_strategy():
    found = config.parse(table(sharded__save_every=5, membership__min_workers=2))

    assert found.settings["sharded"] == {"save_every": 5}


@pytest.mark.parametrize("name", sorted(settings.FOREIGN))
def test_setting_of_another_strategy_is_refused_by_name_even_at_its_default(name):
    section, _, last = name.rpartition(".")
    whole = Manifest.model_validate({**manifest().model_dump(mode="json")}).model_dump(mode="json")
    value = (whole[section] if section else whole)[last]

    with pytest.raises(ConfigError) as refused:
        config.parse(table(**{name.replace(".", "__"): value}))

    assert str(refused.value).startswith(name)
    assert "is not a setting of strategy 'sharded'" in str(refused.value)


def test_section_of_sharded_is_refused_in_a_diloco_run_file():
    file = {**table(sharded__save_every=10), "strategy": "diloco", "sync_every": 2}

    with pytest.raises(ConfigError, match=r"^\[sharded\] is not for strategy='diloco'"):
        config.parse(file)


def test_sync_every_is_still_required_of_rounds():
    file = {**table(), "strategy": "diloco"}

    with pytest.raises(ConfigError, match=r"^sync_every is missing; every run file sets it"):
        config.parse(file)


def test_unknown_key_of_the_section_is_named_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"sharded\.save is not a setting; \[sharded\] knows .*"):
        config.parse(table(sharded__save=3))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"sharded__commit": "quorum"},
            "sharded.exchange='ring' does not go with sharded.commit='quorum': a ring",
        ),
        *(
            (
                {"sharded__commit": "quorum", "sharded__exchange": "direct", name: value},
                f"{name.replace('__', '.')}={value!r} does not go with sharded.commit='quorum'",
            )
            for name, value in {
                "sharded__transport": "torch_dist",
                "sharded__gradients": "int8",
                "sharded__parameters": "bf16",
                "sharded__residuals": True,
                "sharded__onebit_warmup_steps": 5,
            }.items()
        ),
        (
            {"sharded__bulk": "tcp", "sharded__transport": "torch_dist"},
            "sharded.bulk='tcp' with transport='torch_dist'",
        ),
        ({"sharded__residuals": True}, "sharded.residuals=true with gradients='fp32'"),
        (
            {"sharded__onebit_warmup_steps": 5, "sharded__gradients": "int8"},
            "sharded.onebit_warmup_steps=5 with gradients='int8'",
        ),
        (
            {"sharded__onebit_warmup_steps": 5, "sharded__residuals": True},
            "sharded.onebit_warmup_steps=5 with residuals=true",
        ),
        ({"inner__optimizer": "sgd"}, "inner.optimizer='sgd' is not built for strategy 'sharded'"),
        ({"inner__precision": "bf16"}, "inner.precision='bf16' is not built for"),
        (
            {"sharded__transport": "torch_dist", "sharded__gradients": "int8"},
            "sharded.gradients='int8' with transport='torch_dist' and exchange='ring'",
        ),
        (
            {"sharded__onebit_warmup_steps": 5},
            "sharded.onebit_warmup_steps=5 with exchange='ring'",
        ),
        ({"membership__min_workers": 1025}, "membership.min_workers=1025 is more than the 1024"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_by_name(changes, says):
    with pytest.raises(ConfigError) as refused:
        config.parse(table(**changes))

    assert str(refused.value).startswith(says)


@pytest.mark.parametrize(
    "changes",
    [
        {"sharded__bulk": "tcp"},
        {"sharded__commit": "quorum", "sharded__exchange": "direct"},
        {"sharded__transport": "torch_dist"},
        {
            "sharded__transport": "torch_dist",
            "sharded__gradients": "int8",
            "sharded__exchange": "direct",
        },
        {"sharded__residuals": True, "sharded__gradients": "int8"},
        {"sharded__onebit_warmup_steps": 5, "sharded__exchange": "direct"},
    ],
)
def test_settings_that_go_together_are_taken(changes):
    assert registry.sharded(manifest(**changes)).by_step


def test_manifest_with_another_strategys_value_is_refused_too():
    """What comes from elsewhere than a run file is judged by its values."""
    changed = manifest().model_copy(update={"dylu": True})

    with pytest.raises(ConfigError, match=r"^dylu=True is not a setting of strategy 'sharded'"):
        registry.any_of(changed)


def test_questions_about_contributions_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"^strategy='sharded' meets at every step"):
        registry.of(manifest())
    with pytest.raises(ConfigError, match=r"^strategy='diloco' trains in rounds"):
        registry.sharded(manifest_for(SMALL))


BLOCKS = Layout.of(
    [
        ("blocks.0.a", (3, 5), "float32"),
        ("blocks.10.a", (7,), "float32"),
        ("blocks.2.a", (4,), "float32"),
        ("embedding", (2, 3), "float32"),
        ("head", (1,), "float32"),
    ]
)


def test_units_are_the_root_and_then_the_blocks_by_number():
    found = registry.sharded(manifest())

    assert found.cut(BLOCKS) == [
        ["embedding", "head"],
        ["blocks.0.a"],
        ["blocks.2.a"],
        ["blocks.10.a"],
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_shards_of_all_ranks_cover_every_element_once(size):
    found = registry.sharded(manifest())
    layout = BLOCKS.ordered(name for unit in found.cut(BLOCKS) for name in unit)

    owned = [span for rank in range(size) for span in found.shard(layout, rank, size)]
    elements = sorted(i for span in owned for i in range(span.start, span.stop))

    assert elements == list(range(layout.size))
    sizes = [found.save_bytes(layout, rank, size) for rank in range(size)]
    assert sum(sizes) == 3 * layout.nbytes


def test_rounds_are_the_steps_between_checkpoints():
    found = registry.sharded(
        manifest(sharded__save_every=3, sharded__checkpoint_every=2, inner__batch=5)
    )

    assert [found.steps(r) for r in (1, 2)] == [(1, 6), (7, 12)]
    assert [found.round_of(s) for s in (0, 1, 6, 7, 12)] == [0, 1, 1, 2, 2]
    assert found.rows_each == 30
