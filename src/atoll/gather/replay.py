"""Applies a recorded window: the same update from the artifact's bytes, to the same bits.

Nothing of it is taken on trust in who recorded it: every frame is rebuilt and checked first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from atoll.collectives.base import Collectives
from atoll.errors import StateDamaged
from atoll.gather import consume
from atoll.gather.archive import Recorded
from atoll.gather.body import BodySlices
from atoll.gather.budget import Budget
from atoll.gather.consume import Held
from atoll.gather.exchange import Routes
from atoll.gather.partial import Partial
from atoll.gather.rebuild import Trust
from atoll.gather.replica import Replica
from atoll.gather.turns import Turns
from atoll.gather.vote import vote
from atoll.layout import Layout, Span
from atoll.optim.base import OuterOptimizer


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What a group replays with; the same on all ranks."""

    layout: Layout
    owners: Sequence[Span]  # by rank
    optimizer: OuterOptimizer
    trust: Trust
    readers: Sequence[int]  # the ranks that have the body on their disk; they share its peers

    def run(
        self,
        ranks: Collectives,
        turns: Turns,
        replica: Replica,
        found: Recorded,
        *,
        body: Path,
        budget: Budget,
    ) -> None:
        """Moves all ranks' weights by a recorded window.

        Every rank raises the same error: FrameError where the artifact holds what its peers did not
        sign, and StateDamaged where the record does not follow, before any weight has moved;
        StateDamaged, too, where the weights do not become what the record says; then they must be
        loaded anew.
        """
        made = found.artifact
        source = BodySlices(body, made.accepted, self.layout)
        vote(ranks, turns.next("control"), self._trouble(ranks.rank, replica, found, source))
        parts = self._parts(found)
        routes = Routes.of(parts, self.layout, ranks=ranks.size, budget=budget, owners=self.owners)
        with consume.consumed(
            ranks,
            turns,
            routes,
            result=parts,
            source=source,
            held=Held(
                master=replica.master, slots={}, optimizer=self.optimizer, step=made.window + 1
            ),
            weights=dict(zip(made.uids, made.weights, strict=True)),
            directory=body.parent,
            settings=consume.Settings(),  # copies were left out when it was made
        ) as done:
            replica.is_torn = True
        if done.digest.root != made.digest:
            raise StateDamaged(
                f"window {made.window} gives weights of digest {done.digest.root}, its artifact "
                f"says {made.digest}; check that outer lr and layout are the run's, then load "
                f"weights anew"
            )
        replica.advance(made.digest, found.sha256)

    def _trouble(
        self, rank: int, replica: Replica, found: Recorded, source: BodySlices
    ) -> Exception | None:
        made = found.artifact
        try:
            replica.check_follows(found)
            self.trust.check_record(made, self.layout)
            own = [row for row in range(len(made.accepted)) if self._reader(row) == rank]
            self.trust.check_frames(made, source, self.layout, rows=own)
        except Exception as exc:  # whatever it is, the others must hear of it
            return exc
        return None

    def _parts(self, found: Recorded) -> list[Partial]:
        """The peers as if each reader had fetched its share."""
        rows = [
            replace(one, rank=self._reader(row)) for row, one in enumerate(found.artifact.accepted)
        ]
        return [
            Partial(rank, tuple(one for one in rows if one.rank == rank))
            for rank in sorted({one.rank for one in rows})
        ]

    def _reader(self, row: int) -> int:
        return self.readers[row % len(self.readers)]
