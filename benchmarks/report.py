"""What every benchmark prints: one object with machine, versions, results and bars."""

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

_PACKAGES = ("torch", "numpy", "grpcio", "fastapi", "sqlalchemy", "atoll")


@dataclass(frozen=True)
class Bar:
    """One aim of an issue: it holds when `value` is at most `aim`; with `at_least`, at least."""

    name: str
    value: float
    aim: float
    at_least: bool = False

    def as_json(self) -> dict[str, Any]:
        holds = self.value >= self.aim if self.at_least else self.value <= self.aim
        return {**asdict(self), "holds": holds}


def report(results: Any, bars: list[Bar]) -> dict[str, Any]:
    """The object that `--json` prints."""
    return {
        "machine": {
            "cores": os.cpu_count(),
            "processor": _processor(),
            "system": platform.platform(),
            "python": platform.python_version(),
        },
        "versions": {name: metadata.version(name) for name in _PACKAGES},
        "results": results,
        "bars": [bar.as_json() for bar in bars],
    }


def show(found: dict[str, Any], *, as_json: bool) -> None:
    """Prints the whole object, or its bars for people."""
    if as_json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return
    for bar in found["bars"]:
        verdict = "holds" if bar["holds"] else "MISSED"
        aim = f"{'at least' if bar['at_least'] else 'aim'} {bar['aim']:g}"
        sys.stdout.write(f"{bar['name']:44s} {bar['value']:10.3f}  {aim}  {verdict}\n")


def _processor() -> str:
    with open("/proc/cpuinfo") as file:
        names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.machine()
