"""The passes of a sharded model: units are gathered when they are needed and freed after use.

Owns which exchange happens when, and where a micro-batch's gradient goes: to the sums of the ranks
that own it. What a step does with the sums is `step`'s.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from atoll.clock import Clock
from atoll.collectives import schedule
from atoll.collectives.base import Collectives, Handle, Key
from atoll.collectives.codecs import WireCodec
from atoll.errors import ConfigError
from atoll.models import fingerprint
from atoll.strategies.sharded import hooks
from atoll.strategies.sharded.budget import Budget
from atoll.strategies.sharded.buffers import Held, Places, UnitBuffers
from atoll.strategies.sharded.hooks import Call
from atoll.strategies.sharded.reductions import Reductions
from atoll.strategies.sharded.seconds import Seconds
from atoll.strategies.sharded.shard import Shard
from atoll.strategies.sharded.units import ROOT, Unit

Phase = Literal["idle", "forward", "backward", "evaluation"]


class Engine:
    """A model whose weights are the shards of a group; takes the model over as it is made.

    The model may be on the meta device, its buffers must be computed. One thread uses it. After an
    error in a pass nothing of it can be used until `abandon`.
    """

    _phase: Phase
    _step: int
    _micro: int
    _tokens: int  # of this rank's micro-batch
    _turn: int  # units that the backward pass has come to
    _trace: list[int]  # units in the order in which they were called
    _open: Counter[int]  # calls whose end is to come, by unit; without one a unit's is `finish`
    _gathers: Counter[int]  # of each unit in this step
    _reduced: set[int]  # in this micro-batch

    def __init__(
        self,
        model: nn.Module,
        shard: Shard,
        collectives: Collectives,
        *,
        group: int,
        clock: Clock,
        computes: torch.dtype | None = None,
        parameter_codec: WireCodec | None = None,
        gradient_codec: WireCodec | None = None,
        residuals: bool = False,
    ) -> None:
        """`computes` is the dtype of the passes, the shard's own by default.

        A codec is handed to the collectives with every gather, or every reduction: all ranks
        compute with what it makes of the weights, and the shard keeps what it has. `residuals`
        keep what the gradients' codec dropped: two bytes on every rank for each element of the
        whole model.
        """
        _check(model, shard, collectives)
        _check_codecs(shard, computes, parameter_codec, gradient_codec, residuals=residuals)
        self.model = model
        self.shard = shard
        self.collectives = collectives
        self.group = group
        self.seconds = Seconds(clock)
        # Whoever takes this rank's gradients instead of sending them to their owners.
        self.keeps: Callable[[int, Tensor], None] | None = None
        self._parameter_codec = parameter_codec
        self._reductions = Reductions(
            shard, self.seconds, codec=gradient_codec, residuals=residuals
        )
        places = Places(model)
        dtype = computes or shard.dtype
        self.buffers: Sequence[UnitBuffers] = [
            UnitBuffers(unit, places, computes=dtype, sums=shard.dtype)
            for unit in shard.units.units
        ]
        self._parts = [schedule.cut(unit.size, shard.size)[shard.rank] for unit in self._units]
        # Those that no pass of their own announces: they are there from the first to the last.
        self._resident = frozenset(
            unit.number for unit in self._units if unit.module == ROOT or not self._is_called(unit)
        )
        self._budget = Budget.of(shard.units, shard.size)
        self._handles = [handle for unit in self._units for handle in self._attached(unit)]
        self._order = [unit.number for unit in self._units if unit.number not in self._resident]
        self._gathering: dict[int, Handle] = {}
        self._forget()

    @property
    def _units(self) -> Sequence[Unit]:
        return self.shard.units.units

    def trains(self, tensor: str) -> bool:
        """Whether the tensor of that name has a gradient."""
        return self.model.get_parameter(tensor).requires_grad

    # A micro-batch

    def begin(self, step: int, micro: int, *, tokens: int) -> None:
        """The next forward and backward pass are micro-batch `micro` of `step`, both from here on.

        The loss is the mean over `tokens` of this rank; 0: the rows are a stand-in and count as
        none. `finish` comes after its backward pass, before the next one begins.
        """
        self._expect("idle", "begin")
        self._new_step(step)
        self._phase = "forward"
        self._micro, self._tokens = micro, tokens
        self._trace = []
        self._open.clear()
        self._reduced.clear()

    def finish(self) -> None:
        """The micro-batch's gradients are with their owners."""
        if self._phase != "backward":
            raise ConfigError(
                f"micro-batch {self._micro} of step {self._step} ends without a backward pass; its "
                f"tokens would count with no gradient; call loss.backward() before"
            )
        for unit in self._units:
            if self.buffers[unit.number].trains and unit.number not in self._reduced:
                self._reduce(unit.number)
        self._reductions.settle(leaving=0)
        for number in range(len(self._units)):
            if number not in self._resident:
                self._let_go(number)
        self._order = self._trace
        self._phase = "idle"

    @contextmanager
    def evaluation(self, step: int) -> Iterator[None]:
        """Forward passes without gradients, with the weights as they are after `step`.

        All ranks make the same number of them.
        """
        self._expect("idle", "evaluation")
        self._new_step(step)
        self._phase, self._trace = "evaluation", []
        with torch.no_grad():
            yield
        self.free()
        self._phase = "idle"

    def free(self) -> None:
        """No weights are gathered any more: what they were is over."""
        for number in range(len(self._units)):
            self._let_go(number)

    def abandon(self) -> None:
        """Gives up the micro-batch, or what is left of it after an error; the shard is unchanged.

        Residuals begin at zero again. Waits for exchanges that are under way: abort the collectives
        before, and they end at once.
        """
        for handle in (*self._gathering.values(), *self._reductions.handles):
            try:
                handle.wait()
            except Exception:  # why it is given up
                continue
        self._gathering.clear()
        self._reductions.abandon()
        for buffers in self.buffers:
            buffers.drop_gradient()
            buffers.free()
        self._forget()

    def close(self) -> None:
        """Takes the hooks off; the model may be given to the engine of another group."""
        self.abandon()
        for handle in self._handles:
            handle.remove()

    @property
    def nbytes(self) -> int:
        """Of gathered weights and gradients that are held now."""
        return self._reductions.nbytes + sum(buffers.nbytes for buffers in self.buffers)

    @property
    def residual_nbytes(self) -> int:
        """Of residuals, which are held all the time."""
        return self._reductions.residual_nbytes

    # Moments of a pass

    def before_forward(self, unit: int) -> Call | None:
        """The unit's module is called."""
        if self._phase == "idle":
            raise ConfigError(
                f"{self._name(unit)} is called outside of a step; its weights are with their "
                f"owners, and are gathered for micro-batches and evaluations only"
            )
        for number in self._resident:
            self._need(number)
        self._need(unit)
        if self._phase == "backward":
            return None  # activation checkpointing computes it once more
        if unit not in self._resident:
            self._trace.append(unit)
        elif self._phase == "evaluation":
            self._trace = []  # another pass
        self._ahead(self._order, len(self._trace), does=True)
        if self._phase == "evaluation":
            return None
        if not torch.is_grad_enabled() and self.buffers[unit].trains:
            raise ConfigError(
                f"{self._name(unit)} trains and is called without gradients: reentrant activation "
                f"checkpointing does that, and loses gradients; use checkpoint(..., "
                f"use_reentrant=False), or call the model outside of torch.no_grad()"
            )
        self._open[unit] += 1
        return Call(unit)

    def after_forward(self, unit: int, call: Call | None) -> None:
        """The unit's module returns."""
        is_last = len(self._trace) >= len(self._order)
        # The last one is the first that backward needs.
        if self._phase != "backward" and not (self._phase == "forward" and is_last):
            self._let_go(unit, unless=self._resident)

    def before_backward(self, call: Call) -> None:
        """The gradient of one of the unit's outputs is there."""
        self._turn_back()
        self._check_open(call.unit, self._name(call.unit))
        self._need(call.unit)
        if not call.began_backward and call.unit not in self._resident:
            self._turn += 1
            self._ahead(self._trace[::-1], self._turn, does=self._budget.gathers)
        call.began_backward = True

    def after_backward(self, call: Call) -> None:
        """The gradients of all inputs of a call, and of the weights it used, are there."""
        self._open[call.unit] -= 1
        if self._open[call.unit] == 0:
            self._let_go(call.unit, unless=self._resident)
            if self.buffers[call.unit].trains:
                self._reduce(call.unit)

    # Gathering

    def _need(self, unit: int) -> None:
        """Returns once the unit's weights are there."""
        self._gather(unit)
        handle = self._gathering.get(unit)
        if handle is not None:
            with self.seconds.of("gather"):
                handle.wait()
            del self._gathering[unit]
            self.shard.release_unit(unit, "weights")

    def _ahead(self, order: Sequence[int], place: int, *, does: bool) -> None:
        if does and place < len(order):
            self._gather(order[place])

    def _gather(self, unit: int) -> None:
        buffers = self.buffers[unit]
        if buffers.has_weights:
            return
        weights = buffers.allocate()
        master = self.shard.of(unit, "weights")
        own = self._parts[unit].of(weights)
        codec = self._parameter_codec
        if codec is None:
            own.copy_(master)  # rounded to what is computed in: as it is sent
            master = own
        # Counted, because passes, prefetching and recomputing gather a unit several times.
        key = Key(self.group, self._step, "gather", self._gathers[unit], unit)
        self._gathers[unit] += 1
        self._gathering[unit] = self.collectives.all_gather(key, master, weights, codec=codec)

    def _let_go(self, unit: int, *, unless: frozenset[int] = frozenset()) -> None:
        if unit in unless or not self.buffers[unit].has_weights:
            return
        handle = self._gathering.get(unit)
        if handle is not None:  # gathered ahead and not used: it cannot be called back
            handle.wait()
            del self._gathering[unit]
        self.buffers[unit].free()

    # Gradients

    def _arrived(self, unit: int, held: Held, _: nn.Parameter) -> None:
        """Autograd has left the gradient of a parameter."""
        self._turn_back()
        self._check_open(unit, repr(held.spec.name))
        buffers = self.buffers[unit]
        if not buffers.has_gradient:
            self._reductions.settle(leaving=int(self._budget.reduces))
            buffers.open_gradient()
        buffers.add_gradient(held, scale=self._tokens)

    def _check_open(self, unit: int, what: str) -> None:
        if self._phase != "backward" or unit in self._reduced:
            raise ConfigError(
                f"a gradient of {what} comes when its unit's is summed already; reentrant "
                f"activation checkpointing and second backward passes do that; use "
                f"checkpoint(..., use_reentrant=False) and one backward pass for a micro-batch"
            )

    def _reduce(self, unit: int) -> None:
        self._reduced.add(unit)
        if not self.buffers[unit].has_gradient:
            self._reductions.settle(leaving=0)
        gradient = self.buffers[unit].take_gradient()
        if self.keeps is not None:
            self.keeps(unit, gradient)
            return
        own = self._parts[unit].of(gradient)
        key = Key(self.group, self._step, "reduce", self._micro, unit)
        self._reductions.begin(self.collectives, key, unit, gradient, own)

    # Bookkeeping

    def _turn_back(self) -> None:
        """The backward pass has begun, if it is that of a micro-batch."""
        if self._phase == "forward":
            self._phase = "backward"
            self._turn = 0

    def _new_step(self, step: int) -> None:
        if step != self._step:
            self.free()  # they were of the step before
            self._forget()
            self._step = step

    def _forget(self) -> None:
        """As if nothing had been computed."""
        self._phase = "idle"
        self._step = -1
        self._micro = self._tokens = self._turn = 0
        self._trace = []
        self._open, self._gathers = Counter(), Counter()
        self._reduced = set()
        self._reductions.summed.clear()

    def _attached(self, unit: Unit) -> Iterator[Any]:
        number = unit.number
        if self._is_called(unit):
            yield from hooks.attach(self.model.get_submodule(unit.module), number, self)
        for held in self.buffers[number].held:
            if held.parameter.requires_grad:
                arrived = partial(self._arrived, number, held)
                parameter: Any = held.parameter  # torch leaves its hooks untyped
                yield parameter.register_post_accumulate_grad_hook(arrived)

    def _is_called(self, unit: Unit) -> bool:
        """Whether the unit's module has a forward pass; a list of modules has none."""
        kind = type(self.model.get_submodule(unit.module))
        return kind.forward is not nn.Module.forward

    def _expect(self, phase: Phase, what: str) -> None:
        if self._phase != phase:
            raise ConfigError(
                f"{what!r} while the engine is in its {self._phase} pass of step {self._step}; "
                f"finish it, or give it up with abandon()"
            )

    def _name(self, unit: int) -> str:
        return repr(self._units[unit].module or type(self.model).__name__)


