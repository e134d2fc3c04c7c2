"""Inner training as the manifest says: the optimizer and its rate at a number of global tokens."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from atoll import torch_threads
from atoll.protocol.manifest import InnerSettings


def build_optimizer(model: nn.Module, settings: InnerSettings) -> Optimizer:
    """The inner optimizer over the model's parameters; matrices decay, vectors do not."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    decays = ((matrices, settings.weight_decay), (vectors, 0.0))
    groups = [{"params": some, "weight_decay": decay} for some, decay in decays if some]
    kind = torch.optim.SGD if settings.optimizer == "sgd" else torch.optim.AdamW
    return kind(groups, lr=settings.lr, **_options(settings))


def _options(settings: InnerSettings) -> dict[str, Any]:
    """What a kind of optimizer is told beside rate and decay."""
    if settings.optimizer == "sgd":
        return {"momentum": settings.momentum}
    return {"betas": (settings.beta1, settings.beta2), "eps": settings.eps}


def adjust(optimizer: Optimizer, settings: InnerSettings) -> None:
    """Brings a built optimizer to other settings of its kind; what it has learned stays.

    The rate is left to `set_rate`.
    """
    torch_threads.use(settings.threads)
    for group in optimizer.param_groups:
        # The group of vectors never decays; the other one is known by its matrices.
        if any(parameter.dim() >= 2 for parameter in group["params"]):
            group["weight_decay"] = settings.weight_decay
        group.update(_options(settings))


def set_rate(optimizer: Optimizer, settings: InnerSettings, *, global_tokens: int) -> None:
    """Sets the learning rate that the run has after `global_tokens`."""
    rate = settings.lr * settings.schedule.factor(global_tokens)
    for group in optimizer.param_groups:
        group["lr"] = rate
