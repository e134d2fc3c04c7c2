"""A rank that probes adapters of many kinds: `probes.py FOLDER`.

Writes FOLDER/rank-R.json: for each case the error's class and sentence, or "summed", and what of
the model is not as before.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from atoll.errors import AtollError
from atoll.island.ranks.batch_slice import BatchSlice
from atoll.pools.adapters import ddp, dtensor, fsdp2, install
from atoll.pools.adapters.base import Adapter
from atoll.pools.adapters.probe import probe
from atoll.sums.partial import PartialSum

PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
DTYPES = {"fp32": torch.float32, "float64": torch.float64, "bf16": torch.bfloat16}


class Net(nn.Module):
    """With a frozen tensor, running statistics, a tensor of one row, and a tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 5)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1))
        self.body.bias.requires_grad_(False)
        self.again = self.body

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.norm(self.body(x)))
        return found


class Ignoring(Net):
    """DDP leaves one parameter out."""

    _ddp_params_and_buffers_to_ignore = ("head.0.weight",)


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(1)
    made = Net().to(dtype)
    assert made.norm.running_mean is not None
    made.norm.running_mean.fill_(float(dist.get_rank()))  # differs by rank, as in training
    return made


def sharded(
    dtype: str = "fp32", wrap: Callable[..., Any] = fully_shard, **options: Any
) -> nn.Module:
    made = net(DTYPES[dtype])
    wrap(made.head, **options)
    wrap(made, **options)
    return made


def of_factor(module: FSDPModule) -> None:
    module.set_gradient_divide_factor(1.0)


def of_sum(module: FSDPModule) -> None:
    module.set_force_sum_reduction_for_comms(True)


def set_by(model: nn.Module, *setters: Callable[[FSDPModule], None], only: str | None = None):
    for name, module in fsdp2.modules(model):
        if only is None or name == only:
            for setter in setters:
                setter(module)
    return Adapter(model)


def wrapped(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(net(), **options)


def halved(state: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined] # torch checks for this very name
    """A sum that a hook multiplies by a half."""
    bucket.buffer().mul_(0.5)
    return ddp.sum_hook((lambda _: None, state), bucket)


def unsummed(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined] # torch checks for this very name
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def hooked(hook: Callable[..., Any]) -> Adapter:
    model = wrapped()
    model.register_comm_hook(model.process_group, hook)
    return Adapter(model)


def by_rows(model: nn.Module, rows: int) -> Adapter:
    share = BatchSlice(dist.get_rank(), dist.get_world_size())
    share.slice(torch.empty(rows))
    return install.sum_gradients(model, share.scale)


def ignoring() -> Adapter:
    return ddp.sum_gradients(DistributedDataParallel(Ignoring()))


def reduced_in_bf16() -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    return sharded(mp_policy=policy)


def hybrid() -> nn.Module:
    names = ("replicate", "shard")
    return sharded(mesh=init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=names))


CASES: dict[str, Callable[[], Adapter]] = {
    "ddp": lambda: ddp.sum_gradients(wrapped()),
    "ddp, views": lambda: ddp.sum_gradients(wrapped(gradient_as_bucket_view=True)),
    "ddp, unused": lambda: ddp.sum_gradients(wrapped(find_unused_parameters=True)),
    "ddp, static": lambda: ddp.sum_gradients(wrapped(static_graph=True)),
    "ddp by rows": lambda: by_rows(wrapped(), 7),
    "ddp without rows": lambda: by_rows(wrapped(), 0),
    "ddp, default": lambda: Adapter(wrapped()),
    "ddp, default static": lambda: Adapter(wrapped(static_graph=True)),
    "ddp, halved": lambda: hooked(halved),
    "ddp, unsummed": lambda: hooked(unsummed),
    "ddp, one ignored": ignoring,
    "plain": lambda: Adapter(net()),
    "fsdp2 by rows": lambda: by_rows(sharded(), 7),
    "fsdp2, reduced in bf16": lambda: fsdp2.sum_gradients(reduced_in_bf16()),
    "replicate by rows": lambda: by_rows(sharded(wrap=replicate), 7),
    "hybrid": lambda: fsdp2.sum_gradients(hybrid()),
    "hybrid, default": lambda: Adapter(hybrid()),
}


def settings_of(dtype: str, wrap: Callable[..., Any]) -> dict[str, Callable[[], Adapter]]:
    """Which of the two setters were called, and on what."""

    def made() -> nn.Module:
        return sharded(dtype, wrap)

    name = f"{wrap.__name__} {dtype}"
    return {
        name: lambda: fsdp2.sum_gradients(made()),
        f"{name}, none": lambda: Adapter(made()),
        f"{name}, only factor": lambda: set_by(made(), of_factor),
        f"{name}, only sum": lambda: set_by(made(), of_sum),
        f"{name}, only root": lambda: set_by(made(), of_factor, of_sum, only=""),
    }


