"""Whether a module, whoever built it, has the parameters of the run's layout."""

from torch import Tensor, nn

from atoll.errors import ConfigError, LayoutMismatch
from atoll.layout import Layout


def check(model: nn.Module, expected: Layout) -> None:
    """Refuses a model whose parameters are not the run's, naming the first that differs.

    By name: the order of a user's parameters is free, because the run's layout places them.
    """
    found = dict(model.named_parameters())
    for spec in expected.tensors:
        mine = [spec.name, spec.dtype, list(spec.shape)]
        parameter = found.pop(spec.name, None)
        if parameter is None:
            raise LayoutMismatch(
                f"the model has no parameter {spec.name!r} where the run's layout has {mine!r}; "
                f"names, shapes and dtypes must be the run's"
            )
        theirs = [spec.name, _dtype(parameter), list(parameter.shape)]
        if theirs != mine:
            raise LayoutMismatch(
                f"the model has {theirs!r} where the run's layout has {mine!r}; "
                f"names, shapes and dtypes must be the run's"
            )
        if parameter.is_meta:
            raise ConfigError(
                f"parameter {spec.name!r} is on the meta device; build the model with storage, "
                f"for example by model.to_empty(device='cpu')"
            )
    for name, parameter in found.items():
        raise LayoutMismatch(
            f"the model has {[name, _dtype(parameter), list(parameter.shape)]!r}, which the run's "
            f"layout lacks; names, shapes and dtypes must be the run's"
        )


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
