"""A step of a sharded run: micro-batches, one division, the true norm, and the owners' AdamW.

    mean = (sum over ranks and micro-batches of tokens * gradient of the mean loss) / all tokens
    norm = the global 2-norm of that mean, from the owners' squares in float64

Weights and moments change only after the last exchange of the step, so a step that fails before
leaves this rank's shard as it was.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atoll.collectives.base import Key
from atoll.compiled.base import compiled
from atoll.errors import ConfigError, EmptySum
from atoll.strategies.sharded import onebit, tiles
from atoll.strategies.sharded.adamw import AdamW
from atoll.strategies.sharded.commit import norm_of
from atoll.strategies.sharded.engine import Engine
from atoll.strategies.sharded.onebit import Momenta
from atoll.strategies.sharded.seconds import Split

TOTALS, SQUARES = 0, 1  # in place of a unit in the keys of a step's two small sums


@dataclass(frozen=True, slots=True)
class Made:
    """What a step came to; the same on all ranks but for the seconds."""

    step: int
    loss_sum: float  # over all ranks' tokens
    tokens: int
    norm: float  # of the mean gradient, before clipping
    seconds: Split


class Step:
    """Steps of one rank, one after another: micro-batches, then `commit`."""

    def __init__(
        self, engine: Engine, rule: AdamW, *, clip: float, onebit_warmup_steps: int = 0
    ) -> None:
        """`clip` is the largest norm of a step's mean gradient; 0 clips nothing.

        After `onebit_warmup_steps` (0: never) ranks send signs of their momenta, which cost every
        rank memory for the whole model: see `onebit`. The exchange must be direct then.
        """
        self.engine = engine
        self.rule = rule
        self.clip = clip
        self._warmup = onebit_warmup_steps
        self._momenta: Momenta | None = None
        self._tiles = tiles.of(engine.shard, engine.trains)
        compiled.prepare(engine.shard.elements)
        self._forget()

    # A step

    def begin(self, step: int) -> None:
        """Step number `step`, counted from 1, begins."""
        self._forget()
        self._number = step
        self.engine.seconds.begin()
        if self._warmup and step > self._warmup:
            if self._momenta is None:
                self._momenta = Momenta(self.engine.shard, self.rule)
                self.engine.keeps = self._momenta.add
            self._momenta.begin()

    def begin_micro(self, tokens: int) -> None:
        """The next forward and backward pass are over `tokens` of this rank; 0: a stand-in."""
        self.engine.begin(self._number, self._micros, tokens=tokens)
        self._micro_tokens = tokens
        if tokens and self._momenta is not None:
            self._momenta.decay()

    def finish_micro(self, loss: float) -> None:
        """Its backward pass is over; `loss` was the mean over its tokens."""
        self.engine.finish()
        self._micros += 1
        self._tokens += self._micro_tokens
        if self._micro_tokens:
            self._loss_sum += loss * self._micro_tokens

    def commit(self, *, lr: float) -> Made:
        """Steps this rank's shard with the mean gradient of all ranks, at learning rate `lr`."""
        if not self._micros:
            raise ConfigError(f"step {self._number} has no micro-batch; each rank computes one")
        self.engine.free()  # the weights are about to change
        loss_sum, tokens = self._totals()
        if self._momenta is not None:
            self._exchange_momenta(self._momenta, tokens)
        norm = self._mean_and_norm(tokens)
        with self.engine.seconds.of("step"):
            self._update(lr, tiles.clipping(norm, self.clip))
        made = Made(self._number, loss_sum, tokens, norm, self.engine.seconds.split())
        self._forget()
        return made

    def train(
        self,
        step: int,
        micro_batches: Iterable[tuple[Tensor, int]],
        loss_of: Callable[[nn.Module, Tensor], Tensor],
        *,
        lr: float,
    ) -> Made:
        """A whole step over (rows, tokens); rows of no tokens are a stand-in."""
        self.begin(step)
        for rows, tokens in micro_batches:
            self.begin_micro(tokens)
            loss = loss_of(self.engine.model, rows)
            loss.backward()  # type: ignore[no-untyped-call] # torch leaves backward untyped
            self.finish_micro(loss.item())
        return self.commit(lr=lr)

    def evaluate(
        self,
        step: int,
        batches: Iterable[tuple[Tensor, bool]],
        loss_sum_of: Callable[[nn.Module, Tensor], tuple[float, int]],
    ) -> tuple[float, int]:
        """The summed loss of this rank's rows and its tokens, with the weights after `step`.

        `batches` are (rows, whether they count); all ranks give equally many.
        """
        total, count = 0.0, 0
        with self.engine.evaluation(step):
            for rows, counts in batches:
                loss_sum, tokens = loss_sum_of(self.engine.model, rows)
                if counts:
                    total, count = total + loss_sum, count + tokens
        return total, count

    def abandon(self) -> None:
        """Gives the step up; see `Engine.abandon`."""
        self.engine.abandon()
        self.engine.keeps = self._momenta = None  # of a step that never was
        self._forget()

    # Its parts

    def _totals(self) -> tuple[float, int]:
        """Loss sum and tokens of all ranks."""
        # float64 holds every count up to 2^53 exactly.
        totals = torch.tensor([self._loss_sum, float(self._tokens)], dtype=torch.float64)
        self._all_reduce(TOTALS, totals)
        tokens = int(totals[1].item())
        if tokens == 0:
            raise EmptySum(f"no rank has rows of step {self._number}; the weights are unchanged")
        return totals[0].item(), tokens

    def _exchange_momenta(self, momenta: Momenta, tokens: int) -> None:
        engine = self.engine
        with engine.seconds.of("reduce"):
            momenta.exchange(
                engine.collectives, group=engine.group, step=self._number, tokens=tokens
            )

    def _mean_and_norm(self, tokens: int) -> float:
        """Makes the sums the mean, by the only division there is; the mean's norm."""
        with self.engine.seconds.of("step"):
            squares = tiles.to_mean(self.engine.shard, self._tiles, tokens)
        self._all_reduce(SQUARES, squares)
        return norm_of(squares.item(), step=self._number)

    def _update(self, lr: float, scale: float) -> None:
        step = self._number

        def rule(state: tuple[Tensor, ...], decays: bool) -> None:
            if self._momenta is None:
                self.rule.update(state, lr=lr, step=step, decays=decays)
            else:
                warmup = self._warmup
                onebit.update(self.rule, state, lr=lr, step=step, warmup=warmup, decays=decays)

        tiles.update(self.engine.shard, self._tiles, scale, rule)

    def _all_reduce(self, unit: int, values: Tensor) -> None:
        key = Key(self.engine.group, self._number, "control", unit=unit)
        with self.engine.seconds.of("reduce"):
            self.engine.collectives.all_reduce(key, values).wait()

    def _forget(self) -> None:
        self._number = 0
        self._micros = 0
        self._micro_tokens = 0
        self._tokens = 0
        self._loss_sum = 0.0
