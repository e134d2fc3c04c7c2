"""Statements about the run itself: its manifests, credentials and workers."""

from collections.abc import Mapping

from sqlalchemy import Connection, bindparam, delete, insert, select, update

from atoll.errors import Fenced, StoreError, UnknownWorker
from atoll.ledger import rows, schema
from atoll.ledger.records import ManifestRecord, RunRecord, WorkerRecord

_RUN = select(schema.runs)
_INSERT_RUN = insert(schema.runs)
_MANIFESTS = select(schema.manifests).order_by(schema.manifests.c.version)
_INSERT_MANIFEST = insert(schema.manifests)

_CONTROL = select(schema.control.c.name, schema.control.c.value).order_by(schema.control.c.name)
_INSERT_CONTROL = insert(schema.control)
_DELETE_CONTROL = delete(schema.control).where(schema.control.c.name == bindparam("of_name"))

_IS_WORKER = schema.workers.c.worker_id == bindparam("of_worker")
_WORKERS = select(schema.workers).order_by(schema.workers.c.worker_id)
_FIND_WORKER = select(schema.workers).where(_IS_WORKER)
_INSERT_WORKER = insert(schema.workers)
_UPDATE_WORKER = update(schema.workers).where(_IS_WORKER)


def create_run(connection: Connection, run: RunRecord, manifest: ManifestRecord) -> None:
    """See `Ledger.create_run`."""
    held = find_run(connection)
    if held is not None:
        raise StoreError(
            f"the ledger already holds run {held.run_id!r} and takes no other ({run.run_id!r}); "
            f"give the new run a state directory of its own"
        )
    connection.execute(_INSERT_RUN, rows.values(run))
    connection.execute(_INSERT_MANIFEST, rows.values(manifest))


def find_run(connection: Connection) -> RunRecord | None:
    """See `Ledger.run`."""
    row = connection.execute(_RUN).one_or_none()
    return None if row is None else rows.run(row)


def manifests(connection: Connection) -> list[ManifestRecord]:
    """See `Ledger.manifests`."""
    return [rows.manifest(row) for row in connection.execute(_MANIFESTS)]


def add_manifest(connection: Connection, manifest: ManifestRecord, *, after_round: int) -> None:
    """See `Ledger.add_manifest`; `after_round` is the latest round."""
    held = manifests(connection)
    newest = held[-1].version if held else 0
    if not newest or manifest.version != newest + 1:
        raise StoreError(
            f"manifest version {manifest.version} does not follow version {newest}; versions "
            f"count up by one"
        )
    if manifest.from_round != after_round + 1:
        raise StoreError(
            f"manifest version {manifest.version} is to be in force from round "
            f"{manifest.from_round}; the first round that is not planned is {after_round + 1}"
        )
    if any(manifest.sha256 == known.sha256 for known in held):
        raise StoreError(
            f"manifest version {manifest.version} has the sha256 of an earlier one; every version "
            f"carries its number, so no two are the same"
        )
    connection.execute(_INSERT_MANIFEST, rows.values(manifest))


def credentials(connection: Connection) -> dict[str, str]:
    """See `Ledger.credentials`."""
    table = schema.credentials
    statement = select(table.c.role, table.c.sha256).order_by(table.c.role)
    return {role: sha256 for role, sha256 in connection.execute(statement)}


def set_credentials(connection: Connection, hashes: dict[str, str]) -> None:
    """See `Ledger.set_credentials`."""
    for role, sha256 in hashes.items():
        connection.execute(delete(schema.credentials).where(schema.credentials.c.role == role))
        connection.execute(insert(schema.credentials), {"role": role, "sha256": sha256})


def control(connection: Connection) -> dict[str, str]:
    """See `Ledger.control`."""
    return {name: value for name, value in connection.execute(_CONTROL)}


def set_control(connection: Connection, values: Mapping[str, str | None]) -> None:
    """See `Ledger.set_control`."""
    for name, value in values.items():
        connection.execute(_DELETE_CONTROL, {"of_name": name})
        if value is not None:
            connection.execute(_INSERT_CONTROL, {"name": name, "value": value})


def register(
    connection: Connection, worker_id: str, *, key_sha256: str, wall: float
) -> WorkerRecord:
    """See `Ledger.register`."""
    known = find_worker(connection, worker_id)
    record = WorkerRecord(
        worker_id=worker_id,
        key_sha256=key_sha256,
        incarnation=1 if known is None else known.incarnation + 1,
        active=True,
        registered_wall=wall,
    )
    if known is None:
        connection.execute(_INSERT_WORKER, rows.values(record))
    else:
        # Without its key: SQLite would look for it in every lease and contribution.
        changed = {name: v for name, v in rows.values(record).items() if name != "worker_id"}
        connection.execute(_UPDATE_WORKER, {"of_worker": worker_id, **changed})
    return record


def deregister(connection: Connection, worker_id: str, incarnation: int) -> None:
    """See `Ledger.deregister`."""
    check_incarnation(connection, worker_id, incarnation)
    connection.execute(_UPDATE_WORKER, {"of_worker": worker_id, "active": False})


def workers(connection: Connection) -> list[WorkerRecord]:
    """See `Ledger.workers`."""
    return [rows.worker(row) for row in connection.execute(_WORKERS)]


def find_worker(connection: Connection, worker_id: str) -> WorkerRecord | None:
    """The worker of that name, whichever its incarnation."""
    row = connection.execute(_FIND_WORKER, {"of_worker": worker_id}).one_or_none()
    return None if row is None else rows.worker(row)


def check_known(connection: Connection, worker_id: str) -> WorkerRecord:
    """The worker of that name, or UnknownWorker."""
    known = find_worker(connection, worker_id)
    if known is None:
        raise UnknownWorker(f"no worker_id={worker_id!r} is registered in this run; register first")
    return known


def check_incarnation(connection: Connection, worker_id: str, incarnation: int) -> None:
    """UnknownWorker, or Fenced unless `incarnation` is the worker's latest."""
    latest = check_known(connection, worker_id).incarnation
    if incarnation != latest:
        raise Fenced(
            f"worker_id={worker_id!r} is at incarnation {latest}, this message is from "
            f"{incarnation}; only the latest may act, so this process must stop"
        )
