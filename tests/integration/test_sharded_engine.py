"""What a pass of a sharded model does, what it refuses, and what an error leaves behind."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from atoll.clock import Clock
from atoll.collectives.base import Collectives, Handle
from atoll.errors import ConfigError, Diverged, EmptySum, MissingRanks, StaleGeneration
from atoll.models import gpt, init, registry
from atoll.models.gpt import GPT, GPTConfig
from atoll.strategies.sharded.engine import Engine
from atoll.strategies.sharded.shard import Shard
from atoll.strategies.sharded.step import Step
from atoll.strategies.sharded.units import Units
from tests import sharded
from tests.sharded import Rank, Training

SHORT = Training(steps=3, dtype=torch.float64)


def weights(training: Training, ranks: list[Rank]) -> Tensor:
    return sharded.whole(training, [rank.shard for rank in ranks])


def away(training: Training, size: int, wanted: Mapping[str, Tensor]) -> float:
    ranks = sharded.threads(size, sharded.trained(training))
    return sharded.differences(training, weights(training, ranks), dict(wanted))[1]


def config(definition: Mapping[str, Any]) -> GPTConfig:
    return GPTConfig(**{k: v for k, v in definition.items() if k != "architecture"})


# Activation checkpointing


class Checkpointed(GPT):
    """Computes blocks again in the backward pass, as many at once as `together` says."""

    def __init__(self, size: GPTConfig, *, together: int, use_reentrant: bool) -> None:
        super().__init__(size)
        self.together = together
        self.use_reentrant = use_reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for start in range(0, len(self.blocks), self.together):
            run = nn.Sequential(*self.blocks[start : start + self.together])
            x = checkpoint(run, x, use_reentrant=self.use_reentrant)
        logits: Tensor = self.head(self.norm(x))
        return logits


def checkpointed(
    definition: Mapping[str, Any], *, together: int = 1, use_reentrant: bool = False
) -> nn.Module:
    with torch.device("meta"):
        return Checkpointed(config(definition), together=together, use_reentrant=use_reentrant)


@pytest.mark.parametrize("together", [1, 2])
def test_activation_checkpointing_ends_where_one_process_ends(together):
    training = Training(
        steps=3, dtype=torch.float64, hollow=partial(checkpointed, together=together)
    )
    wanted, _, _ = sharded.alone(training)

    assert away(training, 3, wanted) < 1e-12


def test_reentrant_checkpointing_is_refused_by_name():
    training = Training(steps=1, hollow=partial(checkpointed, use_reentrant=True))

    with pytest.raises(ConfigError, match=r"'blocks\.0' trains .* use_reentrant=False"):
        sharded.threads(2, sharded.trained(training))


# Models


def test_frozen_tensors_keep_their_bits_and_the_others_train():
    frozen = ("positions.weight", "blocks.1.mlp.expand.weight", "blocks.2.attention.qkv.weight")

    def hollow(definition: Mapping[str, Any]) -> nn.Module:
        model = registry.hollow(definition)
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
        return model

    training = Training(steps=3, hollow=hollow)
    ranks = sharded.threads(3, sharded.trained(training))

    found = training.units.layout.views(weights(training, ranks))
    moved = {n for n, before in training.initial().items() if not torch.equal(found[n], before)}
    assert moved == {t.name for t in training.units.layout.tensors} - set(frozen)
    moments = training.units.layout.views(
        sharded.whole(training, [rank.shard for rank in ranks], "second_moments")
    )
    assert all(not moments[name].any() for name in frozen)


def test_wholly_frozen_block_is_never_reduced():
    def hollow(definition: Mapping[str, Any]) -> nn.Module:
        model = registry.hollow(definition)
        model.get_submodule("blocks.0").requires_grad_(False)
        model.get_submodule("tokens").requires_grad_(False)
        model.get_submodule("positions").requires_grad_(False)
        return model

    reduced: set[int] = set()

    class Watching(Engine):
        def _reduce(self, unit: int) -> None:
            reduced.add(unit)
            super()._reduce(unit)

    training = Training(steps=2, hollow=hollow, engine=Watching)
    ranks = sharded.threads(2, sharded.trained(training))

    assert reduced == {0, 2, 3}
    found = training.units.layout.views(weights(training, ranks))
    before = training.initial()
    assert torch.equal(found["blocks.0.mlp.expand.weight"], before["blocks.0.mlp.expand.weight"])
    assert not torch.equal(found["norm.weight"], before["norm.weight"])


class Twice(GPT):
    """Runs its blocks two times over."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class TwiceFrozen(Twice):
    """What its blocks take at first has no gradient, and what they take then has one."""

    def __init__(self, given: GPTConfig) -> None:
        super().__init__(given)
        self.tokens.requires_grad_(False)
        self.positions.requires_grad_(False)


