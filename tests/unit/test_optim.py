import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

# The functions behind torch.optim.SGD and Adam: the classes load dynamo, which takes 1.4 s.
from torch.optim.adam import adam as torch_adam
from torch.optim.sgd import sgd as torch_sgd

from atoll.errors import ConfigError, LayoutMismatch
from atoll.optim import adam
from atoll.optim.adam import Adam
from atoll.optim.base import OuterOptimizer
from atoll.optim.delayed_nesterov import DelayedNesterov
from atoll.optim.nesterov import Nesterov
from atoll.optim.settings import OuterSettings
from atoll.optim.sgd import Sgd

EPS = float(torch.finfo(torch.float32).eps)
STEPS = 60
SIZE = 257

# No deadline and no health check of speed: a busy machine must not fail a claim about values.
quick = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)

OPTIMIZERS: list[OuterOptimizer] = [
    Sgd(0.3),
    Nesterov(0.7, 0.9),
    Nesterov(1.0, 0.0),
    DelayedNesterov(0.7, 0.9, delay=3),
    Adam(0.01, 0.9, beta2=0.99, eps=1e-8),
]
every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)


# MKL's root, in torch's Adam, would wake its threads for 257 values: 2 s on a busy machine.
pytestmark = pytest.mark.usefixtures("one_thread")


def values(key: int, size: int = SIZE) -> Tensor:
    """Random integers times random powers of two, out of the raw words of Philox."""
    words = np.random.Philox(key=key).random_raw(size)
    mantissas = (words >> np.uint64(40)).astype(np.float64) - 2**23
    exponents = (words % np.uint64(12)).astype(np.int32) - 32
    return torch.from_numpy(np.ldexp(mantissas, exponents).astype(np.float32))


def bits(*tensors: Tensor) -> bytes:
    return b"".join(tensor.numpy().tobytes() for tensor in tensors)


