"""A loop in one process: its terms called once on all rows, and plain autograd.

Nothing here knows a group, a rank's gradient or the user's step.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from atoll.errors import ConfigError
from atoll.pools.counted import Counted, Through
from atoll.pools.gradcheck import tensors
from atoll.pools.gradcheck.loading import users
from atoll.pools.gradcheck.outcome import ALL, Outcome
from atoll.pools.loop import Loop, Part, Parts, Term, rows_of

Grads = dict[str, Tensor]


class LoopReference:
    """The model with its weights, which are made here and nowhere else."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.parts: Parts = loop.whole()
        with users("@loop.model"), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the same weights in every check of the file
            self.model = self.parts.model()
        if not isinstance(self.model, nn.Module):
            raise ConfigError(
                f"@loop.model returned {type(self.model).__name__!r}; it makes a torch.nn.Module"
            )
        self.weights = tensors.weights(self.model)
        self.trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    def rows(self, index: Tensor) -> Any:
        """These rows, made anew."""
        with users("@loop.rows"):
            found = self.parts.rows(index)
        return tensors.cast_to(self.loop.dtype, found)

    def outcome(self, index: Tensor | None = None) -> Outcome:
        """Of one step on all rows, or on those of `index`."""
        found = self.terms(self._all() if index is None else index)
        losses = {name: self._loss(name, one) for name, one in found.items()}
        grads = {name: self._grads(name, loss) for name, loss in losses.items()}
        every = torch.stack(list(losses.values())).sum()
        together = self._grads(ALL, every)
        numbers = {name: float(loss.detach()) for name, loss in {**losses, ALL: every}.items()}
        norms = torch.stack([grad.double().norm() for grad in together.values()])
        counts = {name: one.count for name, one in found.items()}
        return Outcome({ALL: together, **grads}, numbers, counts, float(norms.norm()))

    def share(self, whole: Mapping[str, Part], index: Tensor) -> dict[str, Grads]:
        """What these rows add to the gradient of all, by lane; `whole` are the terms of all."""
        own = self.terms(index)
        lanes = {name: self._grads(name, self._share(name, whole[name], own[name])) for name in own}
        together: Grads = {}
        for lane in lanes.values():
            for name, grad in lane.items():
                together[name] = together[name] + grad if name in together else grad
        return {ALL: together, **lanes}

    def counts(self, indices: Sequence[Tensor]) -> dict[str, list[int]]:
        """By term, the count of each of these sets of rows."""
        with torch.no_grad():
            found = [self.terms(index) for index in indices]
        return {name: [one[name].count for one in found] for name in self.parts.terms}

    def terms(self, index: Tensor) -> dict[str, Part]:
        """Every term over these rows, from weights as they were made."""
        tensors.fill(self.model, self.weights)
        return {name: self._called(term, index) for name, term in self.parts.terms.items()}

    def _all(self) -> Tensor:
        return rows_of(0, ranks=1, rows=self.loop.num_rows)

    def _called(self, term: Term, index: Tensor) -> Part:
        with users(f"term {term.name!r}"):
            found = term.call(self.model, self.rows(index))
        if not isinstance(found, Counted | Through):
            raise ConfigError(
                f"term {term.name!r} returned {type(found).__name__!r}; it returns Counted(total, "
                f"count, unit), or Through where it is not linear in its sum"
            )
        return found

    def _loss(self, name: str, part: Part) -> Tensor:
        if part.count == 0:
            raise ConfigError(f"term {name!r} counts 0 {part.unit} over all rows; give it some")
        return self.loop.coeffs[name] * _bent(part, part.total, part.count)

    def _share(self, name: str, whole: Part, own: Part) -> Tensor:
        """The part of the loss whose gradient is these rows' own; the others' is constant."""
        total = own.total
        if isinstance(own, Through):
            total = whole.total.detach() + (own.total - own.total.detach())
        return self.loop.coeffs[name] * _bent(own, total, whole.count)

    def _grads(self, lane: str, loss: Tensor) -> Grads:
        """By the tensors that the loss is connected to."""
        if loss.dim() != 0 or not loss.requires_grad:
            raise ConfigError(
                f"term {lane!r} of shape {tuple(loss.shape)} reaches no parameter; it must be one "
                f"number that follows from the model's trained weights"
            )
        found = torch.autograd.grad(
            loss, list(self.trained.values()), retain_graph=True, allow_unused=True
        )
        pairs = zip(self.trained, found, strict=True)
        return {name: grad.detach() for name, grad in pairs if grad is not None}


def _bent(part: Part, total: Tensor, count: int) -> Tensor:
    if isinstance(part, Through):
        with users(f"`then` of a Through over {part.unit!r}"):
            return part.then(total, count)
    return total / float(count)