class Nested(nn.Module):
    """Blocks that are lists without a forward pass of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(40, 16)
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16, bias=False)]) for _ in range(2)
        )
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(16)) for _ in range(2))
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(16, 40)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer, scale in zip(self.layers, self.scales, strict=True):
            assert isinstance(layer, nn.ModuleList)
            x = x + layer[1](layer[0](x).tanh()) * scale
        logits: Tensor = self.head(x)
        return logits


def one_step(model: nn.Module, real: nn.Module, size: int) -> tuple[dict[str, Tensor], Units]:
    """Gradient sums of one micro-batch for each of `size` ranks, and the same by one process."""
    units = Units.of_model(registry.layout_of(real))
    rows = torch.randint(0, 40, (size, 9), generator=torch.Generator().manual_seed(1))

    def work(ranks: Collectives, clock: Clock) -> Shard:
        shard = Shard(units, rank=ranks.rank, size=ranks.size)
        for tensor in units.layout.tensors:
            values = real.get_parameter(tensor.name).detach().reshape(-1)
            shard.fill("weights", tensor.offset, values)
        engine = Engine(copied(model), shard, ranks, group=1, clock=clock)
        engine.begin(1, 0, tokens=8)
        gpt.loss(engine.model, rows[ranks.rank : ranks.rank + 1]).backward()
        engine.finish()
        return shard

    shards = sharded.threads(size, work)
    flat = torch.zeros(units.layout.size)
    for shard in shards:
        for unit, span in enumerate(shard.owned):
            span.of(flat).copy_(shard.of(unit, "sums"))
    return units.layout.views(flat / (8 * size)), units


def copied(model: nn.Module) -> nn.Module:
    """Another one on meta: each rank has its own."""
    with torch.device("meta"):
        made = type(model)(model.config) if isinstance(model, Twice) else Nested()
    return made


@pytest.mark.parametrize(
    "make",
    [
        lambda: Twice(config(sharded.MODEL)),
        lambda: TwiceFrozen(config(sharded.MODEL)),
        Nested,
    ],
    ids=["called twice", "called twice, at first with frozen inputs", "lists"],
)
def test_gradients_of_unusual_models_are_those_of_one_process(make: Callable[[], nn.Module]):
    torch.manual_seed(0)
    real = make()
    found, _ = one_step(real, real, 3)

    rows = torch.randint(0, 40, (3, 9), generator=torch.Generator().manual_seed(1))
    gpt.loss(real, rows).backward()

    for name, parameter in real.named_parameters():
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found[name], wanted, rtol=1e-4, atol=1e-7)


class Shallow(GPT):
    """Leaves the pass after its first block where it is told to."""

    leaves = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks[:1] if self.leaves else self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Counting:
    """Collectives that know which gathers were waited for."""

    def __init__(self, inner: Collectives) -> None:
        self.inner = inner
        self.open: set[object] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def all_gather(self, *args: Any, **options: Any) -> Handle:
        handle = self.inner.all_gather(*args, **options)
        self.open.add(handle)

        class Waited:
            def wait(inner) -> None:
                handle.wait()
                self.open.discard(handle)

        return Waited()


def test_weights_that_were_gathered_ahead_and_not_used_are_waited_for_before_they_go():
    training = Training()

    def work(ranks: Collectives, clock: Clock) -> list[int]:
        counting = Counting(ranks)
        shard = Shard(training.units, rank=ranks.rank, size=ranks.size)
        with torch.device("meta"):
            model = Shallow(config(sharded.MODEL))
        engine = Engine(model, shard, cast(Collectives, counting), group=1, clock=clock)
        left = []
        for micro, leaves in enumerate((False, True)):
            model.leaves = leaves
            engine.begin(1, micro, tokens=8)
            gpt.loss(model, training.rows(1)[:1]).backward()
            engine.finish()
            engine.free()
            left.append(len(counting.open))
        return left

    assert sharded.threads(2, work) == [[0, 0], [0, 0]]


LLAMA: dict[str, Any] = {
    "architecture": "transformers",
    "config": {
        **{"model_type": "llama", "vocab_size": 40, "hidden_size": 16, "intermediate_size": 32},
        **{"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1},
        **{"max_position_embeddings": 32, "tie_word_embeddings": True},
    },
    **{"vocab": 40, "block": 8},  # as rows are drawn here
}


def llama(definition: Mapping[str, Any], *, recomputes: bool = False) -> nn.Module:
    model: Any = registry.hollow({k: definition[k] for k in ("architecture", "config")})
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return cast(nn.Module, model.train())


@pytest.mark.parametrize("recomputes", [False, True])
def test_transformers_model_ends_where_one_process_ends(recomputes):
    """Tied weights, rotary buffers, tuples and keywords between modules."""

    class Llama(Training):
        @property
        def units(self) -> Units:
            return Units.of_model(registry.layout_of(llama(LLAMA)))

    training = Llama(model=LLAMA, steps=3, hollow=partial(llama, recomputes=recomputes))
    ranks = sharded.threads(2, sharded.trained(training))

    wanted = registry.build({k: LLAMA[k] for k in ("architecture", "config")})
    found = training.units.layout.views(weights(training, ranks))
    with torch.no_grad():
        for name, values in training.initial().items():
            wanted.get_parameter(name).copy_(values)
    after, _, _ = sharded.stepped_alone(training, wanted)
    assert all((found[name] - after[name]).norm() <= 1e-4 * after[name].norm() for name in after)


def alone_engine(model: nn.Module, ranks: Collectives, clock: Clock) -> Engine:
    units = Units.of_model(registry.layout_of(model))
    return Engine(model, Shard(units, rank=0, size=1), ranks, group=1, clock=clock)


def test_block_that_shares_its_weights_is_refused_with_both_names():
    model = registry.on_meta({**sharded.MODEL, "tied": False})
    other = model.get_submodule("blocks.1.mlp.expand")
    other.weight = model.get_submodule("blocks.0.mlp.expand").weight

    with pytest.raises(ConfigError, match=r"'blocks\.0\.mlp.*is 'blocks\.1\.mlp\.expand\.weight'"):
        sharded.threads(1, partial(alone_engine, model))


def test_buffer_without_values_is_refused_by_name():
    model = registry.on_meta(sharded.MODEL)
    model.register_buffer("table", torch.zeros(3, device="meta"))

    with pytest.raises(ConfigError, match="'table' is on the meta device"):
        sharded.threads(1, partial(alone_engine, model))


# Around a pass


def test_weights_are_with_their_owners_between_passes():
    def work(ranks: Collectives, clock: Clock) -> set[str]:
        steps = sharded.opened(SHORT, ranks, clock)
        steps.train(1, sharded.own(SHORT, 1, ranks), gpt.loss, lr=1e-3)
        assert steps.engine.nbytes == 0
        with pytest.raises(ConfigError, match="'GPT' is called outside of a step"):
            steps.engine.model(torch.zeros(1, 8, dtype=torch.int64))
        return {p.device.type for p in steps.engine.model.parameters()}

    assert sharded.threads(2, work) == [{"meta"}, {"meta"}]


def test_micro_batch_without_a_backward_pass_is_refused():
    def work(ranks: Collectives, clock: Clock) -> None:
        engine = sharded.opened(SHORT, ranks, clock).engine
        engine.begin(1, 0, tokens=8)
        gpt.loss(engine.model, SHORT.rows(1))
        with pytest.raises(ConfigError, match="ends without a backward pass"):
            engine.finish()

    sharded.threads(2, work)


def test_second_backward_pass_is_refused():
    def work(ranks: Collectives, clock: Clock) -> None:
        engine = sharded.opened(SHORT, ranks, clock).engine
        engine.begin(1, 0, tokens=8)
        loss = gpt.loss(engine.model, SHORT.rows(1))
        loss.backward(retain_graph=True)
        with pytest.raises(ConfigError, match="is summed already"):
            loss.backward()
        engine.abandon()

    sharded.threads(2, work)


def test_step_without_rows_anywhere_changes_nothing():
    def work(ranks: Collectives, clock: Clock) -> Shard:
        steps = sharded.opened(SHORT, ranks, clock)
        with pytest.raises(EmptySum, match="no rank has rows of step 1"):
            steps.train(1, [(SHORT.rows(1)[:1], 0)], gpt.loss, lr=1e-3)
        return steps.engine.shard

    shards = sharded.threads(2, work)

    before = [sharded.filled(SHORT, rank=rank, size=2) for rank in range(2)]
    assert torch.equal(sharded.whole(SHORT, shards), sharded.whole(SHORT, before))


def test_stand_in_that_overflows_counts_as_none():
    """The control: with its tokens the same loss is refused, and the weights stay."""

    def broken(model: nn.Module, rows: Tensor) -> Tensor:
        return gpt.loss(model, rows) * torch.inf

    def work(ranks: Collectives, clock: Clock, tokens: int) -> str:
        steps = sharded.opened(SHORT, ranks, clock)
        loss_of = broken if ranks.rank == 1 else gpt.loss
        rows = SHORT.rows(1)[:1]
        try:
            given = tokens if ranks.rank == 1 else 8
            steps.train(1, [(rows, given)], loss_of, lr=1e-3)
        except Diverged:
            assert not steps.engine.shard.of(0, "first_moments").any()
            return "diverged"
        return "trained"

    assert sharded.threads(2, partial(work, tokens=0)) == ["trained"] * 2
    assert sharded.threads(2, partial(work, tokens=8)) == ["diverged"] * 2


# Held-out loss


@pytest.mark.parametrize("size", [1, 3])
def test_evaluation_is_the_loss_of_one_process_and_changes_nothing(size):
    held_out = SHORT.rows(99)[:2]

    def work(ranks: Collectives, clock: Clock) -> tuple[float, int, Shard]:
        steps = sharded.opened(SHORT, ranks, clock)
        steps.train(1, sharded.own(SHORT, 1, ranks), gpt.loss, lr=1e-3)
        mine = [(held_out[k : k + 1], k % ranks.size == ranks.rank) for k in range(2)]
        total, count = steps.evaluate(1, mine, gpt.loss_sum)
        assert steps.engine.nbytes == 0
        # And the step after it is as it would have been.
        steps.train(2, sharded.own(SHORT, 2, ranks), gpt.loss, lr=1e-3)
        return total, count, steps.engine.shard

    def plain(ranks: Collectives, clock: Clock) -> Shard:
        steps = sharded.opened(SHORT, ranks, clock)
        for step in (1, 2):
            steps.train(step, sharded.own(SHORT, step, ranks), gpt.loss, lr=1e-3)
            if step == 1:
                first.append(sharded.whole(SHORT, [steps.engine.shard]))
        return steps.engine.shard

    first: list[Tensor] = []
    found = sharded.threads(size, work)
    wanted = sharded.threads(size, plain)

    assert sum(count for _, count, _ in found) == 2 * 8
    shards = [shard for _, _, shard in found]
    assert torch.equal(sharded.whole(SHORT, shards), sharded.whole(SHORT, wanted))
    model = registry.build(SHORT.model).double()
    flat = torch.stack([torch.nan_to_num(one) for one in first]).sum(dim=0)
    with torch.no_grad():
        for name, values in SHORT.units.layout.views(flat).items():
            model.get_parameter(name).copy_(values)
    total, _ = gpt.loss_sum(model, held_out)
    assert sum(one for one, _, _ in found) == pytest.approx(total, rel=1e-12)


# Errors in the middle


class Failing:
    """Collectives whose n-th gather, or reduction, ends with an error."""

    def __init__(self, inner: Any, op: str, number: int, error: Exception) -> None:
        self._inner = inner
        self._op = op
        self._left = number
        self._error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def all_gather(self, *args: Any, **options: Any) -> Handle:
        return self._perhaps("gather", self._inner.all_gather(*args, **options))

    def reduce_scatter(self, *args: Any, **options: Any) -> Handle:
        return self._perhaps("reduce", self._inner.reduce_scatter(*args, **options))

    def _perhaps(self, op: str, handle: Handle) -> Handle:
        self._left -= op == self._op
        if op != self._op or self._left:
            return handle
        error, abort = self._error, self._inner.abort

        class Lost:
            def wait(self) -> None:
                abort(error)
                raise error

        return Lost()


# Of the root's one gather and 5 of blocks in each micro-batch; of 4 reductions in each.
@pytest.mark.parametrize(
    ("op", "number"),
    [("gather", k) for k in (1, 3, 6, 8, 11)] + [("reduce", k) for k in (1, 2, 4, 5, 8)],
)
def test_step_after_an_abandoned_one_has_the_bits_of_an_untroubled_one(op, number):
    error = StaleGeneration("the group is over")

    def work(ranks: Collectives, clock: Clock) -> Step:
        steps = sharded.opened(SHORT, ranks, clock)
        steps.train(1, sharded.own(SHORT, 1, ranks), gpt.loss, lr=1e-3)
        return steps

    def troubled(ranks: Collectives, clock: Clock) -> Step:
        steps = work(ranks, clock)
        engine = steps.engine
        engine.collectives = Failing(ranks, op, number, error)
        with pytest.raises(StaleGeneration) as caught:
            steps.train(2, sharded.own(SHORT, 2, ranks), gpt.loss, lr=1e-3)
        assert caught.value is error
        steps.abandon()
        assert engine.nbytes == 0
        assert all(p.grad is None for p in engine.model.parameters())
        return steps

    def again(ranks: Collectives, clock: Clock) -> Shard:
        steps: Step = kept[ranks.rank]
        steps.engine.collectives = ranks  # of another group
        steps.train(2, sharded.own(SHORT, 2, ranks), gpt.loss, lr=1e-3)
        return steps.engine.shard

    def untroubled(ranks: Collectives, clock: Clock) -> Shard:
        steps = work(ranks, clock)
        steps.train(2, sharded.own(SHORT, 2, ranks), gpt.loss, lr=1e-3)
        return steps.engine.shard

    kept = sharded.threads(2, troubled)
    found = sharded.threads(2, again)

    wanted = sharded.threads(2, untroubled)
    for section in ("weights", "first_moments", "second_moments"):
        assert torch.equal(
            sharded.whole(SHORT, found, section), sharded.whole(SHORT, wanted, section)
        )


def test_missing_rank_is_named_and_ends_the_pass():
    def work(ranks: Collectives, clock: Clock) -> tuple[int, ...]:
        if ranks.rank == 1:
            return ()
        steps = sharded.opened(SHORT, ranks, clock)
        with pytest.raises(MissingRanks) as caught:
            steps.train(1, sharded.own(SHORT, 1, ranks), gpt.loss, lr=1e-3)
        steps.abandon()
        return caught.value.ranks

    assert sharded.fibers(2, work, timeout_seconds=5.0) == [(1,), ()]


def test_model_goes_on_in_a_group_of_another_size():
    """Another engine takes the same module over; its weights are those of the new shards."""
    models = [registry.hollow(SHORT.model) for _ in range(3)]

    def work(ranks: Collectives, clock: Clock) -> Shard:
        shard = sharded.filled(SHORT, rank=ranks.rank, size=ranks.size)
        engine = Engine(models[ranks.rank], shard, ranks, group=1, clock=clock)
        steps = Step(engine, sharded.RULE, clip=SHORT.clip)
        steps.train(1, sharded.own(SHORT, 1, ranks), gpt.loss, lr=SHORT.rate(1))
        engine.close()
        return shard

    sharded.threads(3, work)
    found = sharded.threads(2, work)

    one = Training(steps=1, dtype=torch.float64)
    wanted, _, _ = sharded.alone(one)
    assert sharded.differences(one, sharded.whole(one, found), wanted)[1] < 1e-12


# Precision of the passes


def test_passes_in_bf16_leave_the_master_and_the_sums_in_fp32():
    training = Training(steps=10)
    dtypes: set[torch.dtype] = set()

    class Watching(Engine):
        def _arrived(self, unit: int, held: Any, parameter: nn.Parameter) -> None:
            assert parameter.grad is not None
            dtypes.add(parameter.grad.dtype)
            super()._arrived(unit, held, parameter)

    low = Training(steps=10, engine=Watching)
    found = sharded.threads(2, sharded.trained(low, computes=torch.bfloat16))
    wanted = sharded.threads(2, sharded.trained(training))

    assert dtypes == {torch.bfloat16}
    flat = weights(low, found)
    assert flat.dtype == torch.float32
    assert not torch.equal(flat, flat.bfloat16().float())  # the master never takes what is sent
    losses = [[m.loss_sum / m.tokens for m in ranks[0].made] for ranks in (found, wanted)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)


def test_initial_weights_are_drawn_alike():
    """The control of tests that begin with them: other seeds give other weights."""
    layout = SHORT.units.layout
    a, b = (dict(init.initial_weights(layout, seed=seed)) for seed in (1, 2))

    assert not torch.equal(a["tokens.weight"], b["tokens.weight"])
