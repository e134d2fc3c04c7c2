"""Strategies by the names a manifest gives: the only reader of `strategy` and `mode`.

Atoll's own are listed here. Others are found by the entry-point group `atoll.strategies` of
installed distributions: the entry's name is the run's `strategy`, and it points to a callable that
makes a `base.Strategy` from a manifest, or raises ConfigError for settings it does not take.

`any_of` gives the strategy of any run. `of` and `sharded` give those of a run that is known to
train in rounds of contributions, or by steps.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from atoll.errors import AtollError, ConfigError
from atoll.protocol.manifest import Manifest
from atoll.strategies.base import AnyStrategy, Strategy
from atoll.strategies.diloco.asynchronous import Asynchronous
from atoll.strategies.diloco.streaming import Streaming
from atoll.strategies.diloco.sync import Sync
from atoll.strategies.gather.strategy import Gather
from atoll.strategies.sharded import settings as sharded_settings
from atoll.strategies.sharded.strategy import Sharded

GROUP = "atoll.strategies"
DILOCO, GATHER, SHARDED = "diloco", "gather", "sharded"
BUILT_IN = (DILOCO, GATHER, SHARDED)
_SECTIONS = (GATHER, SHARDED)  # strategies with a section of their own, which is called like them
_MODES: Mapping[str, Callable[[Manifest], Strategy]] = {
    "async": Asynchronous.of,
    "streaming": Streaming.of,
    "sync": Sync.of,
}
# No strategies of a run; whoever asks for one is told what it is, not that it is a typing error.
_LIBRARIES = {"pools": "a library for scripts (atoll.pools, `atoll gradcheck`)"}

Factory = Callable[[Manifest], Strategy]


def any_of(manifest: Manifest) -> AnyStrategy:
    """The strategy of a run under `manifest`; ConfigError when this program has no such one."""
    return sharded(manifest) if manifest.strategy == SHARDED else of(manifest)


def of(manifest: Manifest) -> Strategy:
    """That of a run in rounds of contributions; ConfigError for any other."""
    factory = _factory(manifest.strategy, manifest.mode)
    for name in _sections_of_others(manifest.strategy):
        if getattr(manifest, name) != Manifest.model_fields[name].default:
            raise _foreign(name, manifest.strategy)
    with _naming(manifest.strategy):
        return factory(manifest)


def sharded(manifest: Manifest) -> Sharded:
    """That of a run whose ranks meet at every step; ConfigError for any other."""
    if manifest.strategy != SHARDED:
        raise ConfigError(
            f"strategy={manifest.strategy!r} trains in rounds of contributions; what is asked here "
            f"is for strategy {SHARDED!r}"
        )
    return Sharded.of(manifest)


def refuse_unknown(settings: Mapping[str, Any]) -> None:
    """ConfigError when a run file asks for a strategy or mode that this program does not have."""
    chosen = str(settings.get("strategy", DILOCO))
    if chosen in _LIBRARIES:
        raise ConfigError(
            f"strategy={chosen!r} is {_LIBRARIES[chosen]} and needs no coordinator; {_known()}"
        )
    if chosen != SHARDED:
        _factory(chosen, str(settings.get("mode", "sync")))


def check_stated(settings: Mapping[str, Any]) -> None:
    """ConfigError when a run file states what is not for its strategy, or leaves out what is."""
    chosen = settings.get("strategy", DILOCO)
    if chosen == SHARDED:
        sharded_settings.refuse_foreign(settings)
        return
    for name in _sections_of_others(chosen):
        if name in settings:
            raise _foreign(name, chosen)
    if "sync_every" not in settings:
        raise ConfigError("sync_every is missing; every run file sets it")


def _sections_of_others(chosen: object) -> list[str]:
    return [name for name in _SECTIONS if name != chosen]


def _foreign(section: str, chosen: object) -> ConfigError:
    return ConfigError(
        f"[{section}] is not for strategy={chosen!r}; leave it out, or set strategy = {section!r}"
    )


def _factory(strategy: str, mode: str) -> Factory:
    if strategy == DILOCO:
        if mode not in _MODES:
            raise ConfigError(f"mode={mode!r} is not a mode of strategy 'diloco'; {_known()}")
        return _MODES[mode]
    if strategy == GATHER:
        if mode != "sync":
            raise ConfigError(
                f"mode={mode!r} is not a mode of strategy 'gather', in which every island hands in "
                f"every round; leave it out"
            )
        return Gather.of
    if strategy == SHARDED:
        raise ConfigError(
            f"strategy={strategy!r} meets at every step and has no rounds of contributions; what "
            f"is asked here is for strategy {DILOCO!r}"
        )
    found = _installed().get(strategy)
    if found is None:
        raise ConfigError(
            f"strategy={strategy!r} is not installed here; {_known()}; install the distribution "
            f"that brings it (entry-point group {GROUP!r}), the same on coordinator and islands"
        )
    with _naming(strategy):
        factory: Factory = found.load()
    return factory


@contextmanager
def _naming(strategy: str) -> Iterator[None]:
    """Says whose code it is that fails: a strategy may come from another distribution."""
    try:
        yield
    except AtollError:
        raise
    except Exception as exc:
        raise ConfigError(
            f"strategy={strategy!r} cannot be used here: {type(exc).__name__}: {exc}; mend or "
            f"install again the distribution that brings it (entry-point group {GROUP!r})"
        ) from exc


def _installed() -> dict[str, EntryPoint]:
    """Strategies of other distributions, by name; Atoll's own names are not theirs to take."""
    return {entry.name: entry for entry in entry_points(group=GROUP) if entry.name not in BUILT_IN}


def _known() -> str:
    others = "".join(f", and strategy {name!r}" for name in sorted(_installed()))
    *modes, last = map(repr, sorted(_MODES))
    own = f"strategy {DILOCO!r} in mode {', '.join(modes)} or {last}"
    return f"it runs strategy {GATHER!r} or {SHARDED!r}, {own}{others}"
