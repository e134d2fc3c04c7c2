"""Which settings a sharded run has, and which go together: the others are refused by name."""

from collections.abc import Mapping
from typing import Any

from atoll.errors import ConfigError
from atoll.protocol.manifest import Manifest, ShardedSettings
from atoll.protocol.sharded import MAX_RANKS

OWN = "sharded"  # the section of these settings
# What a sharded run has in place of settings of the strategies that train in rounds.
_EVERY_STEP = "ranks meet at every step"
_NO_ROUNDS = "ranks meet at every step, so nothing is handed in round by round"
_REST = "rows are a function of a step's number"
FOREIGN = {
    "mode": _EVERY_STEP,
    "sync_every": f"{_EVERY_STEP}; checkpoints come every sharded.save_every * checkpoint_every",
    "num_fragments": _EVERY_STEP,
    "fragment_pattern": _EVERY_STEP,
    "delay_steps": _EVERY_STEP,
    "local_weight": "every rank computes with the same weights",
    "dylu": "inner.batch counts a step's rows of all ranks",
    "max_staleness": _EVERY_STEP,
    "staleness_weighting": _EVERY_STEP,
    "weighting": "a step divides by the tokens of all its rows",
    "upload": f"{_NO_ROUNDS}; sharded.gradients says how gradients travel",
    "download": f"{_NO_ROUNDS}; sharded.parameters says how parameters travel",
    "outer": f"{_NO_ROUNDS}; the optimizer is inner's",
    "gather": f"{_NO_ROUNDS}; nothing lies in a bucket",
    "membership.quorum": f"{_NO_ROUNDS}; sharded.commit says who a step waits for",
    "membership.grace_seconds": f"{_NO_ROUNDS}; sharded.deadline_seconds bounds a step",
    "work.lease_seconds": "rows are leased to the group until their checkpoint",
    "work.policy": f"{_REST}: those after a checkpoint are trained again after a failure",
    "storage.snapshot_every": "every checkpoint is one; sharded.checkpoint_every says how often",
    "inner.momentum": "the optimizer is AdamW",
}

# What a quorum takes of settings that have other values, too, and why.
_OF_A_QUORUM: dict[str, tuple[object, str]] = {
    "transport": ("grpc", "owners commit in their own servers"),
    "exchange": ("direct", "a ring has summed up before anybody is known to be late"),
    "gradients": ("fp32", "parts are added up after the set is known"),
    "parameters": ("fp32", "weights are pulled as they are computed with"),
    "residuals": (False, "no gradient is rounded"),
    "onebit_warmup_steps": (0, "momenta of late ranks would differ"),
}


def refuse_foreign(given: Mapping[str, Any]) -> None:
    """ConfigError for the first setting of a run file that a sharded run does not have."""
    for name, instead in FOREIGN.items():
        section, _, last = name.rpartition(".")
        table = given.get(section, {}) if section else given
        if isinstance(table, Mapping) and last in table:
            raise _foreign(name, table[last], instead)


def check(manifest: Manifest) -> None:
    """ConfigError for settings that are of other strategies or do not go together, by name."""
    stated = manifest.model_dump(mode="json")
    for name, instead in FOREIGN.items():
        section, _, last = name.rpartition(".")
        table = stated[section] if section else stated
        if table[last] != _default(section, last):
            raise _foreign(name, table[last], instead)
    _check_inner(manifest)
    _check_own(manifest.sharded)
    if manifest.membership.min_workers > MAX_RANKS:
        raise ConfigError(
            f"membership.min_workers={manifest.membership.min_workers} is more than the "
            f"{MAX_RANKS} ranks of a group; lower it"
        )


def _foreign(name: str, value: object, instead: str) -> ConfigError:
    shown = "" if isinstance(value, Mapping) else f"={value!r}"
    return ConfigError(
        f"{name}{shown} is not a setting of strategy 'sharded': {instead}; leave it out"
    )


def _default(section: str, name: str) -> object:
    """What a setting is where nobody sets it, as JSON."""
    model: Any = Manifest.model_fields[section].annotation if section else Manifest
    value = model.model_fields[name].default
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value


def _check_inner(manifest: Manifest) -> None:
    inner = manifest.inner
    if inner.optimizer != "adamw":
        raise ConfigError(
            f"inner.optimizer={inner.optimizer!r} is not built for strategy 'sharded', whose "
            f"owners step by AdamW; choose 'adamw'"
        )
    if inner.precision != "fp32":
        raise ConfigError(
            f"inner.precision={inner.precision!r} is not built for strategy 'sharded', which "
            f"computes in what parameters travel in; set sharded.parameters = 'bf16' instead"
        )


def check_quorum(own: ShardedSettings) -> None:
    """ConfigError, naming the setting, for what `commit = "quorum"` does not do."""
    for name, (wanted, why) in _OF_A_QUORUM.items():
        found = getattr(own, name)
        if found != wanted:
            raise ConfigError(
                f"sharded.{name}={found!r} does not go with sharded.commit='quorum': {why}; set it "
                f"to {wanted!r}, or commit = 'strict'"
            )


def _check_own(own: ShardedSettings) -> None:
    if own.commit == "quorum":
        check_quorum(own)
    rules = (
        (
            own.bulk != "grpc" and own.transport != "grpc",
            f"sharded.bulk={own.bulk!r} with transport={own.transport!r}: only gRPC calls open "
            f"such sockets; leave bulk out or set transport = 'grpc'",
        ),
        (
            own.transport == "torch_dist" and own.gradients != "fp32" and own.exchange != "direct",
            f"sharded.gradients={own.gradients!r} with transport='torch_dist' and "
            f"exchange={own.exchange!r}: torch.distributed exchanges sums directly, which rounds "
            f"once and not at every hop; set exchange = 'direct'",
        ),
        (
            own.residuals and own.gradients == "fp32" and not own.onebit_warmup_steps,
            "sharded.residuals=true with gradients='fp32', which leave nothing behind; leave it "
            "out or set gradients = 'int8'",
        ),
        (
            bool(own.onebit_warmup_steps) and own.gradients != "fp32",
            f"sharded.onebit_warmup_steps={own.onebit_warmup_steps} with "
            f"gradients={own.gradients!r}: after the warm-up only signs travel; leave gradients "
            f"out",
        ),
        (
            bool(own.onebit_warmup_steps) and own.residuals,
            f"sharded.onebit_warmup_steps={own.onebit_warmup_steps} with residuals=true: 1-bit "
            f"Adam has an error feedback of its own; leave residuals out",
        ),
        (
            bool(own.onebit_warmup_steps) and own.exchange != "direct",
            f"sharded.onebit_warmup_steps={own.onebit_warmup_steps} with "
            f"exchange={own.exchange!r}: signs of momentum are added up by their owners; set "
            f"exchange = 'direct'",
        ),
    )
    for is_broken, said in rules:
        if is_broken:
            raise ConfigError(said)
