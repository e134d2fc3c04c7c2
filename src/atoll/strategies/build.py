"""From a manifest's settings to the objects that carry them out."""

from atoll.codecs import registry as codecs
from atoll.codecs.base import Codec
from atoll.codecs.noise import Noise
from atoll.optim import registry as optim
from atoll.optim.base import OuterOptimizer
from atoll.protocol.manifest import CodecSettings, Manifest, OuterSettings
from atoll.strategies.diloco import NOISE_LANE_DOWNLOAD, OuterStep

_OUTER_FIELDS = {
    "sgd": ("lr",),
    "nesterov": ("lr", "momentum"),
    "adam": ("lr", "beta1", "beta2", "eps"),
}


def codec(settings: CodecSettings) -> Codec:
    """The codec that `settings` name."""
    return codecs.build(settings.codec, rounding=settings.rounding, block=settings.block)


def outer_optimizer(settings: OuterSettings) -> OuterOptimizer:
    """The outer optimizer that `settings` name, with the fields that belong to it."""
    fields = _OUTER_FIELDS[settings.optimizer]
    return optim.build(settings.optimizer, {name: getattr(settings, name) for name in fields})


def outer_step(manifest: Manifest, round_number: int) -> OuterStep:
    """The outer step of `round_number`; rounding noise is keyed by the run's seed and the round."""
    return OuterStep(
        optimizer=outer_optimizer(manifest.outer),
        download=codec(manifest.download),
        noise=Noise(manifest.seed, round_number, NOISE_LANE_DOWNLOAD),
        step=round_number,
    )


def upload_noise(manifest: Manifest, round_number: int, worker_id: str) -> Noise:
    """The rounding noise of one island's contribution."""
    return Noise(manifest.seed, round_number, f"upload/{worker_id}")
