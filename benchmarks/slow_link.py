"""A slow link inside this machine: two network namespaces joined by a pair of shaped devices.

Needs root and iproute2. Whatever was made is gone at the end, also after an error.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

DEVICE = "slow0"
_PREFIX = 30  # a network of two addresses, which nothing else in the two namespaces uses


@dataclass(frozen=True)
class Side:
    """One end of the link."""

    namespace: str
    address: str

    @property
    def program(self) -> tuple[str, ...]:
        """Words that, put before a command, run it on this side, under the same process id."""
        return ("ip", "netns", "exec", self.namespace)


def check() -> None:
    """Ends the program with a sentence where no link can be made."""
    if os.geteuid() != 0:
        raise SystemExit(
            f"user id {os.geteuid()} cannot make network namespaces; run this benchmark as root"
        )
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        raise SystemExit(
            f"{' and '.join(missing)} not found; install iproute2 "
            f"(apt-get update && apt-get install iproute2)"
        )


@contextmanager
def slow_link(*, megabits: int) -> Iterator[tuple[Side, Side]]:
    """Two sides whose traffic is held to `megabits` a second, each way by itself."""
    check()
    names = [f"atoll-{os.getpid()}-{end}" for end in ("a", "b")]
    sides = Side(names[0], "10.213.77.1"), Side(names[1], "10.213.77.2")
    with ExitStack() as made:
        for side in sides:
            _ip("netns", "add", side.namespace)
            made.callback(_ip, "netns", "delete", side.namespace)  # the device goes with it
        there = ("type", "veth", "peer", "name", DEVICE, "netns", sides[1].namespace)
        _ip("-n", sides[0].namespace, "link", "add", DEVICE, *there)
        for side in sides:
            where = ("-n", side.namespace)
            _ip(*where, "address", "add", f"{side.address}/{_PREFIX}", "dev", DEVICE)
            for device in ("lo", DEVICE):
                _ip(*where, "link", "set", device, "up")
            shaped = ("tbf", "rate", f"{megabits}mbit", "burst", "128kb", "latency", "50ms")
            _run("tc", *where, "qdisc", "add", "dev", DEVICE, "root", *shaped)
        yield sides


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)!r} ended with {done.returncode}: {done.stderr.strip()}")
