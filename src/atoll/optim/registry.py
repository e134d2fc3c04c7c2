"""Outer optimizers by the name a run's settings give."""

from collections.abc import Mapping
from dataclasses import fields

from atoll.errors import ConfigError
from atoll.optim.adam import Adam
from atoll.optim.base import OuterOptimizer
from atoll.optim.nesterov import Nesterov
from atoll.optim.sgd import Sgd

_KNOWN: dict[str, type[Sgd] | type[Nesterov] | type[Adam]] = {
    known.name: known for known in (Sgd, Nesterov, Adam)
}


def build(name: str, settings: Mapping[str, float]) -> OuterOptimizer:
    """The outer optimizer `name` with exactly its `settings`.

    Raises ConfigError naming what is unknown or missing, with what is known.
    """
    optimizer = _KNOWN.get(name)
    if optimizer is None:
        raise ConfigError(
            f"outer optimizer {name!r} is unknown; known ones are {', '.join(sorted(_KNOWN))}"
        )
    wanted = {field.name for field in fields(optimizer)}
    if unknown := sorted(set(settings) - wanted):
        raise ConfigError(
            f"outer optimizer {name!r} has no setting {unknown[0]!r}; "
            f"it takes {', '.join(sorted(wanted))}"
        )
    if missing := sorted(wanted - set(settings)):
        raise ConfigError(
            f"outer optimizer {name!r} lacks {missing[0]!r}; it takes {', '.join(sorted(wanted))}"
        )
    return optimizer(**settings)
