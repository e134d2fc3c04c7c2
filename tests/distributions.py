"""Distributions made by hand: a folder for `sys.path` that brings a strategy by its entry point."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from atoll.strategies import registry

RELAY = Path(__file__).parent / "outside" / "relay.py"


def write(site: Path, strategy: str, target: str, source: str) -> Path:
    """A distribution whose entry point `strategy` is `target`, in a module with this `source`."""
    module, _, _ = target.partition(":")
    info = site / f"atoll_{module}-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (site / f"{module}.py").write_text(source)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: atoll-{module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{strategy} = {target}\n")
    return site


@contextmanager
def relay_installed(site: Path) -> Iterator[None]:
    """While it lasts this process finds the relay of `tests/outside`, as if installed."""
    write(site, "relay", "relay:Relay.of", RELAY.read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        yield
