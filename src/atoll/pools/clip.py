"""Clipping by the norm of all distinct parameters, whoever keeps them."""

import math

import torch

from atoll.pools.engine import Engine

_EPSILON = 1e-6  # torch's own, so that the factor is the same


def grad_norm(engine: Engine) -> float:
    """The 2-norm of the whole model's gradient; called by all ranks after a step.

    Only the first replica of each block adds its squares, so every parameter counts once. Dividing
    by the number of replicas would give the same and put a pool's size back into a number.
    """
    return math.sqrt(_squares(engine))


def clip_grad_norm(engine: Engine, max_norm: float) -> float:
    """Scales all gradients down to `max_norm`, as torch does in one process; the norm before."""
    norm = grad_norm(engine)
    factor = max_norm / (norm + _EPSILON)
    if not factor >= 1.0:  # so that NaN spreads, as it does in torch
        for parameter in engine.owned().values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
    return norm


def _squares(engine: Engine) -> float:
    total = torch.zeros(1, dtype=torch.float64)
    if engine.seat.is_first:
        for parameter in engine.owned().values():
            if parameter.grad is not None:
                total += parameter.grad.double().square().sum()
    engine.desk.world.all_reduce(engine.next_key(), total).wait()
    return float(total)