def _check(model: nn.Module, shard: Shard, collectives: Collectives) -> None:
    fingerprint.check_names(model, shard.units.layout)
    if (collectives.rank, collectives.size) != (shard.rank, shard.size):
        raise ConfigError(
            f"the shard is of rank {shard.rank} of {shard.size}, the collectives of rank "
            f"{collectives.rank} of {collectives.size}; both must be of one group"
        )
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ConfigError(
                f"buffer {name!r} is on the meta device, so its values are unknown; build the "
                f"model's buffers on the CPU and only its parameters on meta"
            )


def _check_codecs(
    shard: Shard,
    computes: torch.dtype | None,
    parameters: WireCodec | None,
    gradients: WireCodec | None,
    *,
    residuals: bool,
) -> None:
    if parameters is not None and computes not in (None, shard.dtype):
        raise ConfigError(
            f"parameters travel as {parameters.name!r} and are computed in {computes}; passes in "
            f"{computes} gather what they compute with, so leave the codec out"
        )
    for codec in (parameters, gradients):
        if codec is not None and shard.dtype != torch.float32:
            raise ConfigError(f"codec {codec.name!r} takes torch.float32, not {shard.dtype}")
    if residuals and gradients is None:
        raise ConfigError("residuals keep what a codec of gradients drops, and there is none")
