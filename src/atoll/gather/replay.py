"""Applies a recorded window: the same update from the artifact's bytes, to the same bits."""

from pathlib import Path

from atoll.collectives.base import Collectives
from atoll.errors import StateDamaged
from atoll.gather import consume
from atoll.gather.archive import Recorded
from atoll.gather.artifact import BodySlices
from atoll.gather.budget import Budget
from atoll.gather.consume import Held
from atoll.gather.exchange import Routes
from atoll.gather.replica import Replica
from atoll.gather.turns import Turns
from atoll.layout import Layout
from atoll.optim.base import OuterOptimizer


def replay(
    ranks: Collectives,
    turns: Turns,
    replica: Replica,
    found: Recorded,
    *,
    body: Path,
    layout: Layout,
    budget: Budget,
    optimizer: OuterOptimizer,
) -> None:
    """Moves all ranks' weights by a recorded window; `body`, checked, lies with rank 0.

    StateDamaged, on all ranks, where the record does not follow, or the weights do not become what
    it says; then they must be loaded anew.
    """
    made = found.artifact
    replica.check_follows(found)
    routes = Routes.of([made.partial], layout, ranks=ranks.size, budget=budget)
    with consume.consumed(
        ranks,
        turns,
        routes,
        result=[made.partial],
        source=BodySlices(body, made, layout),
        held=Held(
            master=replica.master,
            slots={},
            optimizer=optimizer,
            step=made.window + 1,
            moving=replica.tear,
        ),
        weights=dict(zip(made.uids, made.weights, strict=True)),
        directory=body.parent,
        settings=consume.Settings(),  # copies were left out when it was made
    ) as done:
        replica.is_torn = True
    if done.digest.root != made.digest:
        raise StateDamaged(
            f"window {made.window} gives weights of digest {done.digest.root}, its artifact says "
            f"{made.digest}; check that outer lr and layout are the run's, then load weights anew"
        )
    replica.advance(made.digest, found.sha256)
