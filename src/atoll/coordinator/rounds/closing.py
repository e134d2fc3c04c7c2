"""How a round is closed: freeze, outer step, record, publish, snapshot.

Owns the order of these steps. When a round is due is decided by rounds, what the weights become by
versions. A round that froze and was not published, by a crash or a full disk, is computed again.
"""

import logging
from collections.abc import Callable

from atoll.clock import Clock
from atoll.coordinator.rounds.rounds import Rounds
from atoll.coordinator.rounds.run_weights import RunWeights
from atoll.coordinator.rounds.snapshots import Snapshots
from atoll.ledger import chain
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import ContributionRecord, Published, RunRecord
from atoll.versions.manifests import Manifests
from atoll.versions.replay import Digests

log = logging.getLogger(__name__)


class Closing:
    """Closes one round after the other; `close_due` belongs to one thread."""

    def __init__(
        self,
        ledger: Ledger,
        clock: Clock,
        rounds: Rounds,
        weights: RunWeights,
        *,
        run: RunRecord,
        manifests: Manifests,
        end_uploads: Callable[[], None],
        snapshots: Snapshots,
        on_change: Callable[[], None],
    ) -> None:
        self._ledger = ledger
        self._clock = clock
        self._rounds = rounds
        self._weights = weights
        self._run = run
        self._manifests = manifests
        self._end_uploads = end_uploads
        self._snapshots = snapshots
        self._changed = on_change

    def is_due(self) -> bool:
        """Whether a round is due or being computed."""
        return self._frozen_round() is not None or self._rounds.is_due()

    def close_due(self) -> bool:
        """Closes the round that is frozen or due; whether there was one.

        StorageFull when there is no room to record it: it stays frozen and can be closed again.
        After any other error, the weights in memory may be torn.
        """
        frozen = self._frozen_round()
        if frozen is None:
            if not self._rounds.is_due():
                return False
            frozen = self._freeze()
        self._close(frozen)
        return True

    def _frozen_round(self) -> int | None:
        frozen = self._rounds.frozen
        return frozen if frozen == self._weights.current.version + 1 else None

    def _freeze(self) -> int:
        frozen = self._rounds.freeze()
        self._end_uploads()
        log.info("round frozen", extra={"round": frozen})
        self._changed()  # islands may read the rows of the next round meanwhile
        return frozen

    def _close(self, round_number: int) -> None:
        began = self._clock.now()
        with self._ledger.reading() as t:
            contributions = t.contributions.of_round(round_number)
        digests = self._weights.compute(round_number, contributions)
        computed = self._clock.now()
        self._publish(round_number, self._link(round_number, contributions, digests))
        self._rounds.refresh()
        log.info(
            "round closed",
            extra={
                "round": round_number,
                "accepted": len(contributions),
                "digest": digests.master.root,
                "compute_seconds": round(computed - began, 4),
                "record_seconds": round(self._clock.now() - computed, 4),
            },
        )
        self._changed()
        self._snapshots.published(round_number, is_last=self._rounds.is_finished())

    def _publish(self, round_number: int, link: Published) -> None:
        """Records the version, then offers it: what an island was given is there after a crash."""
        last = round_number + 1 + self._rounds.run_strategy.lead
        planned = [r.number for r in self._rounds.under_way if r.is_planned]
        with self._ledger.writing() as t:
            t.rounds.publish(round_number, link, opens=[n for n in planned if n <= last])
        self._weights.publish()

    def _link(
        self, round_number: int, contributions: list[ContributionRecord], digests: Digests
    ) -> Published:
        """The link that the round adds to the chain, under the manifest that the round is under."""
        prev_hash = self._chain_head(round_number)
        master, published = digests.master, digests.published
        return Published(
            prev_hash=prev_hash,
            hash=chain.round_hash(
                prev_hash=prev_hash,
                round_number=round_number,
                fragment=self._rounds.run_strategy.fragment(round_number),
                manifest_sha256=self._manifests.of_round(round_number).sha256,
                contributions=contributions,
                master_digest=master.root,
                published_digest=published.root,
            ),
            master_digest=master.root,
            published_digest=published.root,
            leaves=master.leaves,
            published_leaves=None if published is master else published.leaves,
            published_wall=self._clock.wall(),
        )

    def _chain_head(self, round_number: int) -> str:
        if round_number == 1:
            first = self._manifests.first.sha256
            return chain.genesis_hash(self._run.run_id, first, self._run.initial_sha256)
        with self._ledger.reading() as t:
            [before] = t.rounds.all(first=round_number - 1, last=round_number - 1)
        assert before.hash is not None
        return before.hash
