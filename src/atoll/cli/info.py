"""`atoll info`: the settings a run has, as its workers adopt them."""

from atoll.cli import output
from atoll.cli.link import answer
from atoll.cli.options import Target
from atoll.protocol.manifest import leaves
from atoll.protocol.messages import Info, InfoRequest


def info(target: Target) -> None:
    """Shows every setting; none can be changed from here."""
    answer(target, InfoRequest(), _show)


def _show(found: Info) -> None:
    settings = leaves(found.model_dump(mode="json"))
    output.console.print(output.table(f"run {found.name}", ("setting", "value"), settings))
