"""Where the ranks of an island add up what each of them did, and check that they have one data.

Every function is collective. In an island of one process each comes down to the leader's part.
"""

from atoll.data import base as datasets
from atoll.data.base import Dataset
from atoll.errors import ManifestMismatch
from atoll.island.conversation.intents import Partial, Trained
from atoll.island.ranks.batch_slice import BatchSlice
from atoll.island.ranks.group import Group
from atoll.protocol.manifest import Manifest


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


def step(group: Group, share: BatchSlice, *, loss: float, row_tokens: int) -> Trained:
    """Adds up the ranks' parts of a step; KeyboardInterrupt on all when one was asked to end."""
    tokens = share.rows * row_tokens
    # A rank without rows trained on a stand-in, which does not count.
    part = [loss * tokens if tokens else 0.0, float(share.rows), float(group.is_interrupted)]
    parts = group.gather(part)
    if any(interrupted for _, _, interrupted in parts):
        raise KeyboardInterrupt
    rows = sum(int(count) for _, count, _ in parts)
    return Trained(sum(loss_sum for loss_sum, _, _ in parts), rows * row_tokens, rows)


def total(group: Group, loss_sum: float, tokens: int) -> Partial:
    """A partial sum and its count, over all ranks."""
    parts = group.gather([loss_sum, tokens])
    return Partial(sum(loss for loss, _ in parts), sum(int(count) for _, count in parts))
