"""How a round is closed: freeze, outer step, record, publish, snapshot.

Owns the order of these steps. When a round is due is decided by rounds, what the weights become by
versions. A round that froze and was not published, by a crash or a full disk, is computed again.
"""

import logging
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace

from atoll.clock import Clock
from atoll.coordinator.rounds import outcomes
from atoll.coordinator.rounds.rounds import Rounds
from atoll.coordinator.rounds.run_weights import RunWeights
from atoll.coordinator.rounds.snapshots import Snapshots
from atoll.ledger import chain
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import ContributionRecord, Published, RunRecord
from atoll.strategies.outcome import Measured
from atoll.versions.manifests import Manifests
from atoll.versions.replay import Digests

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Closing:
    """Closes one round after the other; `close_due` belongs to one thread."""

    ledger: Ledger
    clock: Clock
    rounds: Rounds
    weights: RunWeights
    _: KW_ONLY
    run: RunRecord
    manifests: Manifests
    end_uploads: Callable[[], None]
    snapshots: Snapshots
    changed: Callable[[], None]
    measured: Callable[[Measured], None]  # numbers to be shown

    def is_due(self) -> bool:
        """Whether a round is due or being computed."""
        return self._frozen_round() is not None or self.rounds.is_due()

    def close_due(self) -> bool:
        """Closes the round that is frozen or due; whether there was one.

        StorageFull when there is no room to record it: it stays frozen and can be closed again.
        After any other error, the weights in memory may be torn.
        """
        if not self.is_due():
            return False
        self._close(self._frozen_round() or self._freeze())
        return True

    def _frozen_round(self) -> int | None:
        frozen = self.rounds.frozen
        return frozen if frozen == self.weights.current.version + 1 else None

    def _freeze(self) -> int:
        frozen = self.rounds.freeze()
        self.end_uploads()
        log.info("round frozen", extra={"round": frozen})
        self.changed()  # islands may read the rows of the next round meanwhile
        return frozen

    def _close(self, round_number: int) -> None:
        began = self.clock.now()
        with self.ledger.reading() as t:
            contributions = t.contributions.of_round(round_number)
        digests = self.weights.compute(round_number, contributions)
        step = self.weights.computed_step
        computed = self.clock.now()
        self._publish(round_number, self._link(round_number, contributions, digests))
        self.rounds.refresh()
        log.info(
            "round closed",
            extra={
                "round": round_number,
                "accepted": len(contributions),
                "digest": digests.master.root,
                "compute_seconds": round(computed - began, 4),
                "record_seconds": round(self.clock.now() - computed, 4),
            },
        )
        self.measured(
            step.report(
                outcomes.of_round(
                    self.rounds,
                    round_number,
                    contributions,
                    digest=digests.published,
                    seconds=computed - began,
                )
            )
        )
        self.changed()
        self.snapshots.published(round_number, is_last=self.rounds.is_finished())

    def _publish(self, round_number: int, link: Published) -> None:
        """Records the version, then offers it: what an island was given is there after a crash."""
        last = round_number + 1 + self.rounds.run_strategy.lead
        opens = [r.number for r in self.rounds.under_way if r.is_planned and r.number <= last]
        with self.ledger.writing() as t:
            t.rounds.publish(round_number, link, opens=opens)
        self.weights.publish()

    def _link(
        self, round_number: int, contributions: list[ContributionRecord], digests: Digests
    ) -> Published:
        """The link that the round adds to the chain, under the manifest that the round is under."""
        with self.ledger.reading() as t:
            *before, record = t.rounds.all(first=round_number - 1, last=round_number)
        genesis = chain.genesis_hash(self.run, self.manifests.first.sha256)
        prev_hash = before[0].hash if before else genesis
        assert prev_hash is not None, "rounds are published in order"
        master, published = digests.master, digests.published
        artifact = self.weights.computed_artifact
        linked = replace(
            record,
            prev_hash=prev_hash,
            master_digest=master.root,
            published_digest=published.root,
            artifact_sha256=artifact,
        )
        return Published(
            prev_hash=prev_hash,
            hash=chain.round_hash(linked, contributions),
            master_digest=master.root,
            published_digest=published.root,
            leaves=master.leaves,
            published_leaves=None if published is master else published.leaves,
            published_wall=self.clock.wall(),
            artifact_sha256=artifact,
        )
