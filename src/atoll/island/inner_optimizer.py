"""Inner training as the manifest says: the optimizer and its rate at a number of global tokens."""

import torch
from torch import nn
from torch.optim import Optimizer

from atoll import torch_threads
from atoll.protocol.manifest import InnerSettings


def build_optimizer(model: nn.Module, settings: InnerSettings) -> Optimizer:
    """The inner optimizer over the model's parameters; matrices decay, vectors do not."""
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum)
    return torch.optim.AdamW(
        groups, lr=settings.lr, betas=(settings.beta1, settings.beta2), eps=settings.eps
    )


def adjust(optimizer: Optimizer, settings: InnerSettings) -> None:
    """Brings a built optimizer to other settings of its kind; what it has learned stays.

    The rate is left to `set_rate`.
    """
    torch_threads.use(settings.threads)
    for group in optimizer.param_groups:
        # The group of vectors never decays; the other one is known by its matrices.
        if any(parameter.dim() >= 2 for parameter in group["params"]):
            group["weight_decay"] = settings.weight_decay
        if settings.optimizer == "sgd":
            group["momentum"] = settings.momentum
        else:
            group["betas"], group["eps"] = (settings.beta1, settings.beta2), settings.eps


def set_rate(optimizer: Optimizer, settings: InnerSettings, *, global_tokens: int) -> None:
    """Sets the learning rate that the run has after `global_tokens`."""
    rate = settings.lr * settings.schedule.factor(global_tokens)
    for group in optimizer.param_groups:
        group["lr"] = rate
