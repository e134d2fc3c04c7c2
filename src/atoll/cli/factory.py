"""`--model module:factory`: a model from this machine's own code.

The only place that imports code by name, and the name comes from the command line alone.
"""

import importlib
import os
import sys

from torch import nn

from atoll.errors import ConfigError

SHAPE = "--model takes module:factory, where factory() returns a torch.nn.Module"


def build(spec: str) -> nn.Module:
    """The model that the factory named by `spec` returns; the working directory is searched too.

    An error inside the user's code is raised as it is, with its traceback.
    """
    module_name, _, factory_name = spec.partition(":")
    if not all(part.isidentifier() for part in module_name.split(".")) or not (
        factory_name.isidentifier()
    ):
        raise ConfigError(f"--model {spec!r} names no factory; {SHAPE}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        if exc.name is None or not f"{module_name}.".startswith(f"{exc.name}."):
            raise  # the module is there; something it imports is not
        raise ConfigError(
            f"--model {spec!r}: there is no module {exc.name!r} in the working directory or among "
            f"the installed packages; {SHAPE}"
        ) from exc
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        raise ConfigError(f"--model {spec!r}: {module_name!r} has no {factory_name!r}; {SHAPE}")
    model = factory()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"--model {spec!r} returned {type(model).__name__!r}; {SHAPE}")
    return model
