"""The manifest: one hash for one value, sensitive to every field, and the rules it keeps."""

import hashlib
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from atoll.errors import VersionMismatch
from atoll.protocol.manifest import Manifest, ScheduleSettings
from atoll.settings import Choice
from tests.settings import ALONE, changed, leaves, other

BASE: dict[str, Any] = {
    "name": "golden",
    "seed": 5,
    "sync_every": 20,
    "upload": {"codec": "bf16"},
    "download": {"codec": "int8"},
    "outer": {"optimizer": "adam"},
    "inner": {"schedule": {"total_tokens": 1000}},
    "membership": {"min_workers": 2, "quorum": 3},
    "model": {"definition": {"width": 8}, "layout_digest": "1" * 64, "initial_digest": "2" * 64},
    "data": {"definition": {"kind": "text"}, "identity": {"rows": 9}},
    "stop": {"rounds": 15, "tokens": 10**6},
}
# It is stamped on every message of a run: another value for the same settings is a new protocol.
GOLDEN = "9629aa8f459b5d97ec64347dfab3a211d5a9ac1b886104f89ed70c95cb5ac718"


WHOLE = Manifest.model_validate(BASE).model_dump(mode="json")
LEAVES = [(name, item) for name, item in leaves(WHOLE) if name not in ALONE]


def test_hash_is_the_golden_one():
    assert Manifest.model_validate(BASE).sha256() == GOLDEN


@pytest.mark.parametrize(("codec", "decay"), [("int4", 1.0), ("sign", 1.0), ("topk", 0.95)])
def test_newer_codecs_hash_every_setting(codec, decay):
    manifest = Manifest.model_validate({**BASE, "upload": {"codec": codec}})
    undecayed = Manifest.model_validate({**BASE, "upload": {"codec": codec, "decay": 1.0}})

    assert json.loads(manifest.body())["upload"]["decay"] == decay
    assert Manifest.model_validate_json(undecayed.body()) == undecayed


def test_hash_is_that_of_the_stored_body():
    manifest = Manifest.model_validate(BASE)

    assert hashlib.sha256(manifest.body().encode()).hexdigest() == manifest.sha256()


def test_body_reads_back_to_the_same_hash():
    manifest = Manifest.model_validate(BASE)

    back = Manifest.model_validate_json(manifest.body())

    assert back == manifest
    assert back.sha256() == manifest.sha256()


@pytest.mark.parametrize(("name", "item"), LEAVES, ids=[name for name, _ in LEAVES])
def test_hash_depends_on_every_field(name, item):
    """Two sides that differ in any setting do not agree by accident."""
    value = changed(WHOLE, name, other(name, item))

    found = Manifest.model_validate_json(json.dumps(value))

    assert found.sha256() != GOLDEN


def test_hash_does_not_depend_on_the_order_of_fields():
    backwards = json.loads(json.dumps(WHOLE), object_pairs_hook=lambda p: dict(reversed(p)))

    assert Manifest.model_validate_json(json.dumps(backwards)).sha256() == GOLDEN


def test_whole_number_for_a_fraction_is_the_same_setting():
    one = Manifest.model_validate({**BASE, "outer": {"lr": 1}})
    other_one = Manifest.model_validate({**BASE, "outer": {"lr": 1.0}})

    assert one.sha256() == other_one.sha256()


def test_manifest_cannot_be_changed():
    manifest = Manifest.model_validate(BASE)

    with pytest.raises(ValidationError, match="frozen"):
        manifest.seed = 6


def test_every_setting_has_a_place_in_the_whole():
    """Nothing that must match is left to a default of the other side."""

    def names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
        for name, field in model.model_fields.items():
            section = field.annotation
            if isinstance(section, type) and issubclass(section, Choice):
                section = type(getattr(Manifest.model_validate(BASE), name))
            if isinstance(section, type) and issubclass(section, BaseModel):
                yield from names(section, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}"

    assert set(names(Manifest)) == {name for name, _ in leaves(WHOLE)}


