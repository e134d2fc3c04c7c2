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


def refuse_others(manifest: Manifest, mode: str) -> None:
    """ConfigError for the first setting of another mode that is not left at its default."""
    for name, (modes, instead) in _OF_MODES.items():
        value, default = getattr(manifest, name), Manifest.model_fields[name].default
        if mode not in modes and value != default:
            raise ConfigError(
                f"{name}={value!r} needs mode {' or '.join(map(repr, modes))}; in mode {mode!r} "
                f"{instead}, so leave it out"
            )