for _dtype in DTYPES:
    CASES |= settings_of(_dtype, fully_shard) | settings_of(_dtype, replicate)


class State:
    """What of a model, its gradients, hooks and optimizer must stay; hooks that must sleep."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.called: list[str] = []
        self.optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
        for number, (name, parameter) in enumerate(model.named_parameters()):
            if parameter.requires_grad and number % 2:
                parameter.grad = torch.full_like(parameter, 3.0)
            if parameter.requires_grad:
                parameter.register_hook(lambda _, n=name: self.called.append(n))
                parameter.register_post_accumulate_grad_hook(lambda _: self.optimizer.step())
        for name, module in model.named_modules():
            module.register_forward_hook(lambda *_, n=name: self.called.append(n))
        self.before = self.now()

    def now(self) -> dict[str, Any]:
        found: dict[str, Any] = {"training": self.model.training, "called": list(self.called)}
        found["state"] = len(self.optimizer.state)
        for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            grad = tensor.grad.to_local() if hasattr(tensor.grad, "to_local") else tensor.grad  # type: ignore[union-attr] # it has
            found[name] = (id(tensor), local.tolist())
            found[f"grad of {name}"] = (
                id(tensor.grad) if grad is not None else 0,
                grad is not None and grad.tolist(),
            )
            hooks = [getattr(tensor, kind) for kind in PARAMETER_HOOKS]
            found[f"hooks of {name}"] = [h and list(h.items()) for h in hooks]
        for name, module in self.model.named_modules():
            found[f"module {name}"] = {
                k: list(v.items() if isinstance(v, dict) else v) if k.endswith("_hooks") else v
                for k, v in vars(module).items()
                if k in ("forward", "_compiled_call_impl", "training", "_comm_hooks")
                or k.endswith("ward_hooks")
                or k.endswith("ward_pre_hooks")
            }
        return found

    def changed(self) -> list[str]:
        now = self.now()
        return [k for k in {**self.before, **now} if self.before.get(k) != now.get(k)]


def outcome(case: Callable[[], Adapter]) -> dict[str, Any]:
    try:
        adapter = case()
        state = State(adapter.model)
    except AtollError as error:
        return {"type": type(error).__name__, "message": str(error), "changed": []}
    try:
        probe(adapter)
    except AtollError as error:
        return {"type": type(error).__name__, "message": str(error), "changed": state.changed()}
    return {"type": "summed", "message": "", "changed": state.changed()}


def trained(model: nn.Module, *, probed: bool) -> list[list[float]]:
    """Gradients of two steps, of a model that was probed or not."""
    adapter = install.sum_gradients(model)
    if probed:
        probe(adapter)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    found = []
    for _ in range(2):
        model.zero_grad()
        model(x).square().sum().backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                grad: Any = parameter.grad
                whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
                found.append(whole.flatten().tolist())
    return found


def reduced_dtensors() -> dict[str, Any]:
    """Counted sums through DTensors, and what is refused as one."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rank = dist.get_rank()
    part = PartialSum(torch.full((2,), rank + 1.0, dtype=torch.float64), 2**24 + 1 + rank, "tokens")
    total = dtensor.reduced(part, mesh)
    back = dtensor.from_dtensor(dtensor.to_dtensor(part, mesh), count=part.count, unit=part.unit)
    refused = {}
    for placement in (Partial("avg"), Partial("max"), Replicate(), Shard(0)):
        other = DTensor.from_local(part.total, mesh, [placement], run_check=False)
        try:
            dtensor.from_dtensor(other, count=1, unit="tokens")
        except AtollError as error:
            refused[str(placement)] = f"{type(error).__name__}: {error}"
    return {
        "total": [total.total.tolist(), total.count, total.unit],
        "back": [back.total.tolist(), back.count, back.unit],
        "refused": refused,
    }


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found: dict[str, Any] = {name: outcome(case) for name, case in CASES.items()}
    ways: dict[str, Callable[[], nn.Module]] = {
        "ddp": wrapped,
        "ddp, views": lambda: wrapped(gradient_as_bucket_view=True),
        "fsdp2": sharded,
        "replicate": lambda: sharded(wrap=replicate),
    }
    same = {
        name: trained(make(), probed=True) == trained(make(), probed=False)
        for name, make in ways.items()
    }
    rank = dist.get_rank()
    part = folder / f"part-{rank}"
    part.write_text(json.dumps({"cases": found, "same": same, "dtensor": reduced_dtensors()}))
    part.rename(folder / f"rank-{rank}.json")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
