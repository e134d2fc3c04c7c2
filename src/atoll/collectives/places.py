"""What becomes of a message that somebody waits for, done by whoever brings it, as it comes.

Read into memory of its own first it would be written and read once more, and another thread would
be woken for it, with cold caches.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from atoll.collectives import memory

ROOM_BYTES = 512 << 10  # of what is added at a time: it stays in the L2 cache

# Fills what it is given with what comes next; False when nothing more comes.
Read = Callable[[memoryview], bool]
Then = Callable[[], None]


class Place(Protocol):
    """Where one message belongs. Used by one thread at a time."""

    memory: memoryview  # the message's values, or what was made of them, once it is here
    then: Then | None  # called once, when it is

    def receive(self, read: Read, room: memoryview) -> bool:
        """Takes the message in; False when it breaks off.

        Sent again it is given here again, from its beginning. `room` may be used meanwhile.
        """
        ...

    def put(self, data: memoryview) -> None:
        """Takes in a message that came whole."""
        ...


class Written:
    """`values` become what a message says."""

    def __init__(self, values: Tensor, then: Then | None = None) -> None:
        self.memory = memory.bytes_of(values)
        self.then = then
        self._values = values

    def receive(self, read: Read, room: memoryview) -> bool:
        del room
        return read(self.memory)

    def put(self, data: memoryview) -> None:
        self._values.copy_(memory.tensor_of(data, self._values.dtype))


class Added:
    """`total`, which may be `own`, becomes what a message says plus the own values.

    One rounding an element, as if it had been received whole. What was added of a message that
    broke off is not added again when it comes again.
    """

    def __init__(self, own: Tensor, total: Tensor, then: Then | None = None) -> None:
        self.memory = memory.bytes_of(total)
        self.then = then
        self._own = own
        self._total = total
        self._done = 0  # elements

    def receive(self, read: Read, room: memoryview) -> bool:
        itemsize = self._own.element_size()
        known = self._done * itemsize
        while known:
            dropped = room[:known]
            if not read(dropped):
                return False
            known -= len(dropped)
        came = memory.tensor_of(room, self._own.dtype)
        for _ in range(self._done, self._own.numel(), came.numel()):
            count = min(came.numel(), self._own.numel() - self._done)
            if not read(room[: count * itemsize]):
                return False
            self._add(came[:count])
        return True

    def put(self, data: memoryview) -> None:
        self._add(memory.tensor_of(data, self._own.dtype)[self._done :])

    def _add(self, came: Tensor) -> None:
        stop = self._done + came.numel()
        torch.add(came, self._own[self._done : stop], out=self._total[self._done : stop])
        self._done = stop
