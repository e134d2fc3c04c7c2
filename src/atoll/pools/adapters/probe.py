"""The probe of an adapter at start: a known gradient goes in, and its plain sum must come out.

It goes through the wrapped model's own backward pass, hook and reduction: the process group by
itself sums well while DDP on it divides. Costs one reduction of all gradients. Afterwards
parameters, buffers, gradients, hooks and optimizers are as before.
"""

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from atoll.errors import ConfigError, NotSummed
from atoll.pools.adapters import arrived, ddp, known
from atoll.pools.adapters.arrived import Arrived
from atoll.pools.adapters.base import Adapter, is_fsdp2, unwrapped

SHARES = 3  # rank r sends 1 + r % SHARES: whole numbers, whose sum bf16 holds
MOST_TOLERANCE = 0.25
NAMED = 4  # findings in one sentence


def probe(adapter: Adapter) -> None:
    """Collective over the model's ranks: NotSummed on all unless the known gradient is summed."""
    model = adapter.model
    parameters = {n: p for n, p in unwrapped(model).named_parameters() if p.requires_grad}
    if isinstance(model, DistributedDataParallel) and model.static_graph:
        return _check_hook(model)  # its graph is the first one it sees, which must be the user's
    sent = 1.0 + dist.get_rank() % SHARES
    with known.without_trace(list(parameters.values())):
        try:
            _send(model, sent)
        except RuntimeError as exc:
            if "ReduceOp" not in str(exc):  # a rank that is gone, say
                raise
            said = str(exc).splitlines()[0]
            raise NotSummed(
                f"the reduction of {_kind(model)} raises {said!r}; {_way(model)}"
            ) from exc
        found = list(_arrived(adapter, parameters, sent))
    wrong = [one for one in found if not one.is_sum()]
    if wrong:
        raise NotSummed(
            f"the gradients of {_kind(model)} are no sums: {_sentence(model, wrong)}; {_way(model)}"
        )


def _send(model: nn.Module, value: float) -> None:
    if isinstance(model, DistributedDataParallel):
        known.through_ddp(model, value)
    elif is_fsdp2(model):
        from atoll.pools.adapters import known_fsdp2

        known_fsdp2.through(model, value)
    else:
        raise ConfigError(
            "the model is neither wrapped in DistributedDataParallel nor had fully_shard applied "
            "to it, so there is nothing to probe; use adapters.install.sum_gradients"
        )


def _check_hook(model: DistributedDataParallel) -> None:
    if not any(hook is ddp.sum_hook for hook, _ in model._comm_hooks):
        raise NotSummed(
            f"the gradients of {_kind(model)} with a static graph are reduced by another hook than "
            f"sum_hook, DDP's own divides by the number of ranks; {_way(model)}"
        )


def _arrived(
    adapter: Adapter, parameters: dict[str, nn.Parameter], sent: float
) -> Iterator[Arrived]:
    """Collective: each parameter's gradient against the sum of what the ranks sent."""
    for groups, names in _routes(adapter.model, parameters).items():
        device = parameters[names[0]].device
        mine = torch.tensor([sent], dtype=torch.float64, device=device)
        adapter.scale(mine)
        total, ranks = _gathered(float(mine), groups, device)
        if total == 0.0:
            raise ConfigError(
                "the adapter's scale makes the gradient of every rank zero, so nothing can be "
                "seen of its sum; probe it with a scale that counts rows"
            )
        rows = [arrived.compared(_local(parameters[n].grad), float(mine), total) for n in names]
        least = torch.tensor(rows, dtype=torch.float64, device=device)
        for group in groups:
            dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
        eps = _eps(adapter.model, parameters[names[0]].dtype)
        tolerance = min(2 * ranks * eps, MOST_TOLERANCE)
        for name, (low, minus_high, own, is_there) in zip(names, least.tolist(), strict=True):
            yield Arrived(name, low, -minus_high, own > 0, is_there > 0, ranks, tolerance)


def _local(gradient: Tensor | None) -> Tensor | None:
    found: Tensor | None = getattr(gradient, "to_local", lambda: gradient)()
    return found


def _routes(
    model: nn.Module, parameters: dict[str, nn.Parameter]
) -> dict[tuple[dist.ProcessGroup, ...], list[str]]:
    """The names of parameters by the groups that their gradients cross."""
    if isinstance(model, DistributedDataParallel):
        return {(model.process_group,): list(parameters)}
    found: dict[tuple[dist.ProcessGroup, ...], list[str]] = {}
    for name, parameter in parameters.items():
        groups = tuple(parameter.device_mesh.get_all_groups())  # type: ignore[attr-defined] # a DTensor
        found.setdefault(groups, []).append(name)
    return found


def _gathered(
    value: float, groups: tuple[dist.ProcessGroup, ...], device: torch.device
) -> tuple[float, int]:
    """The sum of all ranks' values and their number; gathered, so that no reduction is trusted."""
    ranks = 1
    for group in groups:
        own = torch.tensor([value], dtype=torch.float64, device=device)
        everyones = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyones, own, group=group)
        value, ranks = math.fsum(float(one) for one in everyones), ranks * len(everyones)
    return value, ranks


def _eps(model: nn.Module, dtype: torch.dtype) -> float:
    narrowest = dtype
    if not isinstance(model, DistributedDataParallel):
        from atoll.pools.adapters import known_fsdp2

        narrowest = known_fsdp2.reduce_dtype(model) or dtype
    return max(torch.finfo(dtype).eps, torch.finfo(narrowest).eps)


def _sentence(model: nn.Module, wrong: list[Arrived]) -> str:
    """The findings by module, the first few of them."""
    modules: dict[str, str] = {}
    if not isinstance(model, DistributedDataParallel):
        from atoll.pools.adapters import known_fsdp2

        modules = known_fsdp2.owners(model)
    by: dict[tuple[str, str], list[str]] = {}
    for one in wrong:
        by.setdefault((modules.get(one.name, ""), one.verdict()), []).append(one.name)
    said = [f"{_listed(module, names)}: {verdict}" for (module, verdict), names in by.items()]
    rest = f" (and {len(said) - NAMED} more modules)" if len(said) > NAMED else ""
    return ", ".join(said[:NAMED]) + rest


def _listed(module: str, names: list[str]) -> str:
    place = f"in module {module!r} " if module else ""
    return f"{place}{names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _kind(model: nn.Module) -> str:
    return "DDP" if isinstance(model, DistributedDataParallel) else "FSDP2"


def _way(model: nn.Module) -> str:
    if isinstance(model, DistributedDataParallel):
        return "register the SUM hook with adapters.ddp.sum_gradients(model)"
    return (
        "set divide factor 1 and forced SUM on every FSDP module, since setters do not recurse: "
        "adapters.fsdp2.sum_gradients(model) does"
    )
