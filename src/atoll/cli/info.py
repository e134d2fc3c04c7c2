"""`atoll info`: the settings a run has, as its workers adopt them."""

from atoll.cli import output
from atoll.cli.link import linked
from atoll.cli.options import Target
from atoll.protocol.manifest import leaves
from atoll.protocol.messages import InfoRequest


def info(target: Target) -> None:
    """Shows every setting; none can be changed from here."""
    with linked(target) as link:
        found = link.send(InfoRequest())
    settings = found.model_dump(mode="json")
    if target.as_json:
        output.print_json(settings)
        return
    output.console.print(output.table(f"run {found.name}", ("setting", "value"), leaves(settings)))
