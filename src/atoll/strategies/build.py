"""From a manifest's settings to the objects that carry them out."""

from atoll.codecs.noise import Noise
from atoll.protocol.manifest import Manifest
from atoll.strategies.diloco import NOISE_LANE_DOWNLOAD, OuterStep


def outer_step(manifest: Manifest, round_number: int) -> OuterStep:
    """The outer step of `round_number`; rounding noise is keyed by the run's seed and the round."""
    return OuterStep(
        optimizer=manifest.outer.build(),
        download=manifest.download.build(),
        noise=Noise(manifest.seed, round_number, NOISE_LANE_DOWNLOAD),
        step=round_number,
    )


def upload_noise(manifest: Manifest, round_number: int, worker_id: str) -> Noise:
    """The rounding noise of one island's contribution."""
    return Noise(manifest.seed, round_number, f"upload/{worker_id}")
