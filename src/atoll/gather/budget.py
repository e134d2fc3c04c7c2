"""How a setting, a number of bytes, is shared out between downloads, tiles and exchanges.

Counts what grows with the settings; libraries, compiled loops and a rank's own tiles of the model
are above it. The largest shares that fit are taken; a budget that fits nothing is refused.
"""

from dataclasses import dataclass
from typing import Self

from atoll.blobs.bucket import PIECE_BYTES
from atoll.codecs.base import Codec
from atoll.errors import ConfigError
from atoll.gather import places
from atoll.layout import ELEMENT_BYTES, GROUP_ELEMENTS, TILE_BYTES, Layout

SLOTS = 8  # downloads at a time; more only crowd one link
TILES_PER_EXCHANGE = 16
_GROUP_BYTES = GROUP_ELEMENTS * ELEMENT_BYTES
# Of a slot: a piece, the same on its way through a client, and what checks it.
_PIECES = 3
# A tile's mean, its sums of weights (8 bytes each), what the weights would become, and scratch.
_TILES = 6
# Of a peer: the places and codes of a tile, 5 bytes for each of 1 in 64; and bits of some chunks.
_PLACE_BYTES, _BITS_BYTES = 5, 24 << 10
# Slices of all peers: read, joined with their stamps, received, and put in uid order.
_COPIES = 4
# A peer's norms: 8 bytes, their text (25 at most) on its way out and in, and as Python has them.
_NORM_BYTES = 8 + 2 * 25 + 32
_PEER_BYTES = 4 << 10  # its statement, tags and names


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """The shares of one rank's memory."""

    slots: int  # quick peers downloaded at a time, and twice as many slow ones beside them
    piece_bytes: int  # most of an object that is asked for at a time
    tile_bytes: int  # of a tile as fp32
    tiles_per_exchange: int

    @classmethod
    def of(cls, memory_bytes: int, *, peers: int, ranks: int, layout: Layout, codec: Codec) -> Self:
        """The largest shares within `memory_bytes` for so many peers (primaries and reserves).

        ConfigError with the number needed where not even the smallest fit.
        """
        if peers < 0 or ranks < 1:
            raise ConfigError(f"peers={peers}, ranks={ranks}: there is nobody to share memory")
        smallest = cls(
            slots=1, piece_bytes=PIECE_BYTES, tile_bytes=_GROUP_BYTES, tiles_per_exchange=1
        )
        needed = smallest.needs(peers=peers, ranks=ranks, layout=layout, codec=codec)
        if memory_bytes < needed:
            raise ConfigError(
                f"memory_bytes={memory_bytes} is too small for {peers} peers of "
                f"{len(layout.tensors)} tensors and {ranks} ranks; it needs at least {needed}"
            )
        tiles = [TILE_BYTES >> k for k in range(4) if TILE_BYTES >> k >= _GROUP_BYTES]
        choices = (
            cls(slots=slots, piece_bytes=PIECE_BYTES, tile_bytes=tile, tiles_per_exchange=count)
            for slots in (SLOTS, 4, 2, 1)
            for tile in tiles
            for count in (TILES_PER_EXCHANGE, 8, 4, 2, 1)
        )
        return next(
            one
            for one in choices
            if one.needs(peers=peers, ranks=ranks, layout=layout, codec=codec) <= memory_bytes
        )

    def needs(self, *, peers: int, ranks: int, layout: Layout, codec: Codec) -> int:
        """The most bytes that these shares take: fetching and updating do not overlap."""
        fetching = places.WIDTH * self.slots * _PIECES * self.piece_bytes
        fetching += places.MOST_TRIALS * _PIECES * places.FIRST_PIECE_BYTES
        elements = self.tile_bytes // ELEMENT_BYTES
        slices = peers * codec.encoded_bytes(elements)
        sparse = peers * (_PLACE_BYTES * elements // 64 + _BITS_BYTES)
        # A rank sends tiles of every owner at a time, and receives its own of all peers.
        batch = _COPIES * slices * self.tiles_per_exchange * (2 if ranks > 1 else 1)
        updating = _TILES * self.tile_bytes + sparse + batch
        held = peers * (_PEER_BYTES + _NORM_BYTES * len(layout.tensors))
        return held + max(fetching, updating)
