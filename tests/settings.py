"""Every setting of a manifest with another value for it: the table behind tests of agreement.

`changes(manifest)` is generated from the manifest itself, so a new setting is in every matrix at
once, or fails loudly here until it has another value.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from atoll.codecs.settings import CodecSettings
from atoll.optim.settings import OuterSettings
from atoll.settings import Choice

# Settings of which a sync run knows one value only, with what another run might say.
ALONE: dict[str, object] = {
    "settings_authority": "worker",
    "protocol_version": 2,
    "strategy": "sharded",
    "mode": "async",
    "num_fragments": 2,
    "fragment_pattern": "sequential",
    "delay_steps": 3,
    "local_weight": 0.5,
    "dylu": True,
    "max_staleness": 3,
    "staleness_weighting": "inverse_sqrt",
}
# Another value that keeps the rules, where arithmetic does not give one.
OTHERS: dict[str, object] = {
    "manifest_source": "operator",
    "name": "another",
    "weighting": "tokens",
    "upload.codec": "fp32",
    "upload.rounding": "stochastic",
    "download.codec": "fp32",
    "download.block": 64,
    "upload.block": 64,
    "download.rounding": "stochastic",
    "membership.min_workers": 1,
    "outer.optimizer": "sgd",
    "inner.optimizer": "sgd",
    "inner.momentum": 0.5,
    "inner.precision": "bf16",
    "inner.schedule.kind": "cosine",
    "membership.grace_seconds": 7.0,
    "model.layout_digest": "3" * 64,
    "model.initial_digest": "3" * 64,
    "storage.retain": "snapshots",
    "work.policy": "at_most_once",
    "work.lease_seconds": 60.0,
    "gather.primary_seconds": 5.0,
    "gather.buckets": {"another-1": {"url": "memory:", "endpoint": "", "region": ""}},
    "sharded.transport": "torch_dist",
    "sharded.bulk": "tcp",
    "sharded.exchange": "direct",
    "sharded.gradients": "int8",
    "sharded.parameters": "bf16",
    "sharded.offload": "disk",
    "sharded.commit": "quorum",
}
# Settings that name the class of their section: another one has other fields.
CHOICES: dict[str, type[Choice]] = {
    "upload.codec": CodecSettings,
    "download.codec": CodecSettings,
    "outer.optimizer": OuterSettings,
}
# Sections for a run file under which each of those values keeps the rules.
ROOMY: dict[str, Any] = {
    "upload": {"codec": "bf16"},
    "download": {"codec": "int8"},
    "outer": {"optimizer": "adam"},
    "inner": {"batch": 2, "schedule": {"total_tokens": 1000}},
    "membership": {"min_workers": 2, "quorum": 3},
    "stop": {"rounds": 1000, "tokens": 10**9},
}


@dataclass(frozen=True)
class Change:
    """One setting, and a value that the run does not have."""

    name: str  # dotted
    old: object
    new: object

    def applied(self, settings: dict[str, Any]) -> dict[str, Any]:
        """`settings` with this change."""
        return changed(settings, self.name, self.new)


def changes(settings: dict[str, Any]) -> list[Change]:
    """A change of every setting of a manifest as JSON."""
    return [Change(name, item, other(name, item)) for name, item in leaves(settings)]


def leaves(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Every setting by its dotted name; definitions and identities are whole."""
    for name, item in value.items():
        if isinstance(item, dict) and item and name not in ("definition", "identity"):
            yield from leaves(item, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", item


def changed(value: dict[str, Any], name: str, item: object) -> dict[str, Any]:
    """`value` with another `item` at the dotted `name`; of a choice, with its whole section."""
    first, _, rest = name.partition(".")
    if name in CHOICES and CHOICES[name].named(item) is not None:
        section = CHOICES[name].model_validate({rest: item})
        return {**value, first: section.model_dump(mode="json")}
    return {**value, first: changed(value[first], rest, item) if rest else item}


def without(value: dict[str, Any], name: str) -> dict[str, Any]:
    """`value` without the dotted `name`."""
    first, _, rest = name.partition(".")
    if rest:
        return {**value, first: without(value[first], rest)}
    return {key: item for key, item in value.items() if key != first}


def other(name: str, item: object) -> object:
    """Another value for a setting."""
    known = {**ALONE, **OTHERS}
    if name in known:
        return known[name]
    match item:
        case bool():
            return not item
        case int():
            return item + 1
        case float():
            return item / 2
        case dict():
            return {**item, "another": 1}
    raise AssertionError(f"{name} is new: give another value for it")
