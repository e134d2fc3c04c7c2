"""When loops are compiled: one pass over a tile where torch takes one for every operation.

Needs numba (`atoll[fast]`). Callers ask tile by tile whether loops are ready and keep their own way
for where they are not: both give the same bits, which tests compare.

Loops are compiled in every process anew, in a thread of their own and only for large models, so
nobody waits: until they are ready torch does the work. numba could keep them on the disk, but its
files are pickles, are not synced, and are not told apart by all that the code depends on.
"""

import logging
import threading
from importlib.util import find_spec

from atoll.compiled import jit
from atoll.layout import ELEMENT_BYTES, TILE_BYTES

log = logging.getLogger(__name__)

FULL_TILE_ELEMENTS = TILE_BYTES // ELEMENT_BYTES  # what every large model is cut into
LARGE_ELEMENTS = 1 << 22  # below it a sync is short, and seconds of compiling are never gained back


class Compiled:
    """The loops of this process, once they are compiled. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._has_failed = False
        self._count = 0  # of `jit.LOOPS`, how many are compiled

    def prepare(self, elements: int) -> None:
        """Compiles the loops, once a process, if a model of so many `elements` gains by it."""
        if elements >= LARGE_ELEMENTS and find_spec("numba") is not None:
            self._begin()

    def wait(self) -> None:
        """Returns once the compiling that has begun is over, well or not."""
        if self._thread is not None:
            self._thread.join()

    def ready(self, elements: int) -> bool:
        """Whether loops should do a tile of so many elements: it is large and they are compiled."""
        return elements >= FULL_TILE_ELEMENTS and self.ready_for_any()

    def ready_for_any(self) -> bool:
        """Whether loops are compiled, for what they gain by on a small tile, too."""
        if self._thread is None:
            return False
        if self._count < len(jit.LOOPS):
            self._begin()  # a codec that the run changed to has brought its own
            return False
        return True

    def _begin(self) -> None:
        with self._lock:
            is_at_work = self._thread is not None and self._thread.is_alive()
            if not (is_at_work or self._has_failed or self._count == len(jit.LOOPS)):
                self._thread = threading.Thread(target=self._compile, name="compiled-loops")
                self._thread.start()

    def _compile(self) -> None:
        try:
            while self._count < len(jit.LOOPS):
                _ = jit.LOOPS[self._count].machine_code
                self._count += 1
                if not threading.main_thread().is_alive():
                    return  # the process is about to end and waits for this thread
        except Exception as exc:  # numba that does not fit its numpy, no memory left, and so on
            self._has_failed = True
            log.warning("tile loops cannot be compiled; torch goes on", extra={"reason": str(exc)})
            return
        log.info("tile loops are compiled")


compiled = Compiled()
