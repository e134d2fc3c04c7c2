"""`check`: gradients of ranks against one process, of whatever kind of declaration is known."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from atoll.errors import AtollError, ConfigError
from atoll.pools.gradcheck import loading, loop_check, topology_check
from atoll.pools.gradcheck.asked import Asked, Checker, Ranks, Sizes
from atoll.pools.gradcheck.crew import Crews
from atoll.pools.gradcheck.loading import Place
from atoll.pools.gradcheck.report import Report
from atoll.pools.loop import Loop
from atoll.pools.topology import Topology

log = logging.getLogger(__name__)

# One line for each kind of declaration that a file may hold.
CHECKERS: Mapping[type, Checker] = {
    Topology: topology_check.check_topology,
    Loop: loop_check.check_loop,
}


def check(
    subject: object,
    *,
    sizes: Sequence[Sizes] | None = None,
    ranks: Ranks | None = None,
    mutants: bool = False,
    steps: int = 2,
    crews: Crews | None = None,
) -> Report:
    """The report of one declaration; what it refuses is in the report too.

    Without `sizes` and `ranks` the declaration's own are taken. `crews` are processes to use and
    leave running; else some are started and ended.
    """
    asked = Asked(sizes, ranks, mutants, steps)
    place = loading.place_of(subject, defined_in=_written_in(subject))
    name = place.path.name if place else type(subject).__name__
    return _reported(name, lambda held: _checked(subject, place, asked, held), crews)


def check_file(path: Path, asked: Asked, *, crews: Crews) -> Report:
    """The report of what a file declares."""

    def checked(held: Crews) -> Report:
        module = loading.load(path, dtype=torch.float64)
        name, subject = loading.only(module, list(CHECKERS))
        return _checked(subject, Place(path, name), asked, held)

    return _reported(str(path), checked, crews)


def _checked(subject: object, place: Place | None, asked: Asked, crews: Crews) -> Report:
    for kind, checker in CHECKERS.items():
        if isinstance(subject, kind):
            return checker(subject, place, asked, crews)
    kinds = " or ".join(kind.__name__ for kind in CHECKERS)
    raise ConfigError(f"{type(subject).__name__!r} is not a {kinds}, which are what can be checked")


def _reported(name: str, checked: Callable[[Crews], Report], crews: Crews | None) -> Report:
    with ExitStack() as stack:
        held = crews if crews is not None else stack.enter_context(Crews())
        try:
            return replace(checked(held), subject=name)
        except AtollError as error:
            log.debug("check refused", exc_info=True)
            return Report(name, refusal=str(error))


def _written_in(subject: object) -> str | None:
    """The module of a declaration's functions, where the declaration itself stands, too."""
    return subject.written_in if isinstance(subject, Loop | Topology) else None