@pytest.mark.parametrize(
    ("name", "item", "rule"),
    [
        ("heartbeat_interval", 10.0, "is not below heartbeat_timeout=10.0"),
        ("membership.quorum", 1, "quorum=1 is below min_workers=2"),
        ("membership.min_workers", 0, "greater than or equal to 1"),
        ("membership.grace_seconds", -1.0, "greater than or equal to 0"),
        ("outer.lr", 0.0, "greater than 0"),
        ("outer.beta1", 1.0, "less than 1"),
        ("inner.lr", "1e-3", "valid number"),
        ("sync_every", 0, "greater than or equal to 1"),
        ("sync_every", 2.5, "valid integer"),
        ("seed", -1, "greater than or equal to 0"),
        ("name", "two words", "String should match"),
        ("name", ".", "String should match"),
        ("name", "..", "String should match"),
        ("name", "-r", "String should match"),
        ("upload.codec", "int2", r"upload\.codec\s+is not known; choose one of bf16, fp32, int4"),
        ("upload.block", 64, r"upload\.block\s+is no setting of codec 'bf16', which has codec, "),
        ("download.block", 8, "greater than or equal to 16"),
        ("upload.decay", 1.5, "less than or equal to 1"),
        ("upload.decay", 0.0, "greater than 0"),
        ("outer.optimizer", "lion", "is not known; choose one of sgd, nesterov, delayed_"),
        ("outer.momentum", 0.9, "is no setting of optimizer 'adam', which has beta1, beta2, eps, "),
        ("storage.keep_snapshots", 0, "greater than or equal to 1"),
        ("model.layout_digest", "xyz", "String should match"),
    ],
)
def test_setting_that_breaks_its_rule_is_refused(name, item, rule):
    with pytest.raises(ValidationError, match=rule):
        Manifest.model_validate(changed(WHOLE, name, item))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [n for n, item in LEAVES if isinstance(item, float)])
def test_setting_that_is_no_number_is_refused(name, bad):
    with pytest.raises(ValidationError):
        Manifest.model_validate(changed(WHOLE, name, bad))


@pytest.mark.parametrize(
    "validate",
    [Manifest.model_validate, lambda value: Manifest.model_validate_json(json.dumps(value))],
    ids=["value", "json"],
)
def test_other_protocol_version_is_refused_by_name(validate):
    """This is so even when the newer side has settings that this program does not know."""
    newer = {**WHOLE, "protocol_version": 2, "unheard_of": 1}

    with pytest.raises(VersionMismatch, match="protocol_version=2 where this program speaks 1"):
        validate(newer)


def test_run_without_an_end_is_refused():
    with pytest.raises(ValidationError, match="neither rounds nor tokens is set"):
        Manifest.model_validate({**BASE, "stop": {}})


def test_rows_per_round_are_steps_times_batch():
    assert Manifest.model_validate(BASE).rows_per_round == 20 * 8


# The learning-rate schedule


def test_schedule_without_anything_is_constant():
    assert [ScheduleSettings().factor(tokens) for tokens in (0, 1, 10**12)] == [1.0, 1.0, 1.0]


def test_warmup_rises_in_a_straight_line_and_never_starts_at_zero():
    schedule = ScheduleSettings(warmup_tokens=99)

    assert [schedule.factor(t) for t in (0, 49, 98, 99)] == [0.01, 0.5, 0.99, 1.0]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("linear", [1.0, 0.55, 0.1, 0.1]), ("cosine", [1.0, 0.55, 0.1, 0.1])],
)
def test_decay_ends_at_its_final_fraction_and_stays_there(kind, expected):
    schedule = ScheduleSettings(kind=kind, total_tokens=1000)

    assert [schedule.factor(t) for t in (0, 500, 1000, 10**9)] == pytest.approx(expected)


def test_cosine_is_above_the_line_at_first():
    cosine = ScheduleSettings(kind="cosine", total_tokens=1000, final_fraction=0.0)

    assert cosine.factor(250) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)


def test_decay_without_an_end_is_refused():
    with pytest.raises(ValidationError, match="set total_tokens"):
        ScheduleSettings(kind="cosine")
