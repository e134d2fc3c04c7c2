"""`atoll work`: the queues of a run's rows."""

from operator import attrgetter

from atoll.cli import output
from atoll.cli.link import linked
from atoll.cli.options import Target
from atoll.client import pages
from atoll.protocol.work import Work

# The head of each column, and the field of a queue that it shows.
COLUMNS = {
    "epoch": "epoch",
    "units": "units",
    "issued": "units_issued",
    "done": "units_done",
    "rows": "rows_done",
    "leased": "rows_leased",
    "open": "rows_open",
    "given up": "rows_given_up",
}


def work(target: Target) -> None:
    """Shows the newest queues; `--json` has the bitmaps and who has which rows."""
    with linked(target) as link:
        found = pages.of_queues(link)
    if target.as_json:
        output.print_json(found.model_dump(mode="json"))
    else:
        _show(found)


def _show(found: Work) -> None:
    names = {dataset.dataset_id: dataset.name for dataset in found.datasets}
    rows = (
        (names.get(queue.dataset_id, queue.dataset_id), *attrgetter(*COLUMNS.values())(queue))
        for queue in found.queues
    )
    output.console.print(output.table(f"policy {found.policy}", ("dataset", *COLUMNS), rows))
    if found.left_off:
        output.say(f"{found.left_off} earlier queues are not shown")
    for entry in found.damaged:
        output.say(f"REFUSED queue {entry.name!r}: {entry.reason}")
