"""How many threads torch computes with; the only place that sets it.

It is a process's own and part of a run's settings: an island uses `inner.threads`, because a matrix
product over two threads adds in another order and has other bits. A coordinator uses one, because
its outer step spreads tiles over threads of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def use(count: int) -> None:
    """From here on, in this process."""
    torch.set_num_threads(count)


@contextmanager
def kept() -> Iterator[None]:
    """What is used before is used again after it: for a run inside somebody else's process."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        use(before)
