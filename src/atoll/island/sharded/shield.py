"""Collectives that do not raise in the middle of a script's own code.

A script's forward and backward wait for other ranks without knowing it. When the group is over
there, the script cannot be left by an exception: its loop would end. So the rest of the micro-batch
is computed with zeros, at no cost to anybody; the error is kept, and whoever goes on with the step
asks for it before anything that was computed counts.
"""

from collections.abc import Sequence

from torch import Tensor

from atoll.collectives.base import Collectives, Handle, Key
from atoll.collectives.codecs import WireCodec
from atoll.errors import AtollError


class Shield:
    """Fulfils `collectives.base.Collectives`: gathers and reductions never raise, others do."""

    def __init__(self, inner: Collectives) -> None:
        self._inner = inner
        self.error: AtollError | None = None

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def size(self) -> int:
        return self._inner.size

    def check(self) -> None:
        """Raises what was kept: nothing that was computed since counts."""
        if self.error is not None:
            raise self.error

    def forget(self) -> None:
        """What was kept was of a step that is given up, and passed with it."""
        self.error = None

    def all_gather(
        self, key: Key, shard: Tensor, out: Tensor, *, codec: WireCodec | None = None
    ) -> Handle:
        if self.error is None:
            try:
                return _Shielded(self, self._inner.all_gather(key, shard, out, codec=codec), out)
            except AtollError as error:
                self.error = error
        return _Emptied(out)

    def reduce_scatter(
        self,
        key: Key,
        values: Tensor,
        out: Tensor,
        *,
        codec: WireCodec | None = None,
        residual: Tensor | None = None,
    ) -> Handle:
        if self.error is not None:
            return _Emptied(out)
        begun = self._inner.reduce_scatter(key, values, out, codec=codec, residual=residual)
        return _Shielded(self, begun, out)

    def all_reduce(self, key: Key, values: Tensor, *, codec: WireCodec | None = None) -> Handle:
        self.check()
        return self._inner.all_reduce(key, values, codec=codec)

    def broadcast(self, key: Key, values: Tensor, *, source: int) -> Handle:
        self.check()
        return self._inner.broadcast(key, values, source=source)

    def exchange(self, key: Key, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        self.check()
        return self._inner.exchange(key, parts, sizes)

    def all_gather_bytes(self, key: Key, data: bytes, *, limit: int) -> list[bytes]:
        self.check()
        return self._inner.all_gather_bytes(key, data, limit=limit)

    def barrier(self, key: Key) -> Handle:
        self.check()
        return self._inner.barrier(key)

    def send(self, key: Key, values: Tensor, *, to: int) -> Handle:
        self.check()
        return self._inner.send(key, values, to=to)

    def receive(self, key: Key, out: Tensor, *, source: int) -> Handle:
        self.check()
        return self._inner.receive(key, out, source=source)

    def subgroups(self, members: Sequence[Sequence[int]]) -> list[Collectives | None]:
        self.check()
        return self._inner.subgroups(members)

    def abort(self, error: Exception) -> None:
        self._inner.abort(error)


class _Emptied:
    """A result that nobody will use."""

    def __init__(self, out: Tensor) -> None:
        self._out = out

    def wait(self) -> None:
        # Not the tensor itself: autograd would take this for a change of values that it saved.
        self._out.data.zero_()


class _Shielded:
    """A handle that keeps its error for later."""

    def __init__(self, shield: Shield, inner: Handle, out: Tensor) -> None:
        self._shield = shield
        self._inner = inner
        self._out = out

    def wait(self) -> None:
        try:
            self._inner.wait()
        except AtollError as error:
            self._shield.error = self._shield.error or error
            _Emptied(self._out).wait()
