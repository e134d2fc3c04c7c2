"""The collectives themselves, on a port that sends and a mailbox that receives.

Written once for all transports that carry messages between ranks. A message is a chunk of a part;
it is sent on, or added up, while the next one is on its way. What is added is added in the order
of `schedule.order`, chunk by chunk, so ring and direct exchange give the same bits. Half floats
are added in fp32 and rounded once, at the end; their partial sums travel as fp32.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Literal, Protocol

import torch
from torch import Tensor

from atoll.clock import Clock
from atoll.collectives import memory, schedule
from atoll.collectives.base import Handle, Key, Label
from atoll.collectives.mailbox import Mailbox
from atoll.errors import ConfigError, LayoutMismatch, MissingRanks
from atoll.layout import Span

CHUNK_BYTES = 1 << 20  # measured best for gRPC; a socket bears less
HALF = (torch.float16, torch.bfloat16)
Way = Literal["ring", "direct"]


class Port(Protocol):
    """How messages leave a rank."""

    def send(self, to: int, label: Label, values: Tensor) -> None:
        """Queues a message; never waits. `values` stay as they are until `flush`."""
        ...

    def flush(self, *, until: float) -> None:
        """Returns once nothing that was sent needs its memory any more.

        MissingRanks, naming those who did not take theirs, at the time `until`.
        """
        ...


class Runner(Protocol):
    """When a collective that was begun is worked on: one after the other, in the order begun."""

    def begin(self, work: Callable[[], None]) -> Handle: ...


class Exchange:
    """Fulfils `base.Collectives` for one rank of a group."""

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        port: Port,
        mailbox: Mailbox,
        runner: Runner,
        clock: Clock,
        way: Way = "ring",
        timeout_seconds: float = 60.0,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        if not 0 <= rank < size:
            raise ConfigError(f"rank={rank} is not one of size={size} ranks, 0 to {size - 1}")
        self.rank = rank
        self.size = size
        self._port = port
        self._mailbox = mailbox
        self._runner = runner
        self._clock = clock
        self._way = way
        self._timeout = timeout_seconds
        self._chunk_bytes = chunk_bytes
        self._before, self._after = schedule.neighbours(rank, size)
        self._others = schedule.others(rank, size)

    # What a caller begins

    def all_gather(self, key: Key, shard: Tensor, out: Tensor) -> Handle:
        parts = schedule.cut(_flat(out), self.size)
        own = parts[self.rank].of(out)
        _check_alike("shard", shard, own)

        def work(until: float) -> None:
            if shard.data_ptr() != own.data_ptr():
                own.copy_(shard)
            self._gather(key, 0, out, parts, until)

        return self._begun(work)

    def reduce_scatter(self, key: Key, values: Tensor, out: Tensor) -> Handle:
        parts = schedule.cut(_flat(values), self.size)
        _check_alike("out", out, parts[self.rank].of(values))
        return self._begun(lambda until: self._reduce(key, values, out, parts, until))

    def all_reduce(self, key: Key, values: Tensor) -> Handle:
        parts = schedule.cut(_flat(values), self.size)

        def work(until: float) -> None:
            self._reduce(key, values, parts[self.rank].of(values), parts, until)
            # Phases of the gather come after all of the reduction.
            self._gather(key, self.size, values, parts, until)

        return self._begun(work)

    def broadcast(self, key: Key, values: Tensor, *, source: int) -> Handle:
        if not 0 <= source < self.size:
            raise ConfigError(f"source={source} is not one of size={self.size} ranks")
        whole = Span(0, _flat(values))
        pieces = list(schedule.chunks(whole, self._elements(values.dtype)))

        def work(until: float) -> None:
            if self.rank == source:
                for piece in pieces:
                    for to in self._others:
                        self._port.send(to, Label(key, 0, piece), piece.of(values))
            else:
                for piece in pieces:
                    self._into(piece.of(values), Label(key, 0, piece), source, until)

        return self._begun(work)

    def barrier(self, key: Key) -> Handle:
        here = torch.zeros(1, dtype=torch.uint8)
        label = Label(key, 0, Span(0, 1))

        def work(until: float) -> None:
            for to in self._others:
                self._port.send(to, label, here)
            for sender in self._others:
                self._take(label, sender, 1, until, with_others=self._others)

        return self._begun(work)

    def abort(self, error: Exception) -> None:
        self._mailbox.abort(error)

    def _begun(self, work: Callable[[float], None]) -> Handle:
        def timed() -> None:
            until = self._clock.now() + self._timeout
            work(until)
            self._port.flush(until=until)

        return self._runner.begin(timed)

    # Gathering

    def _gather(
        self, key: Key, phase: int, out: Tensor, parts: Sequence[Span], until: float
    ) -> None:
        """Makes `out`, which holds this rank's part, whole."""
        if self._way == "ring":
            self._gather_in_a_ring(key, phase, out, parts, until)
        else:
            self._gather_directly(key, phase, out, parts, until)

    def _gather_in_a_ring(
        self, key: Key, first: int, out: Tensor, parts: Sequence[Span], until: float
    ) -> None:
        for piece in self._pieces(parts[self.rank], out.dtype):
            if self.size > 1:
                self._port.send(self._after, Label(key, first, piece), piece.of(out))
        hops = schedule.ring_gather(self.rank, self.size)
        for turn, hop in enumerate(hops):
            is_last = turn == len(hops) - 1
            for piece in self._pieces(parts[hop.receives], out.dtype):
                self._into(piece.of(out), Label(key, first + turn, piece), self._before, until)
                if not is_last:
                    self._port.send(self._after, Label(key, first + turn + 1, piece), piece.of(out))

    def _gather_directly(
        self, key: Key, phase: int, out: Tensor, parts: Sequence[Span], until: float
    ) -> None:
        for piece in self._pieces(parts[self.rank], out.dtype):
            for to in self._others:
                self._port.send(to, Label(key, phase, piece), piece.of(out))
        # One chunk of each in turn: nobody's stream stands still while another's is read.
        turns = zip_longest(*(self._pieces(parts[k], out.dtype) for k in self._others))
        for turn in turns:
            for sender, piece in zip(self._others, turn, strict=True):
                if piece is not None:
                    self._into(piece.of(out), Label(key, phase, piece), sender, until)

    # Adding up

    def _reduce(
        self, key: Key, values: Tensor, out: Tensor, parts: Sequence[Span], until: float
    ) -> None:
        if self.size == 1:
            if out.data_ptr() != values.data_ptr():
                out.copy_(values)
        elif self._way == "ring":
            self._reduce_in_a_ring(key, values, out, parts, until)
        else:
            self._reduce_directly(key, values, out, parts, until)

    def _reduce_in_a_ring(
        self, key: Key, values: Tensor, out: Tensor, parts: Sequence[Span], until: float
    ) -> None:
        hops = schedule.ring_reduce(self.rank, self.size)
        for piece in self._pieces(parts[hops[0].sends], values.dtype):
            self._port.send(self._after, Label(key, 0, piece), _wide(piece.of(values)))
        for turn, hop in enumerate(hops):
            is_last = turn == len(hops) - 1
            for piece in self._pieces(parts[hop.receives], values.dtype):
                own = piece.of(values)
                came = self._came(Label(key, turn, piece), self._before, own, until)
                if is_last:
                    _place(piece, parts[self.rank], out).copy_(_added(came, own))
                    continue
                # The own values are used up, so the sum takes their place where it fits.
                partial = torch.add(came, own, out=own) if _is_same(own) else _added(came, own)
                self._port.send(self._after, Label(key, turn + 1, piece), partial)

    def _reduce_directly(
        self, key: Key, values: Tensor, out: Tensor, parts: Sequence[Span], until: float
    ) -> None:
        turns = zip_longest(*(self._pieces(parts[k], values.dtype) for k in self._others))
        for turn in turns:
            for to, piece in zip(self._others, turn, strict=True):
                if piece is not None:
                    self._port.send(to, Label(key, 0, piece), _wide(piece.of(values)))
        *senders, _ = schedule.order(self.rank, self.size)
        for piece in self._pieces(parts[self.rank], values.dtype):
            label, own = Label(key, 0, piece), piece.of(values)
            total: Tensor | None = None
            for sender in senders:
                came = self._came(label, sender, own, until, with_others=senders)
                total = came.clone() if total is None else total.add_(came)
            assert total is not None
            _place(piece, parts[self.rank], out).copy_(_added(total, own))

    # Messages

    def _pieces(self, span: Span, dtype: torch.dtype) -> Iterable[Span]:
        return schedule.chunks(span, self._elements(dtype))

    def _elements(self, dtype: torch.dtype) -> int:
        """Of a chunk, as wide as it may travel."""
        return max(1, self._chunk_bytes // _fold_dtype(dtype).itemsize)

    def _into(self, place: Tensor, label: Label, sender: int, until: float) -> None:
        data = self._take(label, sender, place.numel() * place.element_size(), until)
        place.copy_(memory.tensor_of(data, place.dtype))

    def _came(
        self,
        label: Label,
        sender: int,
        own: Tensor,
        until: float,
        *,
        with_others: Sequence[int] = (),
    ) -> Tensor:
        """A partial sum that goes with this rank's own values; it is good until the next one."""
        dtype = _fold_dtype(own.dtype)
        nbytes = own.numel() * dtype.itemsize
        self._last = self._take(label, sender, nbytes, until, with_others=with_others)
        return memory.tensor_of(self._last, dtype)

    def _take(
        self,
        label: Label,
        sender: int,
        nbytes: int,
        until: float,
        *,
        with_others: Sequence[int] = (),
    ) -> bytes | bytearray | memoryview:
        try:
            return self._mailbox.take(label, sender, nbytes=nbytes, until=until)
        except MissingRanks:
            asked = [(label, one) for one in (*with_others, sender)]
            absent = self._mailbox.missing(asked)
            raise MissingRanks(
                f"{label.key}: nothing came from rank{'s' * (len(absent) > 1)} "
                f"{', '.join(map(str, absent))} within {self._timeout:g} s; nothing is filled in, "
                f"the step is given up",
                ranks=absent,
            ) from None


def _flat(values: Tensor) -> int:
    """How many elements; LayoutMismatch for anything but a flat, contiguous CPU tensor."""
    if values.dim() != 1 or not values.is_contiguous() or values.device.type != "cpu":
        raise LayoutMismatch(
            f"a tensor of shape {tuple(values.shape)}, strides {values.stride()} on "
            f"{values.device} cannot be exchanged; give a flat contiguous one on the CPU"
        )
    return values.numel()


def _check_alike(name: str, given: Tensor, wanted: Tensor) -> None:
    _flat(given)
    if given.shape != wanted.shape or given.dtype != wanted.dtype:
        raise LayoutMismatch(
            f"{name} has {given.numel()} elements of {given.dtype}; this rank's part has "
            f"{wanted.numel()} of {wanted.dtype}"
        )


def _fold_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALF else dtype


def _is_same(values: Tensor) -> bool:
    """Whether partial sums are of the values' own dtype."""
    return values.dtype not in HALF


def _wide(values: Tensor) -> Tensor:
    """As it is added up."""
    return values.to(_fold_dtype(values.dtype))


def _added(came: Tensor, own: Tensor) -> Tensor:
    """The sum so far plus the own values, in new memory: one rounding for each element."""
    return came + _wide(own)


def _place(piece: Span, part: Span, out: Tensor) -> Tensor:
    """Where a piece of a rank's part lies in a tensor that is that part alone."""
    return out[piece.start - part.start : piece.stop - part.start]
