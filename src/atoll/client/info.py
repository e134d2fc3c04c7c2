"""A run's settings, read-only: what a worker would adopt."""

from atoll.island.link.network import NetworkLink
from atoll.protocol.messages import Info


def get_info(url: str, *, token: str, fingerprint: str | None = None) -> Info:
    """The manifest in force of the run at `url`, whole; asks once and changes nothing."""
    link = NetworkLink(url, token=token, fingerprint=fingerprint)
    try:
        return link.info()
    finally:
        link.close()
