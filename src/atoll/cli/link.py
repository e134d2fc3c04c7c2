"""The link of a command that asks a coordinator and is done."""

from collections.abc import Iterator
from contextlib import contextmanager

from atoll.cli.token import required_token
from atoll.client.http import HttpClient


@contextmanager
def linked(url: str, *, token: str | None, fingerprint: str | None) -> Iterator[HttpClient]:
    """Connections to the coordinator at `url`, ended with the block; a token must be given."""
    link = HttpClient(url, token=required_token(token), fingerprint=fingerprint)
    try:
        yield link
    finally:
        link.close()
