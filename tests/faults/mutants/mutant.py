"""What a mutant is: one rule taken out of the production code, and the seeds that show it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Any

import pytest

from atoll.coordinator.members.control import Control
from atoll.coordinator.rounds.rounds import Rounds
from atoll.errors import AtollError
from atoll.ledger.connection import Connection, Mode
from atoll.ledger.database import Database
from atoll.protocol.control import Command
from atoll.simulate.faults import run as simulation
from atoll.simulate.faults import scenario as scenarios
from atoll.simulate.faults.scenario import Scenario, Size
from atoll.strategies.base import Strategy

Patch = pytest.MonkeyPatch
Wanted = Callable[[Scenario], bool]
SEEDS = 60  # tried for each mutant, until one is caught
SYNC = Size(mode_name="sync")
ASYNC = Size(mode_name="async")
STREAMING = Size(mode_name="streaming")
RELAY = Size(strategy_name="relay")  # two rounds open at a time, two fragments


def any_(_: Scenario) -> bool:
    """Every seed will do."""
    return True


def having(*kinds: str) -> Wanted:
    """Seeds that have these kinds of faults."""
    return lambda scenario: all(scenario.has(kind) for kind in kinds)


def lacking(kind: str) -> Wanted:
    """Seeds without this kind of faults, which would show something else first."""
    return lambda scenario: not scenario.has(kind)


def waiting_for_all(*kinds: str) -> Wanted:
    """Seeds whose rounds wait for every island, with one to spare and leases that do not end."""

    def wanted(scenario: Scenario) -> bool:
        members = scenario.settings["membership"]
        spare = scenario.islands > members["min_workers"] and members["quorum"] == 0
        return spare and working(kinds=kinds, lease_seconds=0.0)(scenario)

    return wanted


def crowded(*kinds: str) -> Wanted:
    """Seeds with many faults, of these kinds and few others."""

    def wanted(scenario: Scenario) -> bool:
        return having(*kinds)(scenario) and scenario.gap_seconds == 1.5 and len(scenario.kinds) < 9

    return wanted


def working(*, kinds: tuple[str, ...] = (), **settings: Any) -> Wanted:
    """Seeds that dispatch with these settings and have these kinds of faults."""

    def wanted(scenario: Scenario) -> bool:
        work = scenario.settings["work"]
        return having(*kinds)(scenario) and all(work[n] == v for n, v in settings.items())

    return wanted


def feeding(*kinds: str, most: float = 1.0) -> Wanted:
    """Seeds whose islands carry what rounding lost, at `most` so much of it, with these faults."""

    def wanted(scenario: Scenario) -> bool:
        upload = scenario.settings["upload"]
        is_fed = upload["codec"] != "fp32" and upload["error_feedback"]
        return having(*kinds)(scenario) and bool(is_fed) and upload.get("decay", 1.0) <= most

    return wanted


def streaming(*kinds: str, **least: float) -> Wanted:
    """Seeds whose islands go on from their own weights, with these kinds of faults.

    With at `least` so many fragments or delayed steps, or so much of their own in a merge.
    """

    def wanted(scenario: Scenario) -> bool:
        settings = scenario.settings
        return having(*kinds)(scenario) and all(settings[n] >= value for n, value in least.items())

    return wanted


def seeds_where(wanted: Wanted, size: Size = SYNC) -> tuple[int, ...]:
    """The first seeds whose scenario has what a mutant needs to show."""
    found = (seed for seed in count() if wanted(scenarios.draw(seed, size)))
    return tuple(islice(found, SEEDS))


@dataclass(frozen=True)
class Mutant:
    """One rule taken out; seeds with what it takes to show are tried until one is caught."""

    name: str
    invariant: str
    apply: Callable[[Patch], None]
    wanted: Wanted = any_
    size: Size = SYNC

    @property
    def seeds(self) -> tuple[int, ...]:
        return seeds_where(self.wanted, self.size)


def adding_to(mutants: list[Mutant]) -> Callable[..., Any]:
    """A decorator that adds a function, which patches, to `mutants` under its own name.

    It takes the invariant that is meant to catch it, what a seed needs for it to show, and the size
    of the runs: what synchronous runs cannot show is shown by the relay (`RELAY`) or in `ASYNC`.
    """

    def mutant(invariant: str, wanted: Wanted = any_, size: Size = SYNC) -> Callable[..., Any]:
        def add(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
            name = apply.__name__.replace("_", " ")
            mutants.append(Mutant(name, invariant, apply, wanted, size))
            return apply

        return add

    return mutant


def during(patch: Patch, owner: Any, name: str, *change: Any) -> None:
    """While `owner.name` runs, and only then, another object is patched as `setattr` would."""
    real = getattr(owner, name)

    def changed(*args: Any, **more: Any) -> Any:
        with patch.context() as inner:
            inner.setattr(*change)
            return real(*args, **more)

    patch.setattr(owner, name, changed)


def forgiving(patch: Patch, owner: Any, name: str, refusal: type[AtollError]) -> None:
    """A check that no longer refuses for this reason, which is the last that it looks for."""
    real = getattr(owner, name)

    def check(*args: Any, **more: Any) -> None:
        with suppress(refusal):
            real(*args, **more)

    patch.setattr(owner, name, check)


class Otherwise:
    """A strategy with other answers, which are given the right strategy in front, and values."""

    def __init__(self, right: Strategy, answers: Mapping[str, Any], **values: Any) -> None:
        self._right = right
        self._answers = answers
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        if name in self._answers:
            return partial(self._answers[name], self._right)
        return getattr(self._right, name)


def misasking(patch: Patch, **answers: Callable[..., Any]) -> None:
    """The coordinator's rounds ask a strategy with other `answers`; invariants ask the real one."""
    real = Rounds.strategy_of
    patch.setattr(
        Rounds, "strategy_of", lambda self, number: Otherwise(real(self, number), answers)
    )


def in_two(patch: Patch, owner: Any, name: str, *, within: tuple[Any, str] | None = None) -> None:
    """A transaction that comes to `owner.name` is committed there and goes on as another one.

    With `within` only while that method runs.
    """
    real, writing = getattr(owner, name), Database.writing
    begun: list[Database] = []

    @contextmanager
    def remembered(self: Database) -> Iterator[Connection]:
        with writing(self) as connection:
            begun[:] = [self]
            yield connection

    def commit_first(*args: Any, **more: Any) -> Any:
        database = begun[0]
        database._end()
        database.connection.commit()
        database._begin(Mode.WRITING)
        return real(*args, **more)

    patch.setattr(Database, "writing", remembered)
    if within is None:
        patch.setattr(owner, name, commit_first)
    else:
        during(patch, *within, owner, name, commit_first)


def answering(value: Any) -> Callable[..., Any]:
    """A function that says `value` whatever it is asked."""
    return lambda *_, **__: value


def never_paused() -> property:
    """A `Control.command` that says to run when the operator wants a pause."""
    real = vars(Control)["command"]

    def command(self: Control) -> Command:
        wanted: Command = real.fget(self)
        return wanted.model_copy(update={"action": "run"}) if wanted.action == "pause" else wanted

    return property(command)


def first_violation(mutant: Mutant, patch: Patch) -> str | None:
    """The invariant that the mutant violates first, over its seeds."""
    mutant.apply(patch)
    outcomes = (simulation.run(seed, mutant.size) for seed in mutant.seeds)
    return next((outcome.invariant for outcome in outcomes if not outcome.holds), None)
