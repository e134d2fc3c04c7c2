"""The token that a command needs, or a sentence that says where to get one."""

from atoll.errors import ConfigError


def required_token(token: str | None) -> str:
    """`token`, which came from --token or ATOLL_TOKEN."""
    if not token:
        raise ConfigError(
            "no token was given; pass --token, or set ATOLL_TOKEN, to what `atoll serve` printed"
        )
    return token
