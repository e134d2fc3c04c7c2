"""An inner optimizer's state, taken apart and put back."""

import json
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from atoll.errors import StoreError
from atoll.island.state import optimizer_state

MAKERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": lambda model: AdamW(model.parameters(), lr=0.01),
    "sgd": lambda model: SGD(model.parameters(), lr=0.01),
    "sgd momentum": lambda model: SGD(model.parameters(), lr=0.01, momentum=0.9),
    "adamw groups": lambda model: AdamW(
        [{"params": [p], "weight_decay": 0.1} for p in model.parameters()], lr=0.01
    ),
}


def model() -> nn.Module:
    made = nn.Linear(4, 3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) / 10)
    return made


def train(made: nn.Module, optimizer: Optimizer, steps: range) -> torch.Tensor:
    for step in steps:
        optimizer.zero_grad()
        made(torch.full((2, 4), 1.0 + step)).square().sum().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in made.parameters()])


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_restored_optimizer_goes_on_as_if_it_had_paused(make):
    straight = model()
    expected = train(straight, make(straight), range(6))
    first = model()
    earlier = make(first)
    train(first, earlier, range(3))
    tensors, numbers = optimizer_state.flatten(earlier)
    kept = {name: tensor.clone() for name, tensor in tensors.items()}

    second = model()
    second.load_state_dict(first.state_dict())
    later = make(second)
    optimizer_state.restore(later, kept, json.loads(json.dumps(numbers)))
    found = train(second, later, range(3, 6))

    assert torch.equal(found, expected)


def test_optimizer_that_was_not_restored_goes_elsewhere():
    """The control of the claim above: the state matters."""
    straight = model()
    expected = train(straight, AdamW(straight.parameters(), lr=0.01), range(6))
    first = model()
    train(first, AdamW(first.parameters(), lr=0.01), range(3))

    found = train(first, AdamW(first.parameters(), lr=0.01), range(3, 6))

    assert not torch.equal(found, expected)


def test_rates_stay_the_optimizers_own():
    """The schedule sets them from the run's tokens; a checkpoint does not bring an old one back."""
    made = model()
    earlier = AdamW(made.parameters(), lr=0.5)
    train(made, earlier, range(1))
    tensors, numbers = optimizer_state.flatten(earlier)
    later = AdamW(made.parameters(), lr=0.01)

    optimizer_state.restore(later, tensors, numbers)

    assert later.param_groups[0]["lr"] == 0.01


def test_state_of_a_larger_model_is_refused_by_number():
    made = model()
    earlier = AdamW(made.parameters(), lr=0.01)
    train(made, earlier, range(1))
    tensors, numbers = optimizer_state.flatten(earlier)
    smaller = AdamW(nn.Linear(4, 3, bias=False).parameters(), lr=0.01)

    with pytest.raises(StoreError, match="state of parameter 1 where the model has 1"):
        optimizer_state.restore(smaller, tensors, numbers)


def test_other_tensors_of_a_checkpoint_are_left_alone():
    optimizer = AdamW(model().parameters(), lr=0.01)

    optimizer_state.restore(
        optimizer, {"random/torch": torch.zeros(3), "residual": torch.ones(2)}, {}
    )

    assert len(optimizer.state) == 0


def test_random_state_continues_its_stream():
    torch.manual_seed(5)
    torch.rand(3)
    saved = optimizer_state.random_state()
    expected = torch.rand(4)

    torch.manual_seed(99)
    optimizer_state.set_random_state(saved)

    assert torch.equal(torch.rand(4), expected)


def test_checkpoint_without_random_state_leaves_the_stream_alone():
    torch.manual_seed(5)
    expected = torch.rand(4)

    torch.manual_seed(5)
    optimizer_state.set_random_state({})

    assert torch.equal(torch.rand(4), expected)
