"""Who fetched a payload serves its tiles to their owners: slices of all peers, batch by batch.

Owns which bytes go where; both sides compute all sizes from the plan, so no message carries one. A
batch is a run of tiles of every owner at once. Of a payload it is one contiguous piece, because
tiles are whole chunks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Self

import numpy as np
import torch
from torch import Tensor

from atoll.collectives.base import Collectives
from atoll.compiled.arrays import Bytes
from atoll.errors import ConfigError, StoreError
from atoll.gather import plan, supports
from atoll.gather.budget import Budget
from atoll.gather.partial import Accepted, Partial
from atoll.gather.result import Merged, parts_of
from atoll.gather.state_dict import SliceSource
from atoll.gather.turns import Turns
from atoll.layout import Layout, Span

NOWHERE = Span(0, 0)
Each = Callable[[Span, Bytes], None]  # a tile and its bytes [peers, n], in uid order


@dataclass(frozen=True)
class Routes:
    """Which rank has which payload, which rank owns which tiles; the same on all ranks."""

    layout: Layout
    owners: tuple[Span, ...]  # by rank: a run of whole tiles, may be empty
    holders: Mapping[str, int]  # the rank that fetched each uid's payload
    tile_bytes: int
    tiles_per_exchange: int

    @classmethod
    def of(
        cls,
        result: Merged | Sequence[Partial],
        layout: Layout,
        *,
        ranks: int,
        budget: Budget,
        owners: Sequence[Span] | None = None,
    ) -> Self:
        """The routes of a window's accepted peers, from partials or what they were merged to.

        Owners are the plan's for the budget's tiles, unless they are given.
        """
        return cls(
            layout,
            tuple(plan.owners(layout, ranks, budget.tile_bytes) if owners is None else owners),
            {one.uid: one.rank for one in accepted_of(result)},
            budget.tile_bytes,
            budget.tiles_per_exchange,
        )

    def __post_init__(self) -> None:
        if self.tiles_per_exchange < 1:
            raise ConfigError(
                f"tiles_per_exchange={self.tiles_per_exchange} must be at least 1; raise the "
                f"memory budget"
            )
        edges = [span for span in self.owners if len(span)]
        ends = [0, *(span.stop for span in edges)]
        starts = [*(span.start for span in edges), self.layout.size]
        if ends != starts:
            raise ConfigError(
                f"owners {[(s.start, s.stop) for s in self.owners]} do not cover the layout's "
                f"{self.layout.size} elements in order; every element has one owner"
            )
        strangers = {rank for rank in self.holders.values() if not 0 <= rank < len(self.owners)}
        if strangers:
            raise ConfigError(
                f"payloads are held by ranks {sorted(strangers)}; the group has ranks 0 to "
                f"{len(self.owners) - 1}"
            )

    @property
    def uids(self) -> list[str]:
        """All peers in the order in which they are added: by code point."""
        return sorted(self.holders)

    def rows(self, rank: int) -> list[int]:
        """The places, among all uids, of those that a rank holds."""
        return [row for row, uid in enumerate(self.uids) if self.holders[uid] == rank]

    def tiles(self, rank: int) -> list[Span]:
        """A rank's own tiles, in order."""
        own = self.owners[rank]
        return list(self.layout.tiles(self.tile_bytes, own)) if len(own) else []

    def batches(self) -> Iterator[list[list[Span]]]:
        """In each batch the next tiles of every rank; a rank may have no more."""
        step = self.tiles_per_exchange
        cut = [
            [tiles[k : k + step] for k in range(0, len(tiles), step)]
            for tiles in map(self.tiles, range(len(self.owners)))
        ]
        for batch in zip_longest(*cut, fillvalue=()):
            yield [list(tiles) for tiles in batch]


def accepted_of(result: Merged | Sequence[Partial]) -> list[Accepted]:
    """The accepted peers in the order in which they are added: by uid."""
    found = (one for part in parts_of(result) for one in part.accepted)
    return sorted(found, key=lambda one: one.uid)


