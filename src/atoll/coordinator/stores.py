"""The durable state of a run, as its parts are handed to the coordinator."""

from dataclasses import dataclass, field

from atoll.blobs.base import Blobs
from atoll.coordinator.rounds.spool import Spool
from atoll.coordinator.shown.samples import SampleStore
from atoll.ledger.ledger import Ledger


@dataclass(frozen=True)
class Stores:
    """Where a run's durable state is."""

    ledger: Ledger
    blobs: Blobs
    spool: Spool
    samples: SampleStore = field(default_factory=SampleStore)
