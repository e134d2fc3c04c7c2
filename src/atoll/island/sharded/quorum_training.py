"""A rank's training in a group that commits by quorum: it may be late, and goes on where all are.

Steps are counted and saved where they are committed, in this rank's server, whatever its training
does meanwhile. The end of a round is reached by all: until the last has evaluated and saved it,
nobody goes on, so the weights are those of its last step.
"""

import logging
from collections.abc import Callable
from typing import Any

from atoll.collectives.base import Collectives
from atoll.errors import AtollError, ConfigError, StaleContribution
from atoll.island.sharded.errands import Spawn
from atoll.island.sharded.saving import RoundEnd
from atoll.island.sharded.shield import Shield
from atoll.island.sharded.training import Training
from atoll.protocol.sharded import MAX_LATE
from atoll.rows import Late
from atoll.strategies.sharded.commit import Outcome
from atoll.strategies.sharded.quorum import settings
from atoll.strategies.sharded.quorum.rank import Lane, QuorumRank, Reception
from atoll.strategies.sharded.saves import NO_NOTES, Notes
from atoll.strategies.sharded.step import Made, Step

log = logging.getLogger(__name__)


class QuorumTraining(Training):
    """For one thread, and for those of this rank's server, which call `_told` and `_may_fold`."""

    def __init__(
        self,
        *given: Any,
        reception: Reception,
        lane: Callable[[str], Lane],
        spawn: Spawn,
        **more: Any,
    ) -> None:
        """As `Training`; `reception` is what the group was entered with."""
        super().__init__(*given, spawn=spawn, **more)
        self._reception = reception
        self._lane = lane
        self._spawn = spawn
        self._rank: QuorumRank | None = None
        self._saved = 0  # the last step that was saved in this group

    def _opened(self, version: int) -> Step:
        place, manifest = self.place, self.manifest
        rank = self._rank = QuorumRank(
            self._loaded.model,
            self._shard,
            place.peers,
            self._reception,
            settings.of(
                manifest.sharded,
                manifest.inner,
                group=place.number,
                version=version,
                size=place.size,
                min_workers=manifest.membership.min_workers,
            ),
            clock=self._clock,
            spawn=lambda name, work: self._spawn(f"{name}-{place.number}", work),
            lane=self._lane,
            told=self._told,
            may_fold=self._may_fold,
            shield=self._shielded,
        )
        place.on_fail(rank.abort)
        return rank.steps

    def _shielded(self, exchange: Collectives) -> Shield:
        self._shield = Shield(exchange)
        return self._shield

    # In the server, while nothing of the shard changes

    def _may_fold(self, step: int) -> bool:
        """Whether the save that the step will need can be begun: one is written at a time."""
        return not self._is_saved(step) or self._saving.is_settled

    def _is_saved(self, step: int) -> bool:
        return step % self.manifest.sharded.save_every == 0

    def _told(self, outcome: Outcome) -> None:
        is_first = (outcome.step - 1) % self.manifest.sharded.round_steps == 0
        before = NO_NOTES if is_first else self._notes
        self._notes = Notes(
            before.loss_sum + outcome.loss_sum,
            before.tokens + outcome.tokens,
            before.late + self._late(outcome),
        )
        try:
            self._check_notes()
            if self._is_saved(outcome.step):
                self._save(outcome.step)
                self._saved = outcome.step
        except AtollError as error:
            self.place.fail(error)

    def _late(self, outcome: Outcome) -> tuple[Late, ...]:
        """Those who had rows of the step."""
        batch, size = self.manifest.inner.batch, self.place.size
        had = [r for r in sorted(outcome.excluded) if (r + 1) * batch // size > r * batch // size]
        return tuple((outcome.step, rank, size) for rank in had)

    def _check_notes(self) -> None:
        if len(self._notes.late) > MAX_LATE:
            raise ConfigError(
                f"ranks were late {len(self._notes.late)} times since the last checkpoint; at most "
                f"{MAX_LATE} are remembered: raise sharded.deadline_seconds, or checkpoint more "
                f"often"
            )

    # In the training

    def _count(self, made: Made, *, is_first: bool) -> None:
        """It was counted where it was committed."""

    def _save_between(self, number: int, *, is_last: bool) -> None:
        """It was saved where it was committed."""

    def _hand_in(self, step: int, ends: RoundEnd) -> None:
        """As it was saved where it was committed; by this group, or else it is saved once more."""
        if self._saved == step:
            self._saving.hand_in(step, ends)
        else:
            super()._hand_in(step, ends)

    def _was_late(self, number: int, error: StaleContribution) -> int:
        assert self._rank is not None, "a step comes after the restore"
        self._rank.steps.abandon()
        self._shield.forget()
        present = self._rank.steps.catch_up(number)
        about = {"step": number, "goes_on_with": present, "reason": str(error)}
        log.warning("this rank was late", extra=about)
        return present

    def _meet(self, step: int) -> None:
        assert self._rank is not None, "a round ends after the restore"
        self._rank.steps.meet(step)

    def close(self) -> None:
        try:
            if self._rank is not None:
                self._rank.close()
        finally:
            super().close()
