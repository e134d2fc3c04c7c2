"""The durable state of a run, as its parts are handed to the coordinator."""

from dataclasses import dataclass, field

from atoll.blobs.base import Blobs
from atoll.coordinator.rounds.spool import Spool
from atoll.coordinator.shown.samples import SampleStore
from atoll.ledger.ledger import Ledger
from atoll.proof import soundness


@dataclass(eq=False)
class Stores:
    """Where a run's durable state is, from when a process opens it on."""

    ledger: Ledger
    blobs: Blobs
    spool: Spool
    samples: SampleStore = field(default_factory=SampleStore)
    is_checked: bool = field(default=False, init=False)

    def check(self) -> None:
        """StateDamaged when what is stored is not what was written. Looks at the first call only.

        Called by whatever is about to use or change the state, in the thread that starts it.
        """
        if not self.is_checked:
            soundness.check_start(self.ledger, self.blobs)
            self.is_checked = True
