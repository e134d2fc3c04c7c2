"""Windows of a small model for the consumers of a gather: peers, payloads, ranks in threads."""

import hashlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.codecs.topk.codec import TopK
from atoll.collectives.base import Collectives
from atoll.errors import AtollError
from atoll.gather import consume
from atoll.gather.budget import Budget
from atoll.gather.consume import Held
from atoll.gather.exchange import Routes
from atoll.gather.merge import merge
from atoll.gather.partial import Accepted, Partial
from atoll.gather.turns import Turns
from atoll.layout import ELEMENT_BYTES, GROUP_ELEMENTS, Layout
from atoll.optim.base import OuterOptimizer
from atoll.optim.sgd import Sgd
from tests import gather_reference as naive
from tests import rank_groups

# Five tiles of one group, the last one short; chunks with several tensors; a tensor over tiles.
SIZES = (70_000, 5, 131_072, 64, 3_000, 60_001)
LAYOUT = Layout.of((f"p{k}", (size,), "float32") for k, size in enumerate(SIZES))
TILE_BYTES = GROUP_ELEMENTS * ELEMENT_BYTES
LR = 0.3


def displacement(seed: int, *, scale: float = 1e-2, size: int = LAYOUT.size) -> Tensor:
    """What a peer has to send. Peers agree in part, so that places have several senders, and chunks
    and peers differ in size: the order of adding shows."""
    rng, common = np.random.default_rng(seed), np.random.default_rng(1_000)
    sizes = np.ldexp(scale, rng.integers(-6, 6, -(-size // 4096)))
    values = rng.standard_normal(size) + 0.6 * common.standard_normal(size)
    return torch.from_numpy((values * np.repeat(sizes, 4096)[:size]).astype(np.float32))


def payload(seed: int, *, scale: float = 1e-2, size: int = LAYOUT.size) -> bytes:
    """What a peer sends."""
    flat = displacement(seed, scale=scale, size=size)
    return TopK().encode(flat, noise=None, first_group=0).numpy().tobytes()


def zeros(size: int = LAYOUT.size) -> bytes:
    """A payload that sends the value 0 at the first places of every chunk."""
    return TopK().encode(torch.zeros(size), noise=None, first_group=0).numpy().tobytes()


def peers(count: int, **changes: naive.Peer) -> dict[str, naive.Peer]:
    """So many peers, with odd weights and rising times; uids sort by code point ("10" < "9")."""
    made = {
        str(k): naive.Peer(payload(k, scale=2.0 ** (k % 5 - 8)), 1 + k % 3, float(k))
        for k in range(4, 4 + count)
    }
    return made | changes


@dataclass(frozen=True)
class Stored:
    """The payloads that a rank fetched."""

    payloads: Mapping[str, bytes]

    def read(self, uid: str, start: int, stop: int) -> bytes:
        return self.payloads[uid][start:stop]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a window is cut; none of it may show in the result."""

    ranks: int = 1
    tile_bytes: int = TILE_BYTES
    tiles_per_exchange: int = 1
    turned: int = 0  # by how much the peers' holders are turned
    settings: consume.Settings = field(default_factory=consume.Settings)
    optimizer: OuterOptimizer = field(default_factory=lambda: Sgd(LR))
    layout: Layout = LAYOUT
    merged: bool = False  # whether consumers get the merged result, else the partials
    catches: bool = False  # errors are returned
    source: Callable[[int, Mapping[str, bytes]], Any] = lambda _, payloads: Stored(payloads)


def start(layout: Layout = LAYOUT) -> Tensor:
    """Weights so small that no bit of a step is lost to them."""
    drawn = np.random.default_rng(0).standard_normal(layout.size, np.float32)
    return torch.from_numpy(drawn * np.float32(1e-6))


def partials(
    given: Mapping[str, naive.Peer], holders: Mapping[str, int], sizes: Sequence[int]
) -> Any:
    """What the ranks that fetched them say about the peers."""
    return [
        Partial(
            rank,
            tuple(
                Accepted(
                    uid,
                    hashlib.sha256(peer.payload).hexdigest(),
                    len(peer.payload),
                    tuple(naive.squares(peer.payload, sizes)),
                    peer.stamp,
                    0,
                    rank,
                )
                for uid, peer in sorted(given.items())
                if holders[uid] == rank
            ),
        )
        for rank in sorted(set(holders.values()))
    ]


def window(
    given: Mapping[str, naive.Peer], made: Setting, master: Tensor
) -> list[consume.Consumed]:
    """A window on all ranks; `master` [layout] changes as the ranks' parts of it do."""
    sizes = [len(tensor.span) for tensor in made.layout.tensors]
    holders = {uid: (k + made.turned) % made.ranks for k, uid in enumerate(sorted(given))}
    result = partials(given, holders, sizes)
    share = Budget(
        slots=1,
        piece_bytes=1,
        tile_bytes=made.tile_bytes,
        tiles_per_exchange=made.tiles_per_exchange,
    )
    routes = Routes.of(result, made.layout, ranks=made.ranks, budget=share)
    spans = routes.owners
    if made.merged:
        result = merge(result, primaries=sorted(given), base_version=6)

    def work(ranks: Collectives) -> Any:
        try:
            return run(ranks)
        except AtollError as exc:
            if not made.catches:
                raise
            return exc

    def run(ranks: Collectives) -> consume.Consumed:
        own = {u: p.payload for u, p in given.items() if holders[u] == ranks.rank}
        slots = made.optimizer.init(len(spans[ranks.rank]))
        held = Held(
            master=spans[ranks.rank].of(master), slots=slots, optimizer=made.optimizer, step=1
        )
        with (
            tempfile.TemporaryDirectory() as directory,
            consume.consumed(
                ranks,
                Turns(1, 7),
                routes,
                result=result,
                source=made.source(ranks.rank, own),
                held=held,
                weights={uid: peer.weight for uid, peer in given.items()},
                directory=Path(directory),
                settings=made.settings,
            ) as done,
        ):
            return done

    return rank_groups.threads(made.ranks, "direct", work, chunk_bytes=1 << 16)


def expected(
    given: Mapping[str, naive.Peer], master: Tensor, **changes: Any
) -> tuple[naive.Window, Tensor]:
    """The reference's window, and its weights as a tensor."""
    found = naive.window(given, SIZES, list(master.numpy()), lr=LR, **changes)
    return found, torch.from_numpy(np.array(found.weights, np.float32))


def bits(values: Any) -> bytes:
    return np.ascontiguousarray(values).tobytes()


def errors_of(given: Mapping[str, naive.Peer], made: Setting, master: Tensor) -> list[Exception]:
    """What each rank raises in a window that all must give up."""
    found: list[Any] = window(given, replace(made, catches=True), master)
    assert all(isinstance(one, Exception) for one in found), found
    return found
