"""What the contributions of a round count with: norms, from them factors, and weights."""

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.compiled.arrays import Floats
from atoll.errors import EmptySum
from atoll.gather import clip, supports, update
from atoll.gather.norms import Norms
from atoll.layout import TILE_BYTES, Layout
from atoll.strategies.outer import DisplacementSource


@dataclass(frozen=True, eq=False)
class Clipped:
    """What a round's contributions count with; rows in their order, by worker_id."""

    layout: Layout
    squares: tuple[tuple[float, ...], ...]  # norm^2 of each parameter, fp64
    factors: Floats  # [contributions, parameters]
    weights: tuple[int, ...]

    @classmethod
    def of(cls, layout: Layout, sources: Sequence[DisplacementSource]) -> "Clipped":
        """Reads every payload once, tile by tile; FrameError for one that no encoder writes."""
        if not sources:
            raise EmptySum("no contribution was accepted for this round; the model is unchanged")
        weights = tuple(source.weight for source in sources)
        update.check_weights(weights)
        squares = tuple(_squares(layout, source) for source in sources)
        return cls(layout, squares, clip.factors(squares), weights)


def _squares(layout: Layout, source: DisplacementSource) -> tuple[float, ...]:
    """norm^2 of each parameter of a contribution, fp64."""
    norms = Norms(layout, supports.CODEC)
    for span in layout.tiles(TILE_BYTES):
        norms.add(span, source.raw(span))
    return norms.squares()
