"""A run's settings, read-only: what a worker would adopt."""

from contextlib import closing

from atoll.client.http import HttpClient
from atoll.protocol.messages import Info, InfoRequest


def get_info(
    url: str, *, token: str, fingerprint: str | None = None, insecure: bool = False
) -> Info:
    """The manifest in force of the run at `url`, whole; asks once and changes nothing."""
    with closing(
        HttpClient(url, token=token, fingerprint=fingerprint, insecure=insecure)
    ) as client:
        return client.send(InfoRequest())
