"""Which settings a gather run has, and which go together: the others are refused by name."""

from atoll.errors import ConfigError
from atoll.protocol.manifest import Manifest
from atoll.strategies.diloco import of_mode

# The one choice that is built for each of these, and why.
_ONLY = {
    "upload.codec": ("topk", "norms, overlap and artifacts are made of sparse contributions"),
    "download.codec": ("fp32", "islands compute the published weights themselves, to the bit"),
    "outer.optimizer": ("sgd", "islands compute the outer step, and hold no state of it"),
}


def check(manifest: Manifest) -> None:
    """ConfigError for settings that are of other strategies or do not go together, by name."""
    of_mode.refuse_others(manifest, "sync")
    for name, (wanted, why) in _ONLY.items():
        section, _, key = name.partition(".")
        found = getattr(getattr(manifest, section), key)
        if found != wanted:
            raise ConfigError(
                f"{name}={found!r} is not built for strategy 'gather': {why}; set it to {wanted!r}"
            )
    own, least = manifest.gather, manifest.membership.min_workers
    if not own.buckets:
        raise ConfigError(
            "[gather.buckets] names no bucket; islands publish their contributions into one, so "
            "add a section such as [gather.buckets.main] with its url"
        )
    if own.primaries and own.primaries < least:
        raise ConfigError(
            f"gather.primaries={own.primaries} is below membership.min_workers={least}; a round "
            f"never closes with fewer than min_workers, so raise primaries, or set it to 0"
        )
