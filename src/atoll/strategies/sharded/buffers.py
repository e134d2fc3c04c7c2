"""One unit's memory on one rank: its weights while they are gathered, and its gradient.

The weights are one flat buffer, of which the parameters are views. It keeps its identity and loses
its memory: backward reads what is in it then, so a unit may be freed after its forward pass and
filled again. While it has none, the model shows placeholders on the meta device in its place, so
that whoever uses a freed weight is told so by torch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atoll.errors import ConfigError
from atoll.layout import TensorSpec
from atoll.strategies.sharded.units import ROOT, Unit


@dataclass(frozen=True)
class Place:
    """Where a model has a parameter; a tied one has several."""

    module: nn.Module
    attribute: str
    path: str  # the parameter's full name there


@dataclass(frozen=True)
class Held:
    """A parameter of a unit."""

    spec: TensorSpec  # in the unit's layout
    parameter: nn.Parameter  # a view of the unit's weights
    placeholder: nn.Parameter
    places: tuple[Place, ...]

    def show(self, *, gathered: bool) -> None:
        """What the model has in its place."""
        for place in self.places:
            shown = self.parameter if gathered else self.placeholder
            place.module._parameters[place.attribute] = shown


class UnitBuffers:
    """The weights and the gradient of one unit. Both have memory only when they are needed."""

    def __init__(
        self, unit: Unit, places: "Places", *, computes: torch.dtype, sums: torch.dtype
    ) -> None:
        self.unit = unit
        self._weights = torch.empty(unit.size, dtype=computes)
        self._sums = sums  # dtype of the gradient
        self._gradient: Tensor | None = None
        self._came: set[str] = set()  # whose gradient is in it
        self.held = tuple(self._take_over(spec, places) for spec in unit.layout.tensors)
        self.trains = any(held.parameter.requires_grad for held in self.held)
        self.has_weights = True
        self.free()

    def _take_over(self, spec: TensorSpec, found: "Places") -> Held:
        view = spec.span.of(self._weights).view(spec.shape)
        given, places = found.of(spec.name)
        for place in places:
            if self.unit.module != ROOT and not place.path.startswith(self.unit.module + "."):
                raise ConfigError(
                    f"parameter {spec.name!r} of unit {self.unit.module!r} is {place.path!r}, too; "
                    f"a block is freed after use, so it shares its weights with nothing outside; "
                    f"name the shared one outside of the blocks"
                )
        trains = given.requires_grad
        placeholder = nn.Parameter(given.detach().to("meta"), trains)
        return Held(spec, nn.Parameter(view, trains), placeholder, places)

    # Weights

    def allocate(self) -> Tensor:
        """The flat weights with memory, not filled, as whoever fills them may write to them."""
        nbytes = self.unit.size * self._weights.element_size()
        self._weights.untyped_storage().resize_(nbytes)
        self.has_weights = True
        for held in self.held:
            held.show(gathered=True)
        # Not the buffer itself: autograd would take what is written to it for a change of values
        # that it saved, while they are those very values again.
        return self._weights.data

    def free(self) -> None:
        """The weights' memory goes."""
        self._weights.untyped_storage().resize_(0)
        self.has_weights = False
        for held in self.held:
            held.show(gathered=False)

    # Gradient

    @property
    def has_gradient(self) -> bool:
        return self._gradient is not None

    def open_gradient(self) -> None:
        """Memory for the unit's gradient, not filled."""
        self._gradient = torch.empty(self.unit.size, dtype=self._sums)

    def add_gradient(self, held: Held, *, scale: int) -> None:
        """Moves the gradient that autograd left at a parameter, times `scale`, to the unit's."""
        assert self._gradient is not None and held.parameter.grad is not None
        found, held.parameter.grad = held.parameter.grad, None
        place = held.spec.span.of(self._gradient)
        if held.spec.name in self._came:
            place.add_(_scaled(found, scale, self._sums))
            return
        self._came.add(held.spec.name)
        if scale == 0:
            place.zero_()  # not times zero: the stand-in row may have overflowed
        elif found.dtype == self._sums:
            torch.mul(found.reshape(-1), float(scale), out=place)
        else:
            place.copy_(found.reshape(-1)).mul_(float(scale))  # widened once, then scaled

    def take_gradient(self) -> Tensor:
        """The whole unit's gradient, zero where none came; the unit has none afterwards."""
        if self._gradient is None:
            self.open_gradient()
        assert self._gradient is not None
        for held in self.held:
            if held.spec.name not in self._came:
                held.spec.span.of(self._gradient).zero_()
        found = self._gradient
        self.drop_gradient()
        return found

    def drop_gradient(self) -> None:
        """Nothing of it is left, at the parameters neither."""
        self._gradient = None
        self._came.clear()
        for held in self.held:
            held.parameter.grad = None

    @property
    def nbytes(self) -> int:
        """What it holds now."""
        weights = self._weights.untyped_storage().nbytes()
        return weights + (0 if self._gradient is None else self._gradient.nbytes)


def _scaled(gradient: Tensor, scale: int, dtype: torch.dtype) -> Tensor:
    flat = gradient.reshape(-1).to(dtype)
    return torch.zeros_like(flat) if scale == 0 else flat * float(scale)


class Places:
    """Where a model has its parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._found: dict[nn.Parameter, list[Place]] = {}  # a parameter is hashed by identity
        for name, module in model.named_modules():
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    path = f"{name}.{attribute}" if name else attribute
                    places = self._found.setdefault(parameter, [])
                    places.append(Place(module, attribute, path))

    def of(self, name: str) -> tuple[nn.Parameter, tuple[Place, ...]]:
        """The parameter of that name, and everywhere it is."""
        parameter = self._model.get_parameter(name)
        return parameter, tuple(self._found[parameter])