def regroup(
    ranks: Collectives, turns: Turns, routes: Routes, source: SliceSource, each: Each
) -> Exception | None:
    """Gives `each` every own tile with the bytes of all peers, in the order of tiles.

    What a source or `each` raises is returned and not raised, and the exchange goes on without
    it to its end: the others wait for this rank's bytes. From then on they are zeros, which are no
    payload of anybody's: their owner stops taking tiles, without trouble of its own. The caller
    tells all ranks at the next vote.
    """
    work = _Regroup(ranks, routes, source, each)
    for batch in routes.batches():
        work.run(turns, batch)
    return work.trouble


class _Regroup:
    """One rank's part of the exchange."""

    def __init__(self, ranks: Collectives, routes: Routes, source: SliceSource, each: Each) -> None:
        self.trouble: Exception | None = None
        self._is_cut = False  # whether another rank met trouble; it will tell
        self._ranks, self._routes = ranks, routes
        self._source, self._each = source, each
        self._rows = [routes.rows(rank) for rank in range(len(routes.owners))]
        self._uids = routes.uids

    def run(self, turns: Turns, batch: list[list[Span]]) -> None:
        """Sends and takes the bytes of one batch."""
        runs = [_joined(tiles) for tiles in batch]
        sent = [self._part(run) for run in runs]
        own = runs[self._ranks.rank]
        nbytes = supports.nbytes_of(own)
        sizes = [len(rows) * nbytes for rows in self._rows]
        came = self._ranks.exchange(turns.next("gather"), sent, sizes)
        del sent  # what was sent and what is put together are never held at once
        if self.trouble is None and not self._is_cut and len(own):
            try:
                self._take(batch[self._ranks.rank], own, self._put_together(came, nbytes))
            except Exception as exc:  # whatever it is, the others must hear of it
                self.trouble = exc

    def _part(self, run: Span) -> Tensor:
        """This rank's payloads of one owner's run of tiles, one after another."""
        first, stop = (supports.CODEC.encoded_bytes(edge) for edge in (run.start, run.stop))
        mine = [self._uids[row] for row in self._rows[self._ranks.rank]]
        part = np.zeros((len(mine), stop - first), np.uint8)
        for row, uid in enumerate(mine):
            if self.trouble is not None or first == stop:
                break
            try:
                part[row] = np.frombuffer(_whole(self._source, uid, first, stop), np.uint8)
            except Exception as exc:  # whatever it is, the others must hear of it
                self.trouble = exc
        return torch.from_numpy(part.reshape(-1))

    def _put_together(self, came: Sequence[Tensor], nbytes: int) -> Bytes:
        """Rows in the order of uids, whoever sent them."""
        slices = np.empty((len(self._uids), nbytes), np.uint8)
        for rows, part in zip(self._rows, came, strict=True):
            slices[rows] = part.numpy().reshape(len(rows), nbytes)
        return slices

    def _take(self, tiles: list[Span], run: Span, slices: Bytes) -> None:
        self._is_cut = not slices.any(axis=1).all()
        if self._is_cut:
            return
        before = supports.CODEC.encoded_bytes(run.start)
        for tile in tiles:
            first, stop = (
                supports.CODEC.encoded_bytes(e) - before for e in (tile.start, tile.stop)
            )
            self._each(tile, slices[:, first:stop])


def _whole(source: SliceSource, uid: str, start: int, stop: int) -> bytes:
    """What a source reads, seen to be all of it."""
    found = source.read(uid, start, stop)
    if len(found) != stop - start:
        raise StoreError(
            f"the payload of {uid!r} gave {len(found)} bytes from {start} on where {stop - start} "
            f"belong; its spool file was cut"
        )
    return found


def _joined(tiles: Sequence[Span]) -> Span:
    return Span(tiles[0].start, tiles[-1].stop) if tiles else NOWHERE
