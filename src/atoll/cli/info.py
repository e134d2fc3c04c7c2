"""`atoll info`: the settings a run has, as its workers adopt them."""

from atoll.cli import output
from atoll.cli.token import required_token
from atoll.client.info import get_info
from atoll.protocol.manifest import leaves


def info(url: str, *, token: str | None, fingerprint: str | None, as_json: bool) -> None:
    """Shows every setting; none can be changed from here."""
    found = get_info(url, token=required_token(token), fingerprint=fingerprint)
    settings = found.model_dump(mode="json")
    if as_json:
        output.print_json(settings)
        return
    output.console.print(output.table(f"run {found.name}", ("setting", "value"), leaves(settings)))
