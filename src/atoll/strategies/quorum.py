"""When a round may close: a pure rule over sets, with time as an argument."""

from collections.abc import Set

from atoll.protocol.manifest import MembershipSettings
from atoll.strategies.base import RoundView


def has_quorum(view: RoundView, settings: MembershipSettings) -> bool:
    """Whether enough contributions are in for the grace period to run."""
    needed = settings.quorum or len(view.planned)
    return len(view.accepted) >= max(needed, settings.min_workers)


def is_due(view: RoundView, settings: MembershipSettings, *, seconds: float) -> bool:
    """Whether the round closes now.

    Never with fewer than `min_workers` contributions. Otherwise when no live planned worker is
    still missing, or when the quorum has been in for `grace_seconds`.
    """
    if len(view.accepted) < settings.min_workers:
        return False
    if not waiting_for(view):
        return True
    return has_quorum(view, settings) and seconds >= settings.grace_seconds


def waiting_for(view: RoundView) -> Set[str]:
    """Live workers whose contribution is still missing."""
    return (view.planned & view.live) - view.accepted


def is_short(view: RoundView, settings: MembershipSettings) -> bool:
    """Whether the round could not reach `min_workers` even if every live planned worker sent."""
    return len(view.accepted | (view.planned & view.live)) < settings.min_workers
