"""From a manifest's settings to the steps of a rank."""

import torch
from torch import nn

from atoll.clock import Clock
from atoll.collectives import codecs
from atoll.collectives.base import Collectives
from atoll.errors import ConfigError
from atoll.protocol.manifest import InnerSettings, Manifest
from atoll.strategies.sharded.adamw import AdamW
from atoll.strategies.sharded.engine import Engine
from atoll.strategies.sharded.shard import Shard
from atoll.strategies.sharded.step import Step


def step(
    manifest: Manifest,
    model: nn.Module,
    shard: Shard,
    collectives: Collectives,
    *,
    group: int,
    clock: Clock,
) -> Step:
    """The steps of one rank of a group; the engine takes `model` over."""
    engine = _engine(manifest, model, shard, collectives, group=group, clock=clock)
    return Step(
        engine,
        rule(manifest.inner),
        clip=manifest.inner.clip,
        onebit_warmup_steps=manifest.sharded.onebit_warmup_steps,
    )


def rule(settings: InnerSettings) -> AdamW:
    """The owners' optimizer; its learning rate is an argument of each step."""
    if settings.optimizer != "adamw":
        raise ConfigError(
            f"inner.optimizer={settings.optimizer!r} is not one of strategy 'sharded', whose ranks "
            f"step their shards by 'adamw'"
        )
    return AdamW(
        beta1=settings.beta1,
        beta2=settings.beta2,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )


def _engine(
    manifest: Manifest,
    model: nn.Module,
    shard: Shard,
    collectives: Collectives,
    *,
    group: int,
    clock: Clock,
) -> Engine:
    settings = manifest.sharded
    is_half = manifest.inner.precision == "bf16"
    # Passes in bf16 gather bf16: what fp32 would carry beyond it is not computed with.
    parameters = "fp32" if is_half and settings.parameters == "bf16" else settings.parameters
    return Engine(
        model,
        shard,
        collectives,
        group=group,
        clock=clock,
        computes=torch.bfloat16 if is_half else None,
        parameter_codec=codecs.of_parameters(parameters),
        gradient_codec=codecs.of_gradients(settings.gradients, seed=manifest.seed),
        residuals=settings.residuals,
    )
