"""What came about in a run, beside what was drawn for it: situations that seeds must meet.

They are told to the history and counted there; `tests/faults/test_simulation.py` asks how often.
"""

from atoll.errors import AtollError, StaleContribution
from atoll.simulate.faults.durable import View
from atoll.simulate.faults.rules import Rules
from atoll.simulate.faults.world import World

# Each by name, with what it means; in flight is what was handed in and not merged yet.
SITUATIONS: dict[str, str] = {
    "met: joiner counted": "a worker that came while others' work was under way contributed",
    "met: joiner began late": "its contribution has rows of fewer rounds than its turn has",
    "met: coordinator died, in flight": "the coordinator died while an island's was",
    "met: island died, in flight": "an island died while its own was",
    "met: two in flight": "an island trained on with two of its own",
    "met: stale counted": "a contribution was folded by a later round than its own",
    "met: stale refused": "one was too old for that",
    "met: fewer steps": "an island was leased fewer steps than a round has",
    "met: gathered": "an island made a version of the contributions in buckets",
    "met: skipped": "a round goes on without a contribution that is not what it must be",
}


class Situations:
    """Looks at what was recorded and refused."""

    def __init__(self, world: World, rules: Rules) -> None:
        self._world = world
        self._rules = rules

    def changed(self, before: View, after: View) -> None:
        """What the ledger has that it had not."""
        if after.differs(before, "contributions"):
            self._look_at_contributions(before, after)
        if after.differs(before, "leases"):
            self._look_at_leases(before, after)
        for skip in after.table("skips").rows[len(before.table("skips").rows) :]:
            self._world.note("met: skipped", f"{skip.worker_id} {skip.round} {skip.reason}")

    def _look_at_contributions(self, before: View, after: View) -> None:
        joined = {worker_id for worker_id, _ in self._world.scenario.joiners}
        for key in sorted(after.contributions.keys() - before.contributions.keys()):
            row = after.contributions[key]
            if row.applied > row.round:
                self._world.note("met: stale counted", f"{row.worker_id} {row.round}")
            if row.worker_id in joined:
                self._world.note("met: joiner counted", f"{row.worker_id} {row.round}")
                if row.first > self._rules.first(row.round, 1):
                    self._world.note("met: joiner began late", f"{row.worker_id} {row.round}")

    def _look_at_leases(self, before: View, after: View) -> None:
        rows: dict[tuple[int, str], int] = {}
        had = before.table("leases").grouped("round", "worker_id")
        for key, leases in after.table("leases").grouped("round", "worker_id").items():
            if key not in had:
                rows[key] = sum(lease.stop - lease.start for lease in leases)
        for (number, worker_id), count in sorted(rows.items()):
            settings = after.terms(number).settings
            whole = settings["sync_every"] * settings["inner"]["batch"]
            if count < whole // settings["num_fragments"]:
                self._world.note("met: fewer steps", f"{worker_id} {number}")

    def refused(self, error: AtollError) -> None:
        """A message was refused."""
        if isinstance(error, StaleContribution):
            self._world.note("met: stale refused")
