"""What all ranks of a group that commits by quorum agree on, from the run's settings."""

from dataclasses import dataclass

import torch

from atoll.protocol.manifest import InnerSettings, ShardedSettings
from atoll.strategies.sharded import build
from atoll.strategies.sharded.commit import Policy
from atoll.strategies.sharded.quorum.owner import Rule
from atoll.strategies.sharded.settings import check_quorum


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Of one group."""

    group: int
    version: int  # the last step that is in the shards
    policy: Policy
    rule: Rule
    micro_batches: int
    computes: torch.dtype | None = None  # of the passes; the shard's own by default


def of(
    sharded: ShardedSettings,
    inner: InnerSettings,
    *,
    group: int,
    version: int,
    size: int,
    min_workers: int,
) -> Settings:
    """ConfigError, naming the setting, for what a quorum does not do."""
    check_quorum(sharded)
    return Settings(
        group=group,
        version=version,
        policy=Policy(
            kind=sharded.commit,
            size=size,
            min_workers=min(min_workers, size),
            deadline_seconds=sharded.deadline_seconds,
        ),
        rule=Rule(build.rule(inner), inner.clip),
        micro_batches=sharded.micro_batches,
        computes=torch.bfloat16 if inner.precision == "bf16" else None,
    )
