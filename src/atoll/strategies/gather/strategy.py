"""Gather: a synchronous run whose contributions lie in buckets and are folded by a clipped mean.

Who trains what, rounds, rows and proofs are those of synchronous DiLoCo. Contributions are sparse,
so a version travels as the contributions that make it, and every island computes it itself.
"""

from dataclasses import dataclass

from atoll.protocol.manifest import Manifest
from atoll.strategies.diloco.sync import Sync
from atoll.strategies.gather import settings


@dataclass(frozen=True)
class Gather(Sync):
    """The answers of a gather run; fulfils `base.Strategy`."""

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
