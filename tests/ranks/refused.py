"""A rank that is refused in several ways: `refused.py FOLDER URL URL_OF_ANOTHER_PROTOCOL`.

Writes FOLDER/rank-R.json: for each case the error's class, code, sentence, and the seconds it took.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

import atoll
from atoll.data import registry as datasets
from atoll.errors import AtollError, Conflict, CoordinatorUnreachable
from atoll.island.ranks import parallel
from atoll.island.ranks.parallel import Parallel
from atoll.island.ranks.torch_group import MAX_OUTCOME_BYTES, TorchGroup
from atoll.island.run import Run
from atoll.models import registry as models

FOLDER = Path(sys.argv[1])
URL, OTHER_PROTOCOL = sys.argv[2:]


def join(url: str = URL, token: str = os.environ["ATOLL_TOKEN"]) -> Run:
    run = atoll.join(url, token=token, worker_id="island", state=FOLDER / "state")
    assert isinstance(run, Run)
    return run


def model_of(run: Run, **changes: int) -> nn.Module:
    return DistributedDataParallel(models.build({**run.manifest.model.definition, **changes}))


def load(**changes: int) -> None:
    """Ends in the refusal of a model with `changes`."""
    run = join()
    try:
        run.load(model_of(run, **changes))
    finally:
        run.release()


def other_model_of_the_follower(kind: Parallel) -> None:
    """The follower's model has another width; DDP itself sees that, so there another name."""
    run = join()
    follows = dist.get_rank() > 0
    width = {"width": 16} if follows and kind == "fsdp2" else {}
    model = models.build({**run.manifest.model.definition, **width})
    if follows and kind == "ddp":
        for name, module in list(model.named_children()):
            delattr(model, name)
            model.add_module(name.replace("tokens", "other"), module)
    spread = parallel.spread(model, kind, device=torch.device("cpu"), ranks=dist.get_world_size())
    try:
        run.load(spread)
    finally:
        run.release()


def halve(gradient: Tensor) -> None:
    gradient.div_(2)


def halved_gradients() -> None:
    """FSDP2 with a hook of the user's own, which halves what was summed."""
    run = join()
    model = parallel.spread(
        models.build(run.manifest.model.definition),
        "fsdp2",
        device=torch.device("cpu"),
        ranks=dist.get_world_size(),
    )
    assert isinstance(model, FSDPModule)
    model.set_all_reduce_hook(halve)
    try:
        run.load(model)
    finally:
        run.release()


def other_data(**of_rank: int) -> None:
    run = join()
    run.load(model_of(run))
    rows = of_rank.get(f"rank_{dist.get_rank()}", run.manifest.data.definition["rows"])
    try:
        next(run.batches(datasets.open_dataset({**run.manifest.data.definition, "rows": rows})))
    finally:
        run.release()


def unwrapped() -> None:
    run = join()
    try:
        run.load(models.build(run.manifest.model.definition))
    finally:
        run.release()


def interrupted() -> None:
    def work() -> None:
        raise KeyboardInterrupt

    TorchGroup().lead(work)


def refused_by(error: Exception) -> Callable[[], None]:
    def work() -> None:
        raise error

    return lambda: TorchGroup().lead(work)


def late() -> None:
    """The follower is elsewhere until the leader has given it up."""
    group = TorchGroup(deadline_seconds=2.0)
    try:
        if group.is_leader:
            group.lead(lambda: None)
    finally:
        dist.barrier()


def patient() -> None:
    """The leader is at work for longer than the deadline, and says so."""
    group = TorchGroup(deadline_seconds=1.5)
    found = group.lead(lambda: Event().wait(2.5) or "done")
    raise AtollError(f"the leader was {found}")


def too_long() -> None:
    TorchGroup().lead(lambda: "x" * MAX_OUTCOME_BYTES)


CASES: dict[str, Callable[[], object]] = {
    "token": lambda: join(token="another"),
    "protocol": lambda: join(url=OTHER_PROTOCOL),
    "model": lambda: load(width=16),
    "ddp model of the follower": lambda: other_model_of_the_follower("ddp"),
    "fsdp2 model of the follower": lambda: other_model_of_the_follower("fsdp2"),
    "data": lambda: other_data(rank_0=501, rank_1=501),
    "data of the follower": lambda: other_data(rank_1=501),
    "unwrapped": unwrapped,
    "halved gradients": halved_gradients,
    "interrupt": interrupted,
    "conflict": refused_by(Conflict("other bytes")),
    "unreachable": refused_by(CoordinatorUnreachable("nobody answers")),
    "foreign": refused_by(ValueError("no such thing")),
    "too long": too_long,
    "patient": patient,
    "late": late,  # the last: it leaves a group behind that has met its deadline
}


def refusal(case: Callable[[], object]) -> dict[str, Any]:
    began = time.monotonic()
    try:
        case()
    except (Exception, KeyboardInterrupt) as error:
        return {
            "type": type(error).__name__,
            "code": getattr(error, "code", ""),
            "message": str(error),
            "retry": getattr(error, "retry", None),
            "seconds": time.monotonic() - began,
        }
    return {"type": "accepted"}


def main() -> None:
    dist.init_process_group("gloo")
    DistributedDataParallel(nn.Linear(1, 1))  # loads what torch loads at first use
    found = {name: refusal(case) for name, case in CASES.items()}
    rank = dist.get_rank()
    part = FOLDER / f"part-{rank}"
    part.write_text(json.dumps(found))
    part.rename(FOLDER / f"rank-{rank}.json")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
