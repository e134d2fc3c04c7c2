"""An inner optimizer's state as named tensors and plain numbers, and back; of shards, this rank's.

No pickle: tensors go to a safetensors file, everything else to JSON.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from atoll.errors import StoreError

Plain = dict[str, Any]


def flatten(optimizer: Optimizer) -> tuple[dict[str, Tensor], Plain]:
    """Tensors named `optimizer/<parameter index>/<key>`, and the numbers beside them."""
    tensors: dict[str, Tensor] = {}
    numbers: Plain = {}
    for index, entries in optimizer.state_dict()["state"].items():
        for key, value in entries.items():
            name = f"optimizer/{index}/{key}"
            if isinstance(value, Tensor):
                tensors[name] = (
                    value.to_local().contiguous() if hasattr(value, "to_local") else value
                )
            else:
                numbers[name] = value
    return tensors, numbers


def restore(optimizer: Optimizer, tensors: dict[str, Tensor], numbers: Plain) -> None:
    """Puts back what `flatten` gave; param groups (rates, decay) stay the optimizer's own."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for name, value in {**tensors, **numbers}.items():
        match name.split("/", 2):
            case ["optimizer", index, key]:
                number = int(index)
                if number >= len(parameters):
                    raise StoreError(
                        f"the checkpoint holds optimizer state of parameter {number} where the "
                        f"model has {len(parameters)}; remove the island's state directory"
                    )
                state.setdefault(number, {})[key] = _placed(value, parameters[number])
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _placed(value: Any, parameter: Tensor) -> Any:
    """Makes state of a sharded parameter a shard too; a number (the count of steps) stays one."""
    if not hasattr(parameter, "device_mesh") or not isinstance(value, Tensor) or value.dim() == 0:
        return value
    from atoll.island.ranks import fsdp2

    return fsdp2.placed(value, parameter)


def seed_random(seed: int) -> None:
    """Begins torch's random streams anew, on every device that is there."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # the same without a note, with a traceback, for every device that may come
        torch.default_generator.manual_seed(seed)


def random_state() -> dict[str, Tensor]:
    """torch's CPU random state, as a tensor of bytes."""
    return {"random/torch": torch.get_rng_state()}


def set_random_state(tensors: dict[str, Tensor]) -> None:
    """Puts back what `random_state` gave."""
    if "random/torch" in tensors:
        torch.set_rng_state(tensors["random/torch"])
