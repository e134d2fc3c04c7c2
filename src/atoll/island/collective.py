"""Where the ranks of an island act as one: resuming, fetching, counting a step, handing in a round.

Every function is collective. In an island of one process each comes down to the leader's part.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from atoll.data import base as datasets
from atoll.data.base import Dataset
from atoll.errors import ManifestMismatch
from atoll.island import fetch as fetching
from atoll.island import hand_in as contributing
from atoll.island.link.session import Session
from atoll.island.ranks.batch_slice import BatchSlice
from atoll.island.ranks.group import Group
from atoll.island.state.continuity import Continuity
from atoll.island.state.store import Saved
from atoll.island.state.weights import IslandWeights
from atoll.protocol.manifest import Manifest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Step:
    """One inner step of the whole island."""

    rows: int
    tokens: int
    loss_sum: float

    @property
    def loss(self) -> float:
        """Nats per token, over all ranks."""
        return self.loss_sum / self.tokens if self.tokens else math.nan


def check_data(group: Group, manifest: Manifest, dataset: Dataset) -> None:
    """Refuses by name a rank whose data is not the run's; the coordinator saw only the leader's."""
    identity = manifest.data.identity

    def check() -> None:
        difference = datasets.first_difference(identity, dict(dataset.identity()))
        if not group.is_leader and difference is not None:
            field, ours, theirs = difference
            raise ManifestMismatch(
                f"data.{field} of rank {group.rank} is {theirs!r}, the run's is {ours!r}; every "
                f"rank's data must be the run's"
            )

    group.together(check)


def resume(group: Group, session: Session, continuity: Continuity) -> None:
    """Continues what an earlier life left, on all ranks or on none."""

    found: Saved | None = None

    def read() -> tuple[int | None, int | None]:
        nonlocal found
        found = continuity.resume(version=session.version)
        return continuity.rounds()

    def resend() -> bool:
        assert found is not None, "only a pending round is sent again"
        return contributing.resend(session, continuity, found)

    checkpoint, pending = group.lead(read)
    fits = group.together(lambda: group.is_leader or continuity.fall_in(checkpoint, pending))
    if not all(one for (one,) in group.gather([fits])):
        log.warning("the ranks' states are not of one round and are dropped")
        group.together(continuity.drop)
        return
    if pending is None:
        return
    accepted = bool(group.lead(resend))

    def settle() -> None:
        if not group.is_leader:
            continuity.settle_resent(accepted=accepted)

    group.together(settle)


def fetch(group: Group, session: Session, weights: IslandWeights) -> None:
    """Brings every rank to the published version; the leader alone downloads."""

    def download() -> tuple[int | None, str | None]:
        fetching.fetch(session, weights)
        return weights.version, weights.digest

    version, digest = group.lead(download)
    weights.adopt(version, digest)


def step(group: Group, share: BatchSlice, *, loss: float, row_tokens: int) -> Step:
    """Adds up the ranks' parts of a step; KeyboardInterrupt on all when one was asked to end."""
    tokens = share.rows * row_tokens
    # A rank without rows trained on a stand-in, which does not count.
    part = [loss * tokens if tokens else 0.0, float(share.rows), float(group.is_interrupted)]
    parts = group.gather(part)
    if any(interrupted for _, _, interrupted in parts):
        raise KeyboardInterrupt
    rows = sum(int(count) for _, count, _ in parts)
    return Step(rows, rows * row_tokens, sum(loss_sum for loss_sum, _, _ in parts))


def total(group: Group, loss_sum: float, tokens: int) -> tuple[float, int]:
    """A partial sum and its count, over all ranks."""
    parts = group.gather([loss_sum, tokens])
    return sum(loss for loss, _ in parts), sum(int(count) for _, count in parts)


def contribute(
    group: Group, continuity: Continuity, round_number: int, send: Callable[[], bool]
) -> bool:
    """Whether the round is in. Followers are durable before the leader sends, and do as it did."""

    def save() -> None:
        if not group.is_leader:
            continuity.save_part(round_number)

    def settle() -> None:
        if not group.is_leader:
            continuity.settle(round_number, accepted=accepted)

    group.together(save)
    accepted = bool(group.lead(send))
    group.together(settle)
    return accepted
