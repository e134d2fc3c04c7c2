"""Leases of a ledger of version 3, taken over into queues of units. Part of a released step.

They held positions of the run's one dataset without naming it, and could reach across the end of
an epoch. Plain SQL on the tables of that time; shares no code that may change later.
"""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, Row, text

_UNITS = 1024  # the default of the time

_INSERT = text(
    "INSERT INTO leases (round, worker_id, start, stop, state, dataset_id, shuffle_seed, epoch, "
    "unit, lease_epoch, incarnation) VALUES (:round, :worker_id, :start, :stop, :state, "
    ":dataset_id, :shuffle_seed, :epoch, :unit, :lease_epoch, :incarnation)"
)


def leases_of_version_3(connection: Connection) -> None:
    """Fills `leases`, `datasets` and `queues` from `leases_3` and the first manifest."""
    held = connection.exec_driver_sql(
        "SELECT l.round, l.worker_id, l.start, l.stop, l.state, w.incarnation "
        "FROM leases_3 l JOIN workers w ON w.worker_id = l.worker_id "
        "ORDER BY l.start, l.round"
    ).all()
    if not held:
        return
    body = connection.exec_driver_sql(
        "SELECT body FROM manifests ORDER BY version LIMIT 1"
    ).scalar_one()
    manifest = json.loads(body)
    identity = dict(manifest["data"]["identity"])
    seed, length = int(manifest["seed"]), int(identity.pop("rows"))
    spelled = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    dataset_id = hashlib.sha256(spelled.encode()).hexdigest()[:16]
    connection.execute(
        text("INSERT INTO datasets (dataset_id, name, length, weight) VALUES (:id, :name, :n, 1)"),
        {"id": dataset_id, "name": str(identity.get("kind", "data")), "n": length},
    )
    units = min(_UNITS, length)
    parts = list(_parts(held, length))
    for part in parts:
        within = part["start"] % length
        part |= {
            "dataset_id": dataset_id,
            "shuffle_seed": seed,
            "unit": ((within + 1) * units - 1) // length,
        }
    connection.execute(_INSERT, parts)
    for epoch in sorted({part["epoch"] for part in parts}):
        _make_queue(connection, [p for p in parts if p["epoch"] == epoch], length, units)


def _parts(held: "list[Row[Any]] | Any", length: int) -> Iterator[dict[str, Any]]:
    """Leases cut at the ends of epochs, with how often their rows had been given out before."""
    taken = [(row.start, row.stop, row.round) for row in held if row.state == "taken"]
    for row in held:
        before = sum(a <= row.start < b and number < row.round for a, b, number in taken)
        start = row.start
        while start < row.stop:
            epoch = start // length
            stop = min(row.stop, (epoch + 1) * length)
            yield {
                "round": row.round,
                "worker_id": row.worker_id,
                "start": start,
                "stop": stop,
                "state": row.state,
                "epoch": epoch,
                "lease_epoch": 1 + before,
                "incarnation": row.incarnation,
            }
            start = stop


def _make_queue(
    connection: Connection, parts: list[dict[str, Any]], length: int, units: int
) -> None:
    first = parts[0]["epoch"] * length
    issued = done = 0
    rows_done = [0] * units
    for part in parts:
        start, stop = part["start"] - first, part["stop"] - first
        for unit in range(part["unit"], (stop * units - 1) // length + 1):
            issued |= 1 << unit
            if part["state"] == "done":
                low, high = unit * length // units, (unit + 1) * length // units
                rows_done[unit] += min(stop, high) - max(start, low)
    for unit, rows in enumerate(rows_done):
        if rows == (unit + 1) * length // units - unit * length // units:
            done |= 1 << unit
    size = (units + 7) // 8
    connection.execute(
        text(
            "INSERT INTO queues (name, length, units, unit_rows, issued, done) "
            "VALUES (:name, :length, :units, 0, :issued, :done)"
        ),
        {
            "name": f"{parts[0]['dataset_id']}/{parts[0]['shuffle_seed']}/{parts[0]['epoch']}",
            "length": length,
            "units": units,
            "issued": issued.to_bytes(size, "little"),
            "done": done.to_bytes(size, "little"),
        },
    )
