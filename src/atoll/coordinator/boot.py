"""A run's durable state: created once from a run file, opened again after every restart."""

import logging
from dataclasses import dataclass

from torch import nn

from atoll import config
from atoll.blobs.base import Blobs
from atoll.clock import Clock
from atoll.config import RunFile
from atoll.coordinator.service import Coordinator
from atoll.coordinator.spool import Spool
from atoll.data import registry as datasets
from atoll.errors import ConfigError
from atoll.history import recorded, weights, weights_file
from atoll.ledger.base import Ledger
from atoll.ledger.records import ManifestRecord, RunRecord
from atoll.models import init
from atoll.models import registry as models
from atoll.protocol.manifest import DataSettings, Manifest, ModelSettings
from atoll.sums import digest as digests

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stores:
    """Where a run's durable state is."""

    ledger: Ledger
    blobs: Blobs
    spool: Spool


def create_or_check(
    stores: Stores, run_file: RunFile, clock: Clock, *, new_run_id: str
) -> Manifest:
    """Creates the run in an empty ledger; in a used one checks that the file has not changed."""
    known = recorded.manifest_of(stores.ledger)
    if known is not None:
        return _checked(known, run_file)
    return _create(stores, run_file, clock, run_id=new_run_id)


def open_coordinator(
    stores: Stores, clock: Clock, manifest: Manifest, *, threads: int = 1
) -> Coordinator:
    """The coordinator of the run in `stores`, with its weights restored."""
    stores.blobs.sweep()
    return Coordinator(
        stores.ledger,
        stores.blobs,
        stores.spool,
        clock,
        manifest=manifest,
        layout=recorded.layout_of(manifest),
        threads=threads,
    )


def _create(stores: Stores, run_file: RunFile, clock: Clock, *, run_id: str) -> Manifest:
    dataset = datasets.open_dataset(run_file.data, location=run_file.data_location)
    model = models.build(run_file.model)
    layout = models.layout_of(model)
    flat = layout.zeros()
    if run_file.start_from is not None:
        flat.copy_(weights_file.read(run_file.start_from, layout))
    else:
        init.fill(model, int(run_file.settings.get("seed", 0)))
        layout.pack(dict(_parameters(model)), flat)
    digest = digests.digest(layout, flat).root
    manifest = run_file.manifest(
        ModelSettings(
            definition=dict(run_file.model), layout_digest=layout.digest, initial_digest=digest
        ),
        DataSettings(definition=dict(run_file.data), identity=dataset.identity()),
    )
    header = weights.weights_header(
        layout, run_id=run_id, manifest_sha256=manifest.sha256(), version=0, digest=digest
    )
    sha256 = weights.store(stores.blobs, header, flat, layout=layout)
    stores.ledger.create_run(
        RunRecord(run_id, clock.wall(), sha256),
        ManifestRecord(1, manifest.sha256(), manifest.body(), from_round=1),
    )
    log.info("run created", extra={"run": run_id, "manifest": manifest.sha256()})
    return manifest


def _parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


def _checked(known: Manifest, run_file: RunFile) -> Manifest:
    dataset = datasets.open_dataset(run_file.data, location=run_file.data_location)
    found = run_file.manifest(
        known.model.model_copy(update={"definition": dict(run_file.model)}),
        DataSettings(definition=dict(run_file.data), identity=dataset.identity()),
    )
    changed = config.differences(known, found)
    if changed:
        raise ConfigError(
            "the run file differs from the manifest this run was created with: "
            + "; ".join(changed)
            + "; restore the file, or start a new run in another directory"
        )
    return known
