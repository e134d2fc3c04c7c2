"""Which settings belong to which mode of DiLoCo: in the others they are refused by name."""

from atoll.errors import ConfigError
from atoll.protocol.manifest import Manifest

# By setting: the modes that use it, and what the others do in its place.
_OF_MODES = {
    "num_fragments": (("streaming",), "a round carries the whole model"),
    "fragment_pattern": (("streaming",), "a round carries the whole model"),
    "delay_steps": (("streaming",), "an island takes a version in before it trains on"),
    "local_weight": (("streaming",), "an island goes on from the published weights"),
    "dylu": (("async",), "islands train equally many steps"),
    "max_staleness": (("async",), "a contribution is for one round alone"),
    "staleness_weighting": (("async",), "no contribution is stale"),
}
# Outer optimizers that are for contributions one by one, and those that are for rounds.
_ONE_BY_ONE = ("delayed_nesterov",)
_BY_ROUND = ("adam",)


def refuse_others(manifest: Manifest, mode: str) -> None:
    """ConfigError for the first setting of another mode that is not left at its default."""
    for name, (modes, instead) in _OF_MODES.items():
        value, default = getattr(manifest, name), Manifest.model_fields[name].default
        if mode not in modes and value != default:
            raise ConfigError(
                f"{name}={value!r} needs mode {' or '.join(map(repr, modes))}; in mode {mode!r} "
                f"{instead}, so leave it out"
            )


def refuse_one_by_one(manifest: Manifest, mode: str) -> None:
    """ConfigError for an outer optimizer that takes contributions one by one."""
    chosen = manifest.outer.optimizer
    if chosen in _ONE_BY_ONE:
        raise ConfigError(
            f"outer.optimizer={chosen!r} needs mode 'async'; in mode {mode!r} a round applies the "
            f"mean of its contributions, so choose 'nesterov'"
        )


def refuse_rounds(manifest: Manifest, mode: str) -> None:
    """ConfigError for a quorum, and for an outer optimizer that counts rounds."""
    chosen, quorum = manifest.outer.optimizer, manifest.membership.quorum
    if quorum:
        raise ConfigError(
            f"membership.quorum={quorum} is not for mode {mode!r}, in which a round closes "
            f"grace_seconds after its first contribution; leave it out"
        )
    if chosen in _BY_ROUND:
        raise ConfigError(
            f"outer.optimizer={chosen!r} is not for mode {mode!r}, in which each contribution is a "
            f"step of its own; choose 'delayed_nesterov', 'nesterov' or 'sgd'"
        )
