"""A gather over all ranks: primaries first, then reserves for those who are missing.

A reserve is asked once all primaries are settled on all ranks: as many as are missing, in order,
spread over all ranks; and again while some of those fail, until the count is reached, the list
ends or time is over. Every decision is made from what all ranks have told, so all make the same.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from atoll.clock import Clock
from atoll.collectives.base import Collectives
from atoll.errors import AtollError, ConfigError, FrameError, GroupBroken
from atoll.gather import partial, plan
from atoll.gather.fetch import Fetched
from atoll.gather.merge import merge
from atoll.gather.partial import LIMIT_BYTES, Partial, shortened
from atoll.gather.peers import Peer, PeerList
from atoll.gather.result import Merged
from atoll.gather.turns import Turns
from atoll.layout import Layout
from atoll.wire import schema

Fetch = Callable[[Sequence[Peer], float], Fetched]  # the peers, and the deadline
_OF = "message of a rank"
_KNOWN = ("failed", "has_time", "partial")


@dataclass(frozen=True, kw_only=True)
class Gather:
    """What a window is gathered with; the same on all ranks but for ranks, clock and fetch."""

    ranks: Collectives
    turns: Turns
    clock: Clock
    fetch: Fetch
    layout: Layout
    sizes: Mapping[str, int]  # expected bytes of each uid's object
    base_version: int = 0
    reserve_share: float = 0.3  # of the time, kept for reserves

    def __post_init__(self) -> None:
        if not 0 <= self.reserve_share < 1:
            raise ConfigError(
                f"reserve_share={self.reserve_share} must be from 0 to below 1; it is the part of "
                f"the time that is kept for reserves"
            )

    def run(self, peers: PeerList, *, seconds: float) -> Merged:
        """The merged result of a window, equal on all ranks, within `seconds` from now.

        An error on one rank ends the gather on all, as GroupBroken naming it.
        """
        started = self.clock.now()
        deadline = started + seconds
        primaries = [peer.uid for peer in peers.primaries]
        reserves = [peer.uid for peer in peers.reserves]
        by_uid = {peer.uid: peer for peer in peers.all}
        partials: list[Partial] = []
        asked, kept = primaries, self.reserve_share if reserves else 0.0
        tried: set[str] = set()
        while True:
            now = self.clock.now()
            until = deadline - kept * max(0.0, deadline - now)
            tried.update(asked)
            came, has_time = self._round([by_uid[uid] for uid in asked], until, deadline)
            partials += came
            merged = merge(
                partials,
                primaries=primaries,
                reserves=reserves,
                base_version=self.base_version,
                seconds=self.clock.now() - started,
            )
            asked = plan.replacements(reserves, tried, merged.missing)
            if not asked or not has_time:
                return merged
            # Half of what is left for each round that may be followed by another.
            kept = 0.5 if len(tried) + len(asked) < len(by_uid) else 0.0

    def _round(
        self, asked: Sequence[Peer], until: float, deadline: float
    ) -> tuple[list[Partial], bool]:
        """What all ranks found of `asked`, and whether all of them have time for more."""
        ranks = self.ranks
        sizes = {peer.uid: self.sizes.get(peer.uid, 0) for peer in asked}
        about = "\n".join(
            f"{peer.uid} {peer.key.hex} {peer.bucket} {peer.prefix}" for peer in asked
        )
        own_hash = plan.plan_hash(sizes, ranks.size, about=about)
        plan.agree(ranks, self.turns.next("control"), own_hash)
        given = plan.assign(sizes, ranks.size)
        own = [peer for peer in asked if given[peer.uid] == ranks.rank]
        message = self._message(own, until, deadline)
        said = ranks.all_gather_bytes(self.turns.next("control"), message, limit=LIMIT_BYTES)
        read = [_read(data, rank, self.layout) for rank, data in enumerate(said)]
        failed = [f"rank {rank}: {one}" for rank, one in enumerate(read) if isinstance(one, str)]
        if failed:
            raise GroupBroken(f"the gather is given up on all ranks ({'; '.join(failed)})")
        found = [one for one in read if not isinstance(one, str)]
        return [one for one, _ in found], all(has_time for _, has_time in found)

    def _message(self, own: Sequence[Peer], until: float, deadline: float) -> bytes:
        try:
            found = self.fetch(own, until).partial(self.ranks.rank)
            has_time = self.clock.now() < deadline
            return partial.bounded({"failed": "", "has_time": has_time, "partial": found.plain()})
        except AtollError as exc:
            told = shortened(f"{exc.code}: {exc}")
            return partial.bounded({"failed": told, "has_time": False, "partial": {}})


def _read(data: bytes, rank: int, layout: Layout) -> tuple[Partial, bool] | str:
    """A rank's partial and whether it has time, or what it failed with."""
    table = schema.object_of(data, of=_OF)
    schema.keys(table, known=_KNOWN, of=_OF)
    failed, has_time, found = (table[name] for name in _KNOWN)
    if not isinstance(failed, str) or not isinstance(has_time, bool) or not isinstance(found, dict):
        raise FrameError(f"{_OF} {rank} is not text, a truth and an object; it is damaged")
    if failed:
        return failed
    partial_found = partial.parsed(found, layout=layout)
    if partial_found.rank != rank:
        raise FrameError(f"{_OF} {rank} says rank={partial_found.rank}; it is damaged")
    return partial_found, has_time
