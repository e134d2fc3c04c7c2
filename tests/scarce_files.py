"""A process that may open few files or no more: the system's own limit, lowered and given back."""

import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def at_most(files: int) -> Iterator[None]:
    """Inside, this process may have so many files open, counted from its first."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def leaving(files: int) -> int:
    """The limit that lets this process open so many files more than it has."""
    with os.scandir("/proc/self/fd") as entries:
        found = {int(entry.name) for entry in entries}
    number, free = 0, 0
    while free < files:
        free += number not in found
        number += 1
    return number


@contextmanager
def no_file_left(*, spare: int = 0) -> Iterator[None]:
    """Inside, this process can open `spare` more files and no other."""
    with at_most(leaving(spare + 8)), ExitStack() as given_back:
        taken = []
        try:
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            pass
        for descriptor in taken[spare:]:
            given_back.callback(os.close, descriptor)
        for descriptor in taken[:spare]:
            os.close(descriptor)
        yield
