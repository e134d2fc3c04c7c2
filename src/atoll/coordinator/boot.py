"""A run's durable state: created once from a run file, opened again after every restart."""

import logging
from collections.abc import Mapping
from typing import Any

from atoll.blobs.bucket import Bucket
from atoll.clock import Clock
from atoll.config import RunFile
from atoll.coordinator import initial, member_wiring
from atoll.coordinator.accept.admission import Admission
from atoll.coordinator.accept.uploads import Uploads
from atoll.coordinator.authority import Authority
from atoll.coordinator.changes import Changes
from atoll.coordinator.counters import Counters
from atoll.coordinator.member_wiring import Opened
from atoll.coordinator.members import dialback
from atoll.coordinator.members.barriers import Barriers
from atoll.coordinator.members.dialback import Dial
from atoll.coordinator.pull.pulls import Pulls
from atoll.coordinator.rounds import dispatch
from atoll.coordinator.rounds.assignments import Assignments
from atoll.coordinator.rounds.closing import Closing
from atoll.coordinator.rounds.disk_space import DiskSpace
from atoll.coordinator.rounds.evaluation import Evaluation
from atoll.coordinator.rounds.rounds import Rounds
from atoll.coordinator.rounds.run_weights import RunWeights
from atoll.coordinator.rounds.snapshots import Snapshots
from atoll.coordinator.service import Coordinator
from atoll.coordinator.sharded import wiring
from atoll.coordinator.sharded.service import ShardedCoordinator
from atoll.coordinator.shown.status import Report
from atoll.coordinator.stores import Stores
from atoll.data import registry as datasets
from atoll.errors import ConfigError
from atoll.layout import Layout
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import ManifestRecord, RunRecord
from atoll.models import custom
from atoll.models import registry as models
from atoll.protocol.manifest import DataSettings, Manifest, ModelSettings
from atoll.strategies import registry as strategies
from atoll.strategies.base import run_layout
from atoll.versions import manifest_change, recorded, weights, weights_file
from atoll.versions.manifests import Manifests, Recorded
from atoll.versions.replay import Replay

log = logging.getLogger(__name__)

NO_BUCKETS: Mapping[str, Bucket] = {}


def create_or_check(
    stores: Stores, run_file: RunFile, clock: Clock, *, new_run_id: str, new_manifest: bool = False
) -> Manifest:
    """Creates the run in an empty ledger; in a used one checks that the file has not changed.

    With `new_manifest` a changed file is recorded as the next version, from the next round on.
    Returns the newest version. StateDamaged when what is stored is not what was written.
    """
    stores.check()
    with stores.ledger.reading() as t:
        exists = t.run.get() is not None
    if exists:
        known = Manifests.of(stores.ledger)
        found = _found(known.newest.manifest, run_file)
        if new_manifest:
            return record_manifest(stores.ledger, found)
        return _checked(known, found)
    return _create(stores, run_file, clock, run_id=new_run_id)


def open_run(
    stores: Stores, clock: Clock, *, threads: int = 1, buckets: Mapping[str, Bucket] = NO_BUCKETS
) -> Authority:
    """The coordinator of the run in `stores`, of the kind that its strategy asks for."""
    if Manifests.of(stores.ledger).first.any_strategy.by_step:
        return open_sharded(stores, clock)
    return open_coordinator(stores, clock, threads=threads, buckets=buckets)


def open_coordinator(
    stores: Stores,
    clock: Clock,
    *,
    layout: Layout | None = None,
    threads: int = 1,
    buckets: Mapping[str, Bucket] = NO_BUCKETS,
) -> Coordinator:
    """The coordinator of a run in rounds, with its weights restored and its parts wired.

    `layout` is the model's, where it cannot be built from its definition here; `buckets` are those
    that the manifest names, where islands publish. StateDamaged when what is stored is not what was
    written: nobody serves from it unseen.
    """
    opened = _opened(stores, layout)
    return _wired(stores, clock, opened, threads=threads, buckets=buckets)


