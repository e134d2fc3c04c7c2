"""The link of a command that asks a coordinator and is done."""

from collections.abc import Callable
from contextlib import closing

from atoll.cli import output
from atoll.cli.options import Target
from atoll.client.http import HttpClient
from atoll.errors import ConfigError
from atoll.protocol.exchange import Ask, R


def linked(target: Target) -> closing[HttpClient]:
    """Connections to the coordinator, ended with the `with` block; a token must be given."""
    token = required_token(target.token)
    pin, insecure = target.fingerprint, target.insecure
    return closing(HttpClient(target.url, token=token, fingerprint=pin, insecure=insecure))


def answer(target: Target, message: Ask[R], show: Callable[[R], None]) -> None:
    """Sends one message and prints the reply: with `show`, or as JSON where that was asked for."""
    with linked(target) as link:
        reply = link.send(message)
    if target.as_json:
        output.print_json(reply.model_dump(mode="json"))
    else:
        show(reply)


def required_token(token: str | None) -> str:
    """The given token; without one a ConfigError that says where to get it."""
    if not token:
        raise ConfigError(
            "no token was given; pass --token, or set ATOLL_TOKEN, to what `atoll serve` printed"
        )
    return token
