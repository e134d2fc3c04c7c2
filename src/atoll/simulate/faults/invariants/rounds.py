"""Rounds: their order, what a freeze leaves behind, and when one may close."""

from atoll.protocol.manifest import Manifest
from atoll.simulate.faults.durable import View
from atoll.simulate.faults.invariants.base import ROUNDING_SECONDS, Seen, must

_ORDER = ("planned", "open", "frozen", "published")


class RoundsCheck:
    """Follows every round through its life."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._quorum_at: dict[int, float] = {}

    def restarted(self, view: View, *, now: float, manifest: Manifest | None) -> None:
        """The grace period is in memory: it runs anew."""
        self._quorum_at.clear()
        self._note_quorum(view, now=now, manifest=manifest)

    def changed(self, before: View, after: View, *, now: float, manifest: Manifest | None) -> None:
        """The rounds moved as they may."""
        if before.tables.get("rounds") != after.tables.get("rounds"):
            self._check_together(after)
            self._check_order(before, after)
            for number, row in after.rounds.items():
                was = before.rounds.get(number)
                if row["state"] == "frozen" and (was is None or was["state"] != "frozen"):
                    assert manifest is not None
                    held = before.holding(number)
                    self._check_freeze(after, number, held, now=now, manifest=manifest)
        self._note_quorum(after, now=now, manifest=manifest)

    def _note_quorum(self, view: View, *, now: float, manifest: Manifest | None) -> None:
        latest = view.latest
        if latest is None or manifest is None or latest["state"] != "open":
            return
        number, settings = latest["round"], manifest.membership
        needed = max(settings.quorum or len(view.holding(number)), settings.min_workers)
        if len(view.accepted(number)) >= needed:
            self._quorum_at.setdefault(number, now)

    def _check_order(self, before: View, after: View) -> None:
        numbers = sorted(after.rounds)
        must(
            numbers == list(range(1, len(numbers) + 1)),
            "round-order",
            "the ledger has rounds {}",
            numbers,
        )
        for number, was in before.rounds.items():
            row = after.rounds.get(number)
            must(row is not None, "round-order", "round {} vanished", number)
            assert row is not None
            steps = _ORDER.index(row["state"]) - _ORDER.index(was["state"])
            must(
                steps in (0, 1) and row["cursor"] >= was["cursor"],
                "round-order",
                "round {} went from {} to {}, its cursor from {} to {}",
                number,
                was["state"],
                row["state"],
                was["cursor"],
                row["cursor"],
            )
        states = [after.rounds[number]["state"] for number in numbers]
        allowed: tuple[list[str], ...] = (
            [],
            ["open"],
            ["frozen"],
            ["frozen", "planned"],
        )
        rest = [state for state in states if state != "published"]
        must(
            rest in allowed and states == ["published"] * (len(states) - len(rest)) + rest,
            "round-order",
            "the rounds are {}",
            states,
        )

    def _check_together(self, view: View) -> None:
        for number, row in view.rounds.items():
            digests = (row["hash"], row["master_digest"], row["published_digest"], row["leaves"])
            must(
                all(d is not None for d in digests)
                if row["state"] == "published"
                else all(d is None for d in digests),
                "moves-together",
                "round {} is {} with digests {}",
                number,
                row["state"],
                digests[:3],
            )

    def _check_freeze(
        self, view: View, number: int, held: set[str], *, now: float, manifest: Manifest
    ) -> None:
        accepted = {row["worker_id"] for row in view.accepted(number)}
        settings = manifest.membership
        must(
            len(accepted) >= settings.min_workers,
            "closes-by-rule",
            f"round {number} closed with {sorted(accepted)}, min_workers={settings.min_workers}",
        )
        is_last = 0 < manifest.stop.rounds <= number
        must(
            is_last != (number + 1 in view.rounds),
            "next-is-planned",
            f"round {number} of {manifest.stop.rounds} froze, the ledger has {sorted(view.rounds)}",
        )
        waiting = {
            worker_id
            for worker_id in held - accepted
            if view.workers[worker_id]["active"]
            and self._seen.silence(worker_id, now=now)
            < manifest.heartbeat_timeout - ROUNDING_SECONDS
        }
        if waiting:
            seconds = now - self._quorum_at.get(number, now)
            must(
                0 < settings.quorum <= len(accepted)
                and seconds >= settings.grace_seconds - ROUNDING_SECONDS,
                "closes-by-rule",
                f"round {number} closed without {sorted(waiting)}, who are live; accepted "
                f"{len(accepted)}, quorum {settings.quorum} for {seconds:.3f} of "
                f"{settings.grace_seconds} s",
            )
