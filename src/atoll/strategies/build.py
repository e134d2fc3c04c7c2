"""From a manifest's settings to the objects that carry them out."""

from atoll.codecs.noise import Noise
from atoll.protocol.manifest import Manifest


def upload_noise(manifest: Manifest, round_number: int, worker_id: str) -> Noise:
    """The rounding noise of one island's contribution."""
    return Noise(manifest.seed, round_number, f"upload/{worker_id}")
