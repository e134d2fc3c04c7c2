"""`atoll work`: the queues of a run's rows."""

from collections.abc import Iterator

from atoll.cli import output
from atoll.cli.link import linked
from atoll.cli.options import Target
from atoll.protocol.work import Work, WorkRequest


def work(target: Target) -> None:
    """Shows the newest queues; `--json` has the bitmaps and who has which rows."""
    with linked(target) as link:
        found = link.send(WorkRequest())
    if target.as_json:
        output.print_json(found.model_dump(mode="json"))
        return
    columns = (
        "dataset",
        "epoch",
        "units",
        "issued",
        "done",
        "rows",
        "leased",
        "open",
        "given up",
    )
    output.console.print(output.table(f"policy {found.policy}", columns, _rows(found)))
    if found.left_off:
        output.say(f"{found.left_off} earlier queues are not shown")
    for entry in found.damaged:
        output.say(f"REFUSED queue {entry.name!r}: {entry.reason}")


def _rows(found: Work) -> Iterator[tuple[str, ...]]:
    names = {dataset.dataset_id: dataset.name for dataset in found.datasets}
    for queue in found.queues:
        numbers = (
            queue.epoch,
            queue.units,
            queue.units_issued,
            queue.units_done,
            queue.rows_done,
            queue.rows_leased,
            queue.rows_open,
            queue.rows_given_up,
        )
        yield (names.get(queue.dataset_id, queue.dataset_id), *map(str, numbers))