def open_sharded(
    stores: Stores,
    clock: Clock,
    *,
    layout: Layout | None = None,
    dial: Dial = dialback.connect,
) -> ShardedCoordinator:
    """The coordinator of a sharded run, which holds no weights; `dial` is how ranks are tried."""
    return wiring.wired(stores, clock, _opened(stores, layout), dial=dial)


def _opened(stores: Stores, layout: Layout | None) -> Opened:
    """What is recorded of the run in `stores`, once that is found to be what was written."""
    stores.check()
    stores.blobs.sweep()
    with stores.ledger.reading() as t:
        run = t.run.get()
    assert run is not None, "a run is created before a coordinator opens it"
    manifests = Manifests.of(stores.ledger)
    layout = recorded.layout_of(manifests.newest.manifest) if layout is None else layout
    return Opened(run, manifests, layout)


def _wired(
    stores: Stores,
    clock: Clock,
    opened: Opened,
    *,
    threads: int,
    buckets: Mapping[str, Bucket],
) -> Coordinator:
    """Restores the weights of the run in `stores` and wires the parts together."""
    ledger, blobs, changed, counters = stores.ledger, stores.blobs, Changes(), Counters()
    run, manifests, layout = opened.run, opened.manifests, opened.layout
    membership = member_wiring.membership(ledger, clock, opened, changed)
    registry, heartbeats = membership.registry, membership.registry.heartbeats
    rounds = Rounds(ledger, registry, clock, manifests, layout)
    heartbeats.timeout_seconds = manifests.in_force.manifest.heartbeat_timeout
    replay = Replay(ledger, blobs, manifests=manifests, layout=layout, threads=threads)
    weights = RunWeights(replay, stores.spool, run.run_id)
    admission = Admission(registry, rounds, weights)
    uploads = Uploads(blobs, admission, clock, record=rounds.accept)
    evaluation = Evaluation(ledger, manifest=lambda: manifests.in_force.manifest)
    assignments = Assignments(rounds, weights, membership.control, evaluation, counters)
    disk = DiskSpace(blobs, clock, needed_bytes=layout.nbytes)
    snapshots = Snapshots(
        ledger, blobs, weights, disk, manifests=manifests, in_flight=uploads.in_flight
    )
    pulls = None
    if manifests.newest.any_strategy.gathers:
        pulls = Pulls(uploads, admission, buckets, clock, counters=counters, changed=changed)

    def end_uploads() -> None:
        uploads.drop_stale()
        if pulls is not None:
            pulls.drop_stale()

    return Coordinator(
        run_id=run.run_id,
        layout=layout,
        ledger=ledger,
        manifests=manifests,
        samples=stores.samples,
        counters=counters,
        changed=changed,
        heartbeats=heartbeats,
        registry=registry,
        operator=membership.control,
        presence=membership.presence,
        membership=membership,
        barriers=Barriers(on_complete=changed),
        rounds=rounds,
        weights=weights,
        uploads=uploads,
        assignments=assignments,
        disk=disk,
        snapshots=snapshots,
        closing=Closing(
            ledger,
            clock,
            rounds,
            weights,
            run=run,
            manifests=manifests,
            end_uploads=end_uploads,
            snapshots=snapshots,
            changed=changed,
            measured=counters.measured.update,
        ),
        report=Report(
            run_id=run.run_id,
            ledger=ledger,
            membership=membership,
            manifests=manifests,
            rounds=rounds,
            weights=weights,
            assignments=assignments,
            counters=counters,
            disk=disk,
        ),
        pulls=pulls,
    )


