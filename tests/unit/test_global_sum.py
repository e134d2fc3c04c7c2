"""`global_sum` and `contribute_once` on ranks against one process, in float64."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.collectives.base import Collectives, Key
from atoll.errors import ConfigError, LayoutMismatch
from atoll.pools.contributing import contribute_once
from atoll.pools.global_sums import global_sum
from tests.rank_groups import key, threads

ROWS, WIDTH = 12, 5
Sum = Callable[[Tensor, Collectives, Key], Tensor]
ranks_of = partial(threads, is_inline=True)


def made(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def nonlinear(total: Tensor) -> Tensor:
    return (total / ROWS * torch.log2(1 + total)).sum()


def used(weight: Tensor, rows: Tensor) -> Tensor:
    return (rows @ weight).square().sum(0)  # [WIDTH]


def reference() -> tuple[Tensor, Tensor]:
    weight = made(1, 3, WIDTH).requires_grad_()
    loss = nonlinear(used(weight, made(2, ROWS, 3)))
    [gradient] = torch.autograd.grad(loss, [weight])
    return loss.detach(), gradient


def on_ranks(size: int, summed: Sum) -> tuple[list[Tensor], Tensor]:
    """Each rank's loss, and the SUM of the ranks' gradients."""

    def work(group: Collectives) -> tuple[Tensor, Tensor]:
        first, stop = (k * ROWS // size for k in (group.rank, group.rank + 1))
        weight = made(1, 3, WIDTH).requires_grad_()
        loss = nonlinear(summed(used(weight, made(2, ROWS, 3)[first:stop]), group, key(1)))
        [gradient] = torch.autograd.grad(loss, [weight])
        return loss.detach(), gradient

    losses, gradients = zip(*ranks_of(size, "ring", work), strict=True)
    return list(losses), torch.stack(gradients).sum(0)


def ratio(found: Tensor, right: Tensor) -> float:
    return float((found * right).sum() / right.square().sum())


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_gradients_of_a_global_sum_add_up_to_that_of_one_process(size):
    losses, gradient = on_ranks(size, global_sum)

    loss, right = reference()
    assert float((gradient - right).norm() / right.norm()) < 1e-14
    assert all(abs(float(one / loss) - 1) < 1e-14 for one in losses)
    assert all(torch.equal(one, losses[0]) for one in losses)  # to the bit


def totalled(x: Tensor, group: Collectives, which: Key) -> Tensor:
    total = x.detach().clone()
    group.all_reduce(which, total).wait()
    return total


class _Through(torch.autograd.Function):
    """An all-reduce that autograd goes through: upstream gradients are added, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Collectives) -> Tensor:
        ctx.group = group
        return totalled(x, group, key(1))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return totalled(upstream[0], ctx.group, key(2)), None


def autograd_all_reduce(x: Tensor, group: Collectives, _: Key) -> Tensor:
    found: Tensor = _Through.apply(x, group)
    return found


def undetached(x: Tensor, group: Collectives, which: Key) -> Tensor:
    return x + (totalled(x, group, which) - x)


@pytest.mark.parametrize(("wrong", "times"), [(autograd_all_reduce, 3.0), (undetached, 0.0)])
def test_other_global_sums_have_the_right_loss_and_a_wrong_gradient(wrong, times):
    """The controls: n times with an autograd all-reduce, nothing with an undetached residual."""
    losses, gradient = on_ranks(3, wrong)

    loss, right = reference()
    assert abs(float(losses[0] / loss) - 1) < 1e-13
    assert ratio(gradient, right) == pytest.approx(times, abs=1e-13)


def test_local_sum_gives_another_gradient():
    """The control: without the other ranks' parts f' is taken elsewhere."""
    _, gradient = on_ranks(3, lambda x, *_: x)

    _, right = reference()
    assert float((gradient - right).norm() / right.norm()) > 1e-2


