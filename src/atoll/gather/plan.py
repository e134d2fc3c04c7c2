"""Which rank fetches which peer, and which owns which part of the model: pure functions.

All ranks compute the same plan from the same lists and compare its hash before anything is
fetched. Nothing here knows time, arrival or a network, so a retry stays with its rank.
"""

from collections.abc import Collection, Mapping, Sequence

from atoll import canonical
from atoll.collectives import schedule
from atoll.collectives.base import Collectives, Key
from atoll.errors import ConfigError, ProtocolError
from atoll.layout import ELEMENT_BYTES, GROUP_ELEMENTS, Layout, Span

HASH_BYTES = 64


def assign(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """The rank of each uid, in uid order: largest object first, to the least loaded, lowest rank.

    Between the most and the least loaded rank lies at most the largest object. The order of `sizes`
    does not matter: of equal sizes the lower uid comes first.
    """
    if ranks < 1:
        raise ConfigError(f"ranks={ranks} can fetch nothing; there must be at least one")
    loads = [0] * ranks
    counts = [0] * ranks
    found: dict[str, int] = {}
    for uid in sorted(sizes, key=lambda uid: (-sizes[uid], uid)):
        if sizes[uid] < 0:
            raise ConfigError(f"uid {uid!r} has size {sizes[uid]}; sizes count from 0")
        # Objects without bytes are a request each, too: fewer of them first.
        rank = min(range(ranks), key=lambda k: (loads[k], counts[k], k))
        found[uid] = rank
        loads[rank] += sizes[uid]
        counts[rank] += 1
    return dict(sorted(found.items()))


def plan_hash(sizes: Mapping[str, int], ranks: int, *, about: str = "") -> str:
    """Equal exactly when uids, sizes, ranks, the plan and what it is `about` are."""
    rows = [[uid, sizes[uid], rank] for uid, rank in assign(sizes, ranks).items()]
    return canonical.sha256({"about": about, "plan": rows, "ranks": ranks})


def replacements(reserves: Sequence[str], tried: Collection[str], missing: int) -> list[str]:
    """The next reserves to step in: as many as are missing, in their order, nobody a second time.

    `tried` are the uids of this window that any rank has tried, in whatever list they stand.
    """
    fresh = [uid for uid in dict.fromkeys(reserves) if uid not in tried]
    return fresh[: max(0, missing)]


def owners(layout: Layout, ranks: int, tile_bytes: int) -> list[Span]:
    """The run of whole tiles that each rank owns, about equally many; empty where tiles run out."""
    step = tile_bytes // (GROUP_ELEMENTS * ELEMENT_BYTES) * GROUP_ELEMENTS
    if step < 1:
        raise ConfigError(
            f"tile_bytes={tile_bytes} is below one group of {GROUP_ELEMENTS * ELEMENT_BYTES}; "
            f"raise it"
        )
    tiles = -(-layout.size // step)
    return [
        Span(min(run.start * step, layout.size), min(run.stop * step, layout.size))
        for run in schedule.cut(tiles, ranks)
    ]


def agree(ranks: Collectives, key: Key, own_hash: str) -> None:
    """Returns once all ranks have the same plan; else all raise ProtocolError naming the hashes."""
    said = ranks.all_gather_bytes(key, own_hash.encode(), limit=HASH_BYTES)
    if len(set(said)) > 1:
        told = ", ".join(f"rank {rank}: {one.decode()[:12]}" for rank, one in enumerate(said))
        raise ProtocolError(
            f"{key}: the ranks have different plans ({told}); give all of them the same peers, "
            f"sizes and settings. Nothing was fetched by this plan"
        )
