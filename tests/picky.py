"""A strategy for tests of manifest changes: what it answers, or refuses, hangs on free settings.

It takes no odd `sync_every` and no outer rate of 0.125. With a `sync_every` of 6 or more a round is
open ahead; with `weighting = "tokens"` the model has two fragments. It is installed as a
distribution of its own (`tests.distributions`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.errors import ConfigError
from atoll.layout import Layout
from atoll.protocol.manifest import Manifest
from atoll.strategies.diloco.sync import Sync


@dataclass(frozen=True)
class Picky(Sync):
    """Sync, as long as nobody changes what it is made from."""

    @classmethod
    def of(cls, manifest: Manifest) -> "Picky":
        if manifest.sync_every % 2:
            raise ConfigError(f"sync_every={manifest.sync_every} is odd; use an even one")
        if manifest.outer.lr == 0.125:
            raise ConfigError("outer.lr=0.125 is not for this strategy; use another")
        return cls(manifest)

    @property
    def lead(self) -> int:
        return int(self.manifest.sync_every >= 6)

    def cut(self, layout: Layout) -> Sequence[Sequence[str]]:
        first, *others = [tensor.name for tensor in layout.tensors]
        halves = self.manifest.weighting == "tokens"
        return [[first], others] if halves else [[first, *others]]