def train(
    optimizer: OuterOptimizer, *, steps: int, sizes: list[int]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weights and state after `steps` rounds, computed in tiles of `sizes`."""
    params, state = values(7), optimizer.init(SIZE)
    for step in range(1, steps + 1):
        starts = np.cumsum([0, *sizes]).tolist()
        for start, size in zip(starts, sizes, strict=False):
            tile = slice(start, start + size)
            views = {slot: buffer[tile] for slot, buffer in state.items()}
            optimizer.update(params[tile], values(100 + step)[tile].clone(), views, step=step)
    return params, state


# --- against torch.optim ---


@dataclass(frozen=True)
class Reference:
    """What torch computes, and how far a correct fp32 result may be from it."""

    params: Tensor
    momentum: Tensor
    bound: Tensor

    def agrees_with(self, ours: Tensor) -> bool:
        return bool(((ours.double() - self.params.double()).abs() <= self.bound).all())


def follow_torch_sgd(lr: float, momentum: float) -> Reference:
    """torch.optim.SGD in fp32.

    The momentum buffers are equal. Each side rounds mu*m, g + mu*m, lr*(...) and p - ... at most
    once a step, so the two part by at most 2 * (eps/2) * (|p| + 3*lr*(|g| + mu*|m|)) a step; a
    fourth term covers the higher orders. Gradients do not depend on p, hence the parts add up.
    """
    params, buffer = values(7), torch.zeros(SIZE)
    buffers: list[Tensor | None] = [buffer]
    bound = torch.zeros(SIZE, dtype=torch.float64)
    for step in range(1, STEPS + 1):
        gradient = values(100 + step)
        torch_sgd(
            [params],
            [gradient],
            buffers,
            weight_decay=0.0,
            momentum=momentum,
            lr=lr,
            dampening=0.0,
            nesterov=momentum > 0,
            maximize=False,
            foreach=False,
        )
        moved = lr * (gradient.double().abs() + momentum * buffer.double().abs())
        bound += EPS * (params.double().abs() + 4 * moved)
    return Reference(params, buffer, bound)


def follow_torch_adam(optimizer: Adam) -> Reference:
    """torch.optim.Adam in fp64.

    u = eps/2. A moment takes at most 3 roundings a step (the decay as fp32, its product, the sum),
    so after t steps m errs by (3t + 2)*u*M, M the same average of |g|, and v by (3t + 4)*u*v. Root,
    correction, eps, step size, product, quotient and their constants add less than 13*u: one update
    errs by at most (4.5t + 15)*u * step_size * M / denominator; a sixteenth covers higher orders.
    """
    lr, beta1, beta2, eps = optimizer.lr, optimizer.beta1, optimizer.beta2, optimizer.eps
    params = values(7).double()
    first, second, count = torch.zeros_like(params), torch.zeros_like(params), torch.tensor(0.0)
    magnitude, bound = torch.zeros_like(params), torch.zeros_like(params)
    for step in range(1, STEPS + 1):
        gradient = values(100 + step).double()
        torch_adam(
            [params],
            [gradient],
            [first],
            [second],
            [],
            [count],
            foreach=False,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=0.0,
            eps=eps,
            maximize=False,
        )
        magnitude = beta1 * magnitude + (1 - beta1) * gradient.abs()
        denominator = (second / (1 - beta2**step)).sqrt() + eps
        moved = lr / (1 - beta1**step) * magnitude / denominator
        bound += EPS / 2 * (params.abs() + (4.5 * step + 16) * moved)
    return Reference(params, first, bound)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("lr", [0.1, 0.7, 1.0])
def test_nesterov_follows_torch_sgd(lr, momentum):
    reference = follow_torch_sgd(lr, momentum)

    ours, _ = train(Nesterov(lr, momentum), steps=STEPS, sizes=[SIZE])

    assert reference.agrees_with(ours)


def test_nesterov_keeps_the_momentum_of_torch_sgd():
    reference = follow_torch_sgd(0.7, 0.9)

    _, state = train(Nesterov(0.7, 0.9), steps=STEPS, sizes=[SIZE])

    assert bits(state["momentum"]) == bits(reference.momentum)


@pytest.mark.parametrize("lr", [0.1, 0.7, 1.0])
def test_sgd_follows_torch_sgd(lr):
    reference = follow_torch_sgd(lr, 0.0)

    ours, _ = train(Sgd(lr), steps=STEPS, sizes=[SIZE])

    assert reference.agrees_with(ours)


@pytest.mark.parametrize(
    "optimizer",
    [
        Adam(0.01, 0.9, beta2=0.999, eps=1e-8),
        Adam(0.3, 0.5, beta2=0.95, eps=1e-3),
        Adam(1.0, 0.0, beta2=0.0, eps=1e-8),
    ],
    ids=str,
)
def test_adam_follows_torch_adam(optimizer):
    reference = follow_torch_adam(optimizer)

    ours, _ = train(optimizer, steps=STEPS, sizes=[SIZE])

    assert reference.agrees_with(ours)


def test_reference_notices_a_learning_rate_that_is_off_by_a_ten_thousandth():
    reference = follow_torch_sgd(0.7, 0.9)

    ours, _ = train(Nesterov(0.7 * (1 + 1e-4), 0.9), steps=STEPS, sizes=[SIZE])

    assert not reference.agrees_with(ours)


# --- the step itself ---


def test_sgd_with_lr_one_moves_the_base_to_the_mean_of_the_islands():
    base = torch.tensor([1.0, 2.0])
    islands = torch.tensor([[0.5, 2.5], [0.0, 3.0]])
    displacement = (base - islands).mean(0)

    Sgd(1.0).update(base, displacement, {}, step=1)

    assert base.tolist() == islands.mean(0).tolist()


def test_nesterov_looks_ahead_by_one_momentum():
    params, state = torch.tensor([1.0]), {"momentum": torch.tensor([2.0])}

    Nesterov(0.5, 0.25).update(params, torch.tensor([1.0]), state, step=2)

    # m = 0.25*2 + 1 = 1.5; p = 1 - 0.5*(1 + 0.25*1.5)
    assert (state["momentum"].item(), params.item()) == (1.5, 0.3125)


def test_adam_moves_by_the_learning_rate_on_its_first_step():
    params = torch.tensor([0.0, 0.0])
    optimizer = Adam(0.5, 0.9, beta2=0.999, eps=1e-8)

    optimizer.update(params, torch.tensor([3.0, -0.01]), optimizer.init(2), step=1)

    assert params.tolist() == pytest.approx([-0.5, 0.5], rel=1e-5)


def test_adam_stays_where_no_gradient_ever_came():
    params, optimizer = torch.tensor([2.0]), Adam(0.5, 0.9, beta2=0.999, eps=1e-8)

    optimizer.update(params, torch.zeros(1), optimizer.init(1), step=1)

    assert params.item() == 2.0


@every_optimizer
@quick
@given(cuts=st.lists(st.integers(1, SIZE - 1), max_size=6))
def test_update_gives_the_same_bits_for_any_tile_size(optimizer, cuts):
    sizes = np.diff([0, *sorted(set(cuts)), SIZE]).tolist()

    whole, whole_state = train(optimizer, steps=3, sizes=[SIZE])
    tiled, tiled_state = train(optimizer, steps=3, sizes=sizes)

    assert bits(tiled, *tiled_state.values()) == bits(whole, *whole_state.values())


@every_optimizer
def test_update_moves_only_its_own_tile(optimizer):
    params, state = values(7), optimizer.init(SIZE)
    tile = slice(10, 20)
    views = {slot: buffer[tile] for slot, buffer in state.items()}

    optimizer.update(params[tile], values(8)[tile].clone(), views, step=1)

    rest = torch.cat([params[:10], params[20:]])
    assert bits(rest) == bits(torch.cat([values(7)[:10], values(7)[20:]]))
    assert all(not buffer[:10].any() and not buffer[20:].any() for buffer in state.values())


@every_optimizer
def test_init_gives_a_buffer_of_zeros_for_each_slot(optimizer):
    state = optimizer.init(5)

    assert tuple(state) == optimizer.slots
    assert all(bits(buffer) == bytes(20) for buffer in state.values())


# --- the scalar and root kernels ---


@quick
@given(st.floats(0.0, 1.0, exclude_max=True), st.integers(0, 5000))
def test_power_is_exact_to_double_precision(factor, exponent):
    # Squaring takes at most 2*log2(n) multiplies on the way to each factor; an error made early
    # is raised to the remaining power, so the relative error is below n * 2^-53, n >= 1.
    exact = Fraction(factor) ** exponent if factor > 0.5 else Fraction(factor**exponent)

    error = abs(Fraction(adam.power(factor, exponent)) - exact)

    assert error <= exact * max(exponent, 1) * Fraction(2) ** -52 + Fraction(2) ** -1000


def test_root_is_rounded_as_ieee_asks():
    # Rounding a float64 root to float32 gives the correctly rounded root (53 >= 2 * 24 + 2).
    squares = values(5, 200_000).abs()
    expected = np.sqrt(squares.numpy().astype(np.float64)).astype(np.float32)

    root = adam.root(squares, out=torch.empty(200_000))

    assert bits(root) == expected.tobytes()


# --- delayed Nesterov, against its definition in exact arithmetic ---


def exact_delayed_nesterov(*, steps: int, delay: int) -> tuple[Tensor, Tensor]:
    """Weights in float64, and how far an fp32 result may be from them.

    The mean of each group of `delay` gradients is one Nesterov step, and what is left of a group
    moves the weights alone. A step rounds at most four times, a release four times more, each by
    eps/2 of what it has in hand: at most |p| or twice the sum of |g| and |m| so far.
    """
    lr, mu = float(np.float32(0.7)), float(np.float32(0.9))
    params, momentum = values(7).double(), torch.zeros(SIZE, dtype=torch.float64)
    gradients = [values(100 + step).double() for step in range(1, steps + 1)]
    size = params.abs()
    for first in range(0, steps, delay):
        group = gradients[first : first + delay]
        params = params - lr * sum(group, torch.zeros(SIZE, dtype=torch.float64)) / delay
        if len(group) == delay:
            momentum = mu * momentum + torch.stack(group).mean(0)
            params = params - lr * mu * momentum
        size = size + 2 * (torch.stack(group).abs().sum(0) + momentum.abs())
    return params, 8 * steps * (EPS / 2) * size


@pytest.mark.parametrize("delay", [1, 2, 3, 7])
@pytest.mark.parametrize("steps", [1, 6, 20])
def test_delayed_nesterov_is_one_nesterov_step_for_each_group(delay, steps):
    expected, bound = exact_delayed_nesterov(steps=steps, delay=delay)

    ours, _ = train(DelayedNesterov(0.7, 0.9, delay=delay), steps=steps, sizes=[SIZE])

    assert bool(((ours.double() - expected).abs() <= bound).all())


def test_delayed_nesterov_with_a_delay_of_one_is_nesterov():
    ours, mine = train(DelayedNesterov(0.7, 0.9, delay=1), steps=STEPS, sizes=[SIZE])
    theirs, state = train(Nesterov(0.7, 0.9), steps=STEPS, sizes=[SIZE])

    assert torch.equal(mine["momentum"], state["momentum"])
    assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_momentum_moves_only_when_a_group_is_complete():
    optimizer = DelayedNesterov(0.7, 0.9, delay=3)

    _, after_two = train(optimizer, steps=2, sizes=[SIZE])
    _, after_three = train(optimizer, steps=3, sizes=[SIZE])

    assert not after_two["momentum"].any() and after_two["buffer"].any()
    assert after_three["momentum"].any() and not after_three["buffer"].any()


# --- refusals ---


def refused(**told: object) -> str:
    with pytest.raises(ValidationError) as error:
        OuterSettings.model_validate(told)
    return ".".join(str(part) for part in error.value.errors()[0]["loc"])


@pytest.mark.parametrize("lr", [0.0, -0.1, 100.1, math.inf, math.nan, True, "1"])
@pytest.mark.parametrize("name", ["sgd", "nesterov", "delayed_nesterov", "adam"])
def test_settings_refuse_a_learning_rate_out_of_range(name, lr):
    assert refused(optimizer=name, lr=lr) == "lr"


@pytest.mark.parametrize("decay", [1.0, -0.1, math.nan, False])
@pytest.mark.parametrize(
    ("name", "setting"), [("nesterov", "momentum"), ("adam", "beta1"), ("adam", "beta2")]
)
def test_settings_refuse_a_decay_outside_its_range(name, setting, decay):
    assert refused(optimizer=name, **{setting: decay}) == setting


@pytest.mark.parametrize("delay", [0, -1, 2**24 + 1, 2.5, True])
def test_settings_refuse_a_delay_that_counts_nothing(delay):
    assert refused(optimizer="delayed_nesterov", delay=delay) == "delay"


@pytest.mark.parametrize("eps", [0.0, -1e-8, math.nan, 1e-46])
def test_settings_refuse_an_eps_that_vanishes_in_fp32(eps):
    assert refused(optimizer="adam", eps=eps) == "eps"


@every_optimizer
def test_update_refuses_a_step_below_one(optimizer):
    with pytest.raises(ConfigError, match="step=0; outer steps count from 1"):
        optimizer.update(torch.zeros(2), torch.zeros(2), optimizer.init(2), step=0)


@every_optimizer
@pytest.mark.parametrize("gradient", [torch.ones(1), torch.ones(2).double()], ids=["one", "double"])
def test_update_refuses_a_gradient_that_is_no_tile_of_the_params(optimizer, gradient):
    params = torch.zeros(2)

    with pytest.raises(LayoutMismatch, match="'gradient' of shape"):
        optimizer.update(params, gradient, optimizer.init(2), step=1)

    assert params.tolist() == [0.0, 0.0]


def test_update_refuses_a_state_of_another_size_by_its_slot():
    optimizer = Nesterov(0.7, 0.9)

    with pytest.raises(LayoutMismatch, match=r"'momentum' of shape \(1,\)"):
        optimizer.update(torch.zeros(2), torch.zeros(2), optimizer.init(1), step=1)


def test_update_refuses_the_state_of_another_optimizer():
    with pytest.raises(LayoutMismatch, match=r"\['momentum'\]; it keeps \[\]"):
        Sgd(1.0).update(torch.zeros(2), torch.zeros(2), Nesterov(0.7, 0.9).init(2), step=1)


# --- build ---


@pytest.mark.parametrize(
    ("name", "chosen", "expected"),
    [
        ("sgd", {"lr": 1}, Sgd(1.0)),
        ("nesterov", {"momentum": 0.9, "lr": 0.7}, Nesterov(0.7, 0.9)),
        (
            "adam",
            {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8},
            Adam(0.1, 0.9, beta2=0.99, eps=1e-8),
        ),
    ],
)
def test_settings_build_the_optimizer_of_their_name(name, chosen, expected):
    assert OuterSettings.model_validate({"optimizer": name, **chosen}).build() == expected
