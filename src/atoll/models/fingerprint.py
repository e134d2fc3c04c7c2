"""Whether a module, whoever built it, has the parameters of the run's layout."""

from torch import nn

from atoll.errors import ConfigError, LayoutMismatch
from atoll.layout import Layout


def check(model: nn.Module, expected: Layout) -> None:
    """Refuses a model whose parameters are not the run's, or have no storage."""
    check_names(model, expected)
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ConfigError(
                f"parameter {name!r} is on the meta device; build the model with storage, "
                f"for example by model.to_empty(device='cpu')"
            )


def check_names(model: nn.Module, expected: Layout) -> None:
    """Refuses a model whose parameters are not the run's, naming the first that differs.

    By name: the order of a user's parameters is free, because the run's layout places them.
    """
    rule = "names, shapes and dtypes must be the run's"
    found: dict[object, list[object]] = {
        name: [name, str(parameter.dtype).removeprefix("torch."), list(parameter.shape)]
        for name, parameter in model.named_parameters()
    }
    for mine in expected.table():
        theirs = found.pop(mine[0], None)
        if theirs != mine:
            has = f"no parameter {mine[0]!r}" if theirs is None else repr(theirs)
            raise LayoutMismatch(f"the model has {has} where the run's layout has {mine!r}; {rule}")
    for theirs in found.values():
        raise LayoutMismatch(f"the model has {theirs!r}, which the run's layout lacks; {rule}")