@pytest.mark.parametrize("is_contiguous", [True, False])
def test_global_sum_leaves_its_argument_alone_and_keeps_shape_and_dtype(is_contiguous):
    def work(group: Collectives) -> tuple[Tensor, Tensor]:
        x = torch.full((2, 3), 1.0 + group.rank, dtype=torch.float64).T
        x = x.contiguous() if is_contiguous else x
        return x, global_sum(x, group, key(1))

    for rank, (x, total) in enumerate(ranks_of(2, "ring", work)):
        assert torch.equal(x, torch.full((3, 2), 1.0 + rank, dtype=torch.float64))
        assert torch.equal(total, torch.full((3, 2), 3.0, dtype=torch.float64))


def test_global_sum_of_a_scalar_is_one():
    def work(group: Collectives) -> Tensor:
        return global_sum(torch.tensor(2.0), group, key(1))

    assert [one.tolist() for one in ranks_of(2, "ring", work)] == [4.0, 4.0]


@pytest.mark.parametrize("create_graph", [False, True])
def test_second_derivative_through_a_global_sum_is_refused(create_graph):
    def work(group: Collectives) -> str:
        x = torch.ones(3, dtype=torch.float64).requires_grad_()
        loss = global_sum(x, group, key(1)).square().sum()
        try:
            torch.autograd.grad(loss, [x], create_graph=create_graph)
        except ConfigError as refused:
            return str(refused)
        return "taken"

    found = ranks_of(2, "ring", work)

    assert [one == "taken" for one in found] == [not create_graph] * 2
    assert all(create_graph == ("create_graph=True" in one) for one in found)


def test_global_sum_elsewhere_than_on_the_cpu_is_refused():
    def work(group: Collectives) -> None:
        with pytest.raises(LayoutMismatch, match="on the CPU"):
            global_sum(torch.ones(3, device="meta"), group, key(1))

    ranks_of(1, "ring", work)


# What all ranks have alike


def decay(weight: Tensor) -> Tensor:
    return weight.square().sum() / weight.numel()


def gradients(size: int, form: str) -> Tensor:
    """The SUM over ranks of the gradient of a loss that all have, and of an own one."""

    def work(group: Collectives) -> Tensor:
        weight = made(1, 3, WIDTH).requires_grad_()
        other = torch.ones(2, dtype=torch.float64, requires_grad=True)
        once = contribute_once(group)
        if form == "call":
            (once(decay(weight)) + (weight * group.rank).sum()).backward()
        elif form == "backward":
            once.backward(decay(weight), [weight, other])
            assert other.grad is not None
            assert not other.grad.any()
        else:
            decay(weight).backward()
        assert weight.grad is not None
        return weight.grad

    return torch.stack(ranks_of(size, "ring", work)).sum(0)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_contribution_of_replicas_enters_once_whatever_their_number(size):
    own = sum(range(size))
    right = 2 * made(1, 3, WIDTH) / (3 * WIDTH)

    torch.testing.assert_close(gradients(size, "backward"), right, rtol=0, atol=1e-15)
    torch.testing.assert_close(gradients(size, "call"), right + own, rtol=0, atol=1e-14)
    assert ratio(gradients(size, "by all"), right) == pytest.approx(size)  # the control


def test_contribution_has_its_value_on_all_ranks_and_hooks_fire_on_all():
    def work(group: Collectives) -> tuple[float, list[Tensor]]:
        weight = made(1, 3, WIDTH).requires_grad_()
        fired: list[Tensor] = []
        weight.register_post_accumulate_grad_hook(lambda w: fired.append(w.grad))
        loss = contribute_once(group)(decay(weight))
        loss.backward()
        return loss.item(), fired

    (first, [one]), (second, [other]) = ranks_of(2, "ring", work)

    assert first == second == float(decay(made(1, 3, WIDTH)))
    assert one.any()
    assert not other.any()


def test_gradients_that_were_there_stay_with_a_contribution():
    def work(group: Collectives) -> Tensor:
        weight = made(1, 3, WIDTH).requires_grad_()
        weight.grad = torch.ones_like(weight)
        contribute_once(group).backward(decay(weight), [weight])
        return weight.grad

    first, second = ranks_of(2, "ring", work)

    right = 1 + 2 * made(1, 3, WIDTH) / (3 * WIDTH)
    torch.testing.assert_close(first, right, rtol=0, atol=1e-15)
    assert torch.equal(second, torch.ones(3, WIDTH, dtype=torch.float64))
