"""The seam of compiled loops: one pass over a tile where torch takes one for every operation.

Needs numba (`atoll[fast]`) and has one implementation, `compiled.loops`. Callers ask for it tile by
tile and keep their own way for where there is none: both give the same bits, which tests compare.

Loops are compiled in every process anew, in a thread of their own and only for large models, so
nobody waits: until they are ready torch does the work. numba could keep them on the disk, but its
files are pickles, are not synced, and are not told apart by all that the code depends on.
"""

import logging
import threading
from importlib.util import find_spec
from typing import Protocol

import numpy as np

from atoll.compiled.arrays import AdamRates, Bytes, Floats, Halves
from atoll.layout import GROUP_ELEMENTS

log = logging.getLogger(__name__)

FULL_TILE_ELEMENTS = 4 * GROUP_ELEMENTS  # 1 MiB of fp32: what every large model is cut into
LARGE_ELEMENTS = 1 << 22  # below it a sync is short, and seconds of compiling are never gained back


class Loops(Protocol):
    """Arrays are flat, contiguous, aligned and do not overlap; all of one call have one length."""

    def encode_int8(self, values: Floats, payload: Bytes, block: int) -> None:
        """`codecs.int8`: scales and values of every group."""
        ...

    def decode_int8(self, payload: Bytes, values: Floats, block: int) -> None:
        """The inverse."""
        ...

    def feed_int8(self, values: Floats, residual: Halves, payload: Bytes, block: int) -> None:
        """`codecs.feedback` with int8: encodes `values` + `residual`, keeps what is dropped."""
        ...

    def feed_bf16(self, values: Floats, residual: Halves, payload: Halves) -> None:
        """The same with bf16 rounded to nearest."""
        ...

    def publish_int8(self, master: Floats, published: Floats, payload: Bytes, block: int) -> None:
        """`strategies.diloco` with int8: encodes the difference and adds what was encoded."""
        ...

    def publish_bf16(self, master: Floats, published: Floats, payload: Halves) -> None:
        """The same with bf16 rounded to nearest."""
        ...

    def square_sum_int8(self, payload: Bytes, elements: int, block: int) -> float:
        """`codecs.finite` of what the payload decodes to; the sum is taken in fp64."""
        ...

    def sgd(self, params: Floats, gradient: Floats, lr: np.float32) -> None:
        """`optim.sgd`, and so on."""
        ...

    def nesterov(
        self,
        params: Floats,
        gradient: Floats,
        momentum: Floats,
        lr: np.float32,
        decay: np.float32,
    ) -> None: ...

    def adam(
        self, params: Floats, gradient: Floats, first: Floats, second: Floats, rates: AdamRates
    ) -> None: ...

    def largest_bits(self, values: Floats) -> np.int32:
        """The largest bit pattern without its sign: that of infinity or above when not finite."""
        ...


class Compiled:
    """The loops of this process, once they are compiled."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.loops: Loops | None = None

    def prepare(self, elements: int) -> None:
        """Compiles the loops, once a process, if a model of so many `elements` gains by it."""
        with self._lock:
            wanted = elements >= LARGE_ELEMENTS and self._thread is None
            if wanted and find_spec("numba") is not None:
                self._thread = threading.Thread(target=self._compile, name="compiled-loops")
                self._thread.start()

    def wait(self) -> None:
        """Returns once what was begun has come to an end."""
        if self._thread is not None:
            self._thread.join()

    def _compile(self) -> None:
        try:
            from atoll.compiled import loops, warmup

            for run in warmup.RUNS:
                run()
                if not threading.main_thread().is_alive():
                    return  # the process is about to end and waits for this thread
        except Exception as exc:  # numba that does not fit its numpy, no memory left, and so on
            log.warning("tile loops cannot be compiled; torch goes on", extra={"reason": str(exc)})
            return
        self.loops = loops
        log.info("tile loops are compiled")


compiled = Compiled()


def loops_for(elements: int) -> Loops | None:
    """The compiled loops, if there are any yet, for a tile of so many elements."""
    return compiled.loops if elements >= FULL_TILE_ELEMENTS else None
