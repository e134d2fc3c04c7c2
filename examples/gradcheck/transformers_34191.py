"""huggingface/transformers #34191 (and #24725): accumulation averages the means of micro-batches.

Micro-batches of few tokens weigh as much as those of many. One rank is enough.
"""

from torch import nn

from atoll.pools.counted import Counted
from atoll.pools.loop import Loop
from examples.gradcheck import sample

loop = Loop(rows=12, ranks=(1, 2))
loop.model(sample.net)
loop.rows(sample.batch)

STEPS = 3


@loop.term()
def nll(model: nn.Module, rows: sample.Rows) -> Counted:
    return Counted(*sample.nll(model, rows), "tokens")


@loop.step
def step(model: nn.Module, rows: sample.Rows, coeffs: dict[str, float]) -> None:
    share = sample.over_ranks(1) * STEPS
    for micro in sample.micro_batches(rows, STEPS):
        total, count = sample.nll(model, micro)
        (coeffs["nll"] * total / count / share).backward()
    sample.sum_over_ranks(model)
