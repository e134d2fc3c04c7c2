"""Gather: a synchronous run whose contributions lie in buckets and are folded by a clipped mean.

Who trains what, rounds, rows and proofs are those of synchronous DiLoCo. Contributions are sparse,
so a version travels as the contributions that make it, and every island computes it itself.

What computes is imported when it is asked for: all that is imported is compiled in a large run.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.layout import Layout
from atoll.protocol.manifest import Manifest
from atoll.strategies.bundle import Bundle
from atoll.strategies.gather import settings
from atoll.strategies.gather.closing import ByPull
from atoll.wire.header import FrameHeader

if TYPE_CHECKING:
    from atoll.strategies.gather.step import ClippedMean


@dataclass(frozen=True)
class Gather(ByPull):
    """The answers of a gather run; fulfils `base.Strategy`."""

    gathers = True
    follows = True  # versions are small, so whoever is behind takes those in between

    @property
    def fixed(self) -> tuple[str, ...]:  # type: ignore[override]  # a class variable in Sync
        """Workers are recorded with the name of their bucket: none changes or goes."""
        return tuple(
            f"gather.buckets.{name}.{key}"
            for name, bucket in self.manifest.gather.buckets.items()
            for key in type(bucket).model_fields
        )

    @classmethod
    def of(cls, manifest: Manifest) -> "Gather":
        """Refuses settings of other strategies, and those that do not go together, by name."""
        settings.check(manifest)
        return cls(manifest)

    def bundle(self, layout: Layout, contributions: int) -> Bundle | None:
        from atoll.strategies.gather.artifact import ArtifactFormat

        found = ArtifactFormat(layout, contributions)
        return found if found.fits else None

    def bundle_in(self, header: FrameHeader, layout: Layout) -> Bundle | None:
        from atoll.strategies.gather.artifact import ArtifactFormat

        return ArtifactFormat.of(header, layout)

    def outer(self, round_number: int, ticks_before: int) -> "ClippedMean":
        from atoll.strategies.gather.step import ClippedMean

        return ClippedMean(
            optimizer=self.manifest.outer.build(),
            download=self.manifest.download.build(),
            noise=None,
            step=round_number,
        )
