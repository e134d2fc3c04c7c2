"""Strategies by the names a manifest gives: the only reader of `strategy` and `mode`.

Atoll's own are listed here. Others are found by the entry-point group `atoll.strategies` of
installed distributions: the entry's name is the run's `strategy`, and it points to a callable that
makes a `base.Strategy` from a manifest, or raises ConfigError for settings it does not take.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from atoll.errors import AtollError, ConfigError
from atoll.protocol.manifest import Manifest
from atoll.strategies.base import Strategy
from atoll.strategies.diloco.asynchronous import Asynchronous
from atoll.strategies.diloco.streaming import Streaming
from atoll.strategies.diloco.sync import Sync

GROUP = "atoll.strategies"
BUILT_IN = "diloco"
_MODES: Mapping[str, Callable[[Manifest], Strategy]] = {
    "async": Asynchronous.of,
    "streaming": Streaming.of,
    "sync": Sync.of,
}
# What later versions will know; asking for it now is refused by name instead of as a typing error.
_NOT_BUILT = {"strategy": ("sharded", "gather", "pools")}

Factory = Callable[[Manifest], Strategy]


def of(manifest: Manifest) -> Strategy:
    """The strategy of a run under `manifest`; ConfigError when this program has no such one."""
    factory = _factory(manifest.strategy, manifest.mode)
    with _naming(manifest.strategy):
        return factory(manifest)


def refuse_unknown(settings: Mapping[str, Any]) -> None:
    """ConfigError when a run file asks for a strategy or mode that this program does not have."""
    for name, coming in _NOT_BUILT.items():
        if settings.get(name) in coming:
            raise ConfigError(f"{name}={settings[name]!r} is not built in this version; {_known()}")
    _factory(str(settings.get("strategy", BUILT_IN)), str(settings.get("mode", "sync")))


def _factory(strategy: str, mode: str) -> Factory:
    if strategy == BUILT_IN:
        if mode not in _MODES:
            raise ConfigError(f"mode={mode!r} is not a mode of strategy 'diloco'; {_known()}")
        return _MODES[mode]
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
    """Strategies of other distributions, by name; Atoll's own name is not theirs to take."""
    return {entry.name: entry for entry in entry_points(group=GROUP) if entry.name != BUILT_IN}


def _known() -> str:
    others = "".join(f", and strategy {name!r}" for name in sorted(_installed()))
    *modes, last = map(repr, sorted(_MODES))
    return f"it runs strategy 'diloco' in mode {', '.join(modes)} or {last}{others}"
