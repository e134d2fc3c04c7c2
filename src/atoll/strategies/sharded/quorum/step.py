"""A rank's steps in a quorum: computed by its training thread, committed by the owners' servers."""

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from atoll.errors import ConfigError, StaleContribution
from atoll.strategies.sharded.commit import Outcome
from atoll.strategies.sharded.engine import Engine
from atoll.strategies.sharded.quorum.exchange import QuorumExchange
from atoll.strategies.sharded.quorum.owner import Owner, Rule
from atoll.strategies.sharded.step import Made, Step

# At the end of a round all wait for who is late, so many deadlines.
MEETING_DEADLINES = 10


class QuorumStep(Step):
    """As `Step`, but a step may be over before this rank has computed it.

    Then a pass or `commit` raises StaleContribution: call `abandon` and go on with what `catch_up`
    says. The rows of that step are open again; `Outcome.excluded` tells everybody whose.
    """

    def __init__(
        self,
        engine: Engine,
        rule: Rule,
        *,
        exchange: QuorumExchange,
        owner: Owner,
        deadline_seconds: float,
    ) -> None:
        """`deadline_seconds` is how long those who are ready wait for the rest."""
        super().__init__(engine, rule.adamw, clip=rule.clip)
        self._exchange = exchange
        self._owner = owner
        # For who is late, and as long again for what the owners do then.
        self._patience = 3 * deadline_seconds
        self._meeting = MEETING_DEADLINES * deadline_seconds
        self._totals_of: list[tuple[float, int]] = []

    @property
    def present(self) -> int:
        """The step that is to be computed now, known by this rank's own server."""
        return self._owner.present

    def catch_up(self, step: int) -> int:
        """The step to go on with, once this rank's weights have the one that it was late for."""
        self._owner.outcome(step, seconds=self._patience)
        return self.present

    def meet(self, step: int) -> None:
        """Returns once all ranks have come to the end of the round whose last step it is.

        Until then the weights are those after `step`, everywhere. MissingRanks for who does not.
        """
        self._exchange.meet(step, seconds=self._meeting)

    def begin(self, step: int) -> None:
        self._owner.check(step)
        super().begin(step)
        self._exchange.step, self._exchange.version = step, step - 1
        self.engine.keeps = self._exchange.push
        self._totals_of = []

    def begin_micro(self, tokens: int) -> None:
        self._exchange.micro, self._exchange.tokens = self._micros, tokens
        super().begin_micro(tokens)

    def finish_micro(self, loss: float) -> None:
        super().finish_micro(loss)
        counted = loss * self._micro_tokens if self._micro_tokens else 0.0
        self._totals_of.append((counted, self._micro_tokens))

    def commit(self, *, lr: float) -> Made:
        """Returns once the step is committed, with this rank in it."""
        number = self._number
        if not self._micros:
            raise ConfigError(f"step {number} has no micro-batch; each rank computes one")
        self.engine.free()
        with self.engine.seconds.of("reduce"):
            outcome = self._committed(number, lr)
        split = self.engine.seconds.split()
        self._forget()
        return Made(number, outcome.loss_sum, outcome.tokens, outcome.norm, split)

    def _committed(self, number: int, lr: float) -> Outcome:
        late: StaleContribution | None = None
        try:
            self._exchange.send_totals(self._totals_of, lr=lr)
        except StaleContribution as error:
            # Or an answer was lost, and the part was asked for again after the commit.
            late = error
        outcome = self._owner.outcome(number, seconds=self._patience)
        if outcome is None or self.engine.shard.rank not in outcome.senders:
            raise StaleContribution(
                f"step={number} was committed without this rank, which was late; its rows are open "
                f"again; step {self.present} is the present one"
            ) from late
        self._exchange.forget()
        return outcome

    def train(
        self,
        step: int,
        micro_batches: Iterable[tuple[Tensor, int]],
        loss_of: Callable[[nn.Module, Tensor], Tensor],
        *,
        lr: float,
    ) -> Made:
        """A whole step; abandoned already where it raises StaleContribution."""
        try:
            return super().train(step, micro_batches, loss_of, lr=lr)
        except StaleContribution:
            self.abandon()
            raise

    def evaluate(
        self,
        step: int,
        batches: Iterable[tuple[Tensor, bool]],
        loss_sum_of: Callable[[nn.Module, Tensor], tuple[float, int]],
    ) -> tuple[float, int]:
        """As `Step.evaluate`; StaleContribution where others have made the next step meanwhile."""
        self._exchange.version = step
        return super().evaluate(step, batches, loss_sum_of)

    def abandon(self) -> None:
        super().abandon()
        self._exchange.forget()
        self._totals_of = []
