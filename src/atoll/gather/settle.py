"""Partials in which a uid may stand twice -> partials in which each stands once: a pure function.

The order of what is given does not matter, nor does who was given whom.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from atoll.gather.partial import Accepted, Partial, Skipped
from atoll.gather.words import Reason

_RANKED = {reason: place for place, reason in enumerate(Reason)}


def settled(partials: Iterable[Partial]) -> tuple[Partial, ...]:
    """One partial per rank, in rank order, each uid in one of them.

    The same object accepted twice counts once, for the lowest rank that has it; two different ones
    are CONFLICT. Who is accepted somewhere is not skipped, unless somebody saw a conflict. Of
    several reasons a peer's own comes first, then the order of `Reason`. A server that answered
    anybody on any rank was not away: then its failing peers are to blame.
    """
    given = sorted(partials, key=lambda one: one.rank)
    answered = {server for partial in given for server in partial.answered}
    accepted: dict[str, list[Accepted]] = defaultdict(list)
    skipped: dict[str, list[tuple[int, Skipped]]] = defaultdict(list)
    for partial in given:
        for one in partial.accepted:
            accepted[one.uid].append(one)
        for skip in partial.skipped:
            skipped[skip.uid].append((partial.rank, _blamed(skip, answered)))
    kept: dict[int, list[Accepted]] = defaultdict(list)
    left_out: dict[int, list[Skipped]] = defaultdict(list)
    for uid in sorted(accepted.keys() | skipped.keys()):
        found = sorted(accepted[uid], key=lambda one: one.rank)
        skips = sorted(skipped[uid], key=lambda pair: (_order(pair[1]), pair[0]))
        conflict = [pair for pair in skips if pair[1].reason is Reason.CONFLICT]
        hashes = sorted({one.sha256 for one in found})
        if len(hashes) > 1:
            told = f"{uid!r} has {len(hashes)} objects for one window: {', '.join(hashes)[:200]}"
            left_out[found[0].rank].append(Skipped(uid, Reason.CONFLICT, told))
        elif conflict or not found:
            rank, skip = (conflict or skips)[0]
            left_out[rank].append(skip)
        else:
            kept[found[0].rank].append(replace(found[0], stamp=_stamp(found)))
    ranks = sorted({partial.rank for partial in given})
    return tuple(
        Partial(rank, tuple(kept[rank]), tuple(left_out[rank]), _servers(given, rank))
        for rank in ranks
    )


def _blamed(skip: Skipped, answered: set[str]) -> Skipped:
    if skip.otherwise is None:
        return skip
    reason = skip.otherwise if skip.server in answered else skip.reason
    return Skipped(skip.uid, reason, skip.sentence)


def _order(skip: Skipped) -> tuple[bool, int, str]:
    return skip.reason.fault == "ours", _RANKED[skip.reason], skip.sentence


def _stamp(found: Sequence[Accepted]) -> float | None:
    """The earliest: a peer is not blamed for who looked later."""
    return min((one.stamp for one in found if one.stamp is not None), default=None)


def _servers(given: Iterable[Partial], rank: int) -> tuple[str, ...]:
    return tuple(sorted({s for one in given if one.rank == rank for s in one.answered}))
