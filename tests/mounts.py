"""A filesystem of its own for a test: small, so that it can be full, and full when asked."""

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

_FILLER = "filler"
_STEPS = (1 << 16, 1 << 12)


class SmallDisk:
    """A mounted tmpfs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self) -> None:
        """Takes all the room that is left."""
        with (self.path / _FILLER).open("ab", buffering=0) as file:
            for step in _STEPS:
                try:
                    while True:
                        file.write(b"\0" * step)
                except OSError as exc:
                    if exc.errno != errno.ENOSPC:
                        raise

    def free(self) -> None:
        """Gives it back."""
        (self.path / _FILLER).unlink()


@contextmanager
def small_disk(path: Path, skip: Callable[[str], NoReturn], *, nbytes: int) -> Iterator[SmallDisk]:
    """A disk of `nbytes` at `path`, gone after the block; skips where nothing may be mounted."""
    path.mkdir()
    if os.geteuid() != 0:
        skip("only root may mount a small disk")
    options = ["-t", "tmpfs", "-o", f"size={nbytes},mode=0700", "tmpfs"]
    mounted = subprocess.run(["mount", *options, str(path)], capture_output=True, text=True)
    if mounted.returncode != 0:
        skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
