"""An event loop on a thread of its own, for blocking code that must be able to cancel a call."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from atoll.errors import StoreError

Value = TypeVar("Value")


class LoopThread:
    """Runs coroutines for threads that wait for them; lives until `close`.

    A daemon: a process that ends does not wait for a server that hangs.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._lock = threading.Lock()
        self.is_closed = False
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Value]) -> Value:
        """What `work` returns or raises; it is cancelled when the waiting is interrupted.

        StoreError when this is closed, before or meanwhile.
        """
        with self._lock:
            if self.is_closed:
                work.close()
                raise self._ended()
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError as exc:
            raise self._ended() from exc
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancels what still runs and ends the thread; harmless when repeated."""
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _ended(self) -> StoreError:
        return StoreError(f"{self._name} is closed; open it again")


async def _cancel_others() -> None:
    """Cancels every other task of this loop and waits until each has ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
