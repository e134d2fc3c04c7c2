"""A torchrun launch as the world of a topology: the example's steps, as it prints them."""

import json

import torch

from atoll.pools.gradcheck import loading
from examples.three_pool import top
from examples.train_three_pool import in_one
from tests import torchruns

STEPS = 4
SIZES = "ci=2,layers=1x2,ppgd=1"


def test_losses_on_processes_are_those_of_one_process(tmp_path):
    with loading.default_dtype(torch.float64):
        wanted = in_one(top, steps=STEPS).losses

    program = ["-m", "examples.train_three_pool", "--json", "--steps", str(STEPS)]
    program += ["--sizes", SIZES, "--canary-every", "2"]
    with torchruns.torchrun(program, tmp_path / "log", ranks=5) as group:
        code, log = group.wait(), group.log()

    (told,) = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert code == 0
    assert told["sizes"] == {"ci": 2, "layers": 2, "ppgd": 1}
    assert len(told["every_step"]) == STEPS
    errors = [
        abs(found[term] - loss) / abs(loss)
        for found, one in zip(told["every_step"], wanted, strict=True)
        for term, loss in one.items()
    ]
    assert max(errors) < 1e-9
    assert log.count("all rows arrived") == 2