def _create(stores: Stores, run_file: RunFile, clock: Clock, *, run_id: str) -> Manifest:
    dataset = datasets.open_dataset(run_file.data, location=run_file.data_location)
    definition = _definition(run_file, known=None)
    data = DataSettings(definition=dict(run_file.data), identity=dataset.identity())
    model = ModelSettings(definition=definition, layout_digest="0" * 64, initial_digest="0" * 64)
    strategy = strategies.any_of(run_file.manifest(model, data))
    layout = run_layout(strategy, models.layout(definition))
    longest = models.longest(definition)
    if longest is not None and dataset.block > longest:
        raise ConfigError(
            f"data.block={dataset.block} is longer than the {longest} tokens the model reads; "
            f"cut the data into shorter rows or give [model] more positions"
        )
    tensors = initial.source(run_file, definition, layout, one_by_one=strategy.by_step)
    # Made twice, since the blob begins with the digest: nothing is held but one tensor.
    digest = weights.digest_each(tensors(), layout=layout)
    measured = {"layout_digest": layout.digest, "initial_digest": digest}
    manifest = run_file.manifest(model.model_copy(update=measured), data)
    dispatch.check(manifest)
    header = weights.weights_header(
        layout, run_id=run_id, manifest_sha256=manifest.sha256(), version=0, digest=digest
    )
    sha256 = weights.store_each(stores.blobs, header, tensors(), layout=layout)
    with stores.ledger.writing() as t:
        t.run.create(
            RunRecord(run_id, clock.wall(), sha256),
            ManifestRecord(1, manifest.sha256(), manifest.body(), from_round=1),
        )
    log.info("run created", extra={"run": run_id, "manifest": manifest.sha256()})
    return manifest


def _definition(run_file: RunFile, *, known: ModelSettings | None) -> dict[str, Any]:
    """The model definition as the manifest records it.

    What a new run takes from its files or from this machine (the tensors of a custom model, the
    version of a library), a known one has on record.
    """
    made = dict(run_file.model)
    found = {} if known is None else known.definition
    if made.get("architecture") != found.get("architecture"):
        found = {}
    if made.get("architecture") == custom.NAME and "tensors" not in made:
        source = run_file.fingerprint_of or run_file.start_from
        if "tensors" in found:
            made["tensors"] = found["tensors"]
        elif source is not None:
            made["tensors"] = weights_file.tensors(source)
    if "version" in found:
        made.setdefault("version", found["version"])
    return models.resolved(made)


def _found(known: Manifest, run_file: RunFile) -> Manifest:
    """The manifest that the run file gives now; `known` is the one that the run has on record."""
    dataset = datasets.open_dataset(run_file.data, location=run_file.data_location)
    return run_file.manifest(
        known.model.model_copy(update={"definition": _definition(run_file, known=known.model)}),
        DataSettings(definition=dict(run_file.data), identity=dataset.identity()),
    )


def _checked(known: Manifests, found: Manifest) -> Manifest:
    # What an operator changed while serving is not in the file and stands.
    before = known.newest_of_file.manifest
    changed = manifest_change.changes(before, found)
    if not changed:
        return known.newest.manifest
    fixed = ", ".join(difference.field for difference in manifest_change.fixed(before, found))
    way_out = (
        f" ({fixed} cannot change in any version of a manifest)"
        if fixed
        else ", or record it as a new version from the next round on with --new-manifest"
    )
    raise ConfigError(
        f"the run file differs from the manifest this run was created with: "
        f"{'; '.join(map(str, changed))}; restore the file{way_out}, or start a new run in another "
        f"directory"
    )


def record_manifest(ledger: Ledger, found: Manifest) -> Manifest:
    """Records `found` as the next version, unless nothing changed; returns the newest version.

    ConfigError, and nothing is recorded, for a change that the run cannot go on under.
    For a run that nobody serves; while serving, `Rounds.add_manifest` does it under its lock.
    """
    known = Manifests.of(ledger)
    before = known.newest.manifest
    made = manifest_change.next_version(before, found)
    if made is before:
        log.info("the run file has not changed, no new manifest", extra=_named(known.newest))
        return before
    dispatch.check(made)
    known.record(ledger, made, layout=recorded.layout_of(before))
    changed = "; ".join(map(str, manifest_change.changes(before, made)))
    log.info("new manifest recorded", extra={**_named(known.newest), "changed": changed})
    return made


def _named(version: Recorded) -> dict[str, object]:
    return {
        "version": version.version,
        "from_round": version.from_round,
        "manifest": version.sha256,
    }
