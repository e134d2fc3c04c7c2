"""A user's file and what it declares: loaded by path, found by type, in this process or a rank.

The only place of a check that runs code by path; the path comes from the command line or from the
module that an object stands in.
"""

import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from atoll.errors import AtollError, ConfigError
from atoll.pools.gradcheck.crew_rank import described


@dataclass(frozen=True, slots=True)
class Place:
    """Where a declaration stands, so that another process can load it."""

    path: Path
    name: str  # the variable


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """What tensors are made of without a dtype; a file's data too, so it is loaded within."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def users(what: str) -> Iterator[None]:
    """Around a call of the user's code: what it raises becomes a refusal that names it."""
    try:
        yield
    except AtollError:
        raise
    except Exception as exc:
        raise ConfigError(
            f"{what} raised {described(exc)}; see to it that it runs by itself"
        ) from exc


def load(path: Path, *, dtype: torch.dtype) -> ModuleType:
    """The module of a file, executed anew; the working directory is searched for its imports."""
    if not path.is_file():
        raise ConfigError(f"{str(path)!r} is not a file; give one that holds a Topology or a Loop")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    name = f"atoll_checked_{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{str(path)!r} is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses of the file look for their module
    with default_dtype(dtype), users(f"loading {str(path)!r}"):
        spec.loader.exec_module(module)
    return module


def only(module: ModuleType, types: Sequence[type]) -> tuple[str, Any]:
    """The one variable of the module that is of these types, and its name."""
    found = {
        id(one): (name, one) for name, one in vars(module).items() if isinstance(one, tuple(types))
    }
    kinds = " or ".join(one.__name__ for one in types)
    if not found:
        raise ConfigError(
            f"{module.__file__!r} holds no {kinds} at its top level; a check needs exactly one"
        )
    if len(found) > 1:
        names = sorted(name for name, _ in found.values())
        raise ConfigError(
            f"{module.__file__!r} holds {len(found)} of {kinds}: {', '.join(names)}; a check needs "
            f"exactly one, so give each a file of its own"
        )
    return next(iter(found.values()))


def load_named(place: Place, kind: type, *, dtype: torch.dtype) -> Any:
    """What stands at a place, loaded anew."""
    found = getattr(load(place.path, dtype=dtype), place.name, None)
    if not isinstance(found, kind):
        raise ConfigError(
            f"{str(place.path)!r} has no {kind.__name__} named {place.name!r} when it is loaded by "
            f"its path; make it at the top level of the file"
        )
    return found


def place_of(subject: object, *, defined_in: str | None = None) -> Place | None:
    """Where an object stands among the loaded modules; `defined_in` is looked at first."""
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    modules.sort(key=lambda module: module.__name__ != defined_in)
    for module in modules:
        file = vars(module).get("__file__")
        names = [name for name, one in list(vars(module).items()) if one is subject]
        if file and names:
            return Place(Path(file).resolve(), names[0])
    return None
