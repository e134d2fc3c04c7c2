"""The run file of a gather: one TOML file for peers, ranks and late joiners.

The same file lies with everybody but for paths and secrets. Relative paths count from its folder.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from atoll import canonical, config
from atoll.errors import ConfigError
from atoll.gather import emit
from atoll.gather.consume import Settings as ConsumeSettings
from atoll.gather.errand import Pace
from atoll.gather.keys import PublicKey
from atoll.gather.peers import PeerList
from atoll.gather.terms import Terms
from atoll.layout import Layout
from atoll.optim.sgd import Sgd
from atoll.settings import Count, Fraction, Limit, Positive, Settings
from atoll.versions import weights_file


class ArchiveTable(Settings):
    """Where artifacts go, and whose signature they bear."""

    bucket: str
    prefix: str
    key: str  # public
    secret: str | None = None  # path of the signing key, on the machine of rank 0 alone


class GatherTable(Settings):
    """All of the file."""

    run_id: str
    start: str  # safetensors file of the weights before window 0
    state: str = "state"  # directory of this machine's weights and spools
    outer_lr: Positive
    seconds: Positive = 60.0
    patience_seconds: Positive = 10.0  # an object that is not there by then is missing
    memory_mb: Count = 256
    reserve_share: Fraction = 0.3
    overlap_skip: bool = False
    snapshot_every: Limit = 0  # windows between whole weights in the archive; 0: none
    keep_artifacts: Limit = 0  # windows that stay in the archive; 0: all
    keep: Count = 8  # windows whose objects a peer leaves in its bucket
    buckets: dict[str, str]
    archive: ArchiveTable
    primaries: list[dict[str, str]]
    reserves: list[dict[str, str]] = Field(default_factory=list)
    former: dict[str, str] = Field(default_factory=dict)  # keys, by uid, of who was a peer once
    weights: dict[str, Count] = Field(default_factory=dict)
    scores: dict[str, float] = Field(default_factory=dict)


@dataclass(frozen=True)
class GatherFile:
    """A parsed file; what it names is read when it is asked for."""

    table: GatherTable
    base: Path

    @property
    def state(self) -> Path:
        return self.base / self.table.state

    @property
    def start(self) -> Path:
        return self.base / self.table.start

    @property
    def archive_key(self) -> PublicKey:
        return PublicKey.parse(self.table.archive.key)

    def location(self, name: str) -> str:
        """The location of a bucket of the run."""
        if name not in self.table.buckets:
            known = ", ".join(sorted(self.table.buckets))
            raise ConfigError(f"bucket={name!r} is none of the run's; [buckets] has {known}")
        found = self.table.buckets[name]
        return found if ":" in found else str(self.base / found)

    @cached_property
    def layout(self) -> Layout:
        rows: Any = weights_file.tensors(self.start)
        return Layout.of((name, shape, dtype) for name, dtype, shape in rows)

    @cached_property
    def manifest_sha256(self) -> str:
        """Of all that decides the weights; a peer with another file is refused by it."""
        return canonical.sha256(
            {
                "layout": self.layout.digest,
                "outer_lr": self.table.outer_lr,
                "run_id": self.table.run_id,
                "start": emit.sha256_of(self.start),
                "weights": self.table.weights,
            }
        )

    def peers(self) -> PeerList:
        return PeerList.parse(self.table.primaries, self.table.reserves)

    def terms(self) -> Terms:
        table = self.table
        return Terms(
            run_id=table.run_id,
            manifest_sha256=self.manifest_sha256,
            layout=self.layout,
            peers=self.peers(),
            optimizer=Sgd(table.outer_lr),
            seconds=table.seconds,
            memory_bytes=table.memory_mb << 20,
            weights=table.weights,
            scores=table.scores,
            reserve_share=table.reserve_share,
            former={uid: PublicKey.parse(key) for uid, key in table.former.items()},
            pace=Pace(patience_seconds=table.patience_seconds),
            settings=ConsumeSettings(overlap_skip=table.overlap_skip),
        )


def load(path: Path) -> GatherFile:
    """Reads and checks a file; ConfigError names the field, the value and the rule."""
    table = config.table_in(path, what="gather file")
    try:
        found = GatherTable.model_validate(table)
    except ValidationError as exc:
        first = exc.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"gather file {str(path)!r}: {name}={first.get('input')!r:.100}: {first['msg']}; "
            f"docs/gather.md lists the settings"
        ) from exc
    if found.keep_artifacts and not found.snapshot_every:
        raise ConfigError(
            f"gather file {str(path)!r}: keep_artifacts={found.keep_artifacts} without "
            f"snapshot_every; artifacts go only where whole weights stand behind them"
        )
    return GatherFile(found, path.parent)
