"""Collectives on torch.distributed with gloo, where one torchrun group is the group of ranks.

Sums are exchanged by all-to-all and added here, in the order and by the codec of a direct
exchange, so the bits are those of the other transports. A message begins with a stamp of the
exchange that it belongs to, for gloo itself takes whatever comes next.

gloo says only that a deadline is over or a connection is gone, not whose: then all others are
named. What it has under way cannot be taken back, so it gets copies, and an abort leaves the
caller's tensors alone. After an error this rank's group is of no more use, and the process must
end, as torchrun sees to.
"""

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from itertools import accumulate, zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from atoll.collectives import (
    checks,
    codecs,
    memory,
    plain,
    schedule,
    sending,
    subgroups,
    torch_wire,
)
from atoll.collectives.base import Collectives, Handle, Key
from atoll.collectives.codecs import WireCodec
from atoll.collectives.coded import inside, kept, part_codec
from atoll.collectives.plain import place
from atoll.collectives.runners import Threaded
from atoll.collectives.torch_wire import Wire
from atoll.errors import MissingRanks, ProtocolError
from atoll.layout import Span
from atoll.traffic import Traffic

CHUNK_BYTES = 4 << 20
STAMP_BYTES = 16  # and what follows it is aligned for every dtype
TIMEOUT_SECONDS = 60.0
_NOTHING = torch.empty(0, dtype=torch.uint8)

Turn = tuple[Span | None, ...]  # one chunk of each rank's part; None where it has no more


def gloo_group(
    ranks: Sequence[int] | None = None, *, timeout_seconds: float = TIMEOUT_SECONDS
) -> dist.ProcessGroup:
    """A process group for `TorchRanks` alone; every rank of the default group calls this."""
    made: dist.ProcessGroup = dist.new_group(
        ranks=None if ranks is None else list(ranks),
        backend="gloo",
        timeout=timedelta(seconds=timeout_seconds),
    )
    return made


class _Life:
    """What a group and its sub-groups share: one thread, and one end."""

    def __init__(self, name: str) -> None:
        self.runner = Threaded(name)
        self._error: Exception | None = None
        self._tensors = threading.Lock()  # held where those of the callers are read or written

    @contextmanager
    def touching(self) -> Iterator[None]:
        """Where tensors of the callers are read or written.

        An abort waits until it is left, and after an abort it is not entered: whoever waited may
        have freed them.
        """
        with self._tensors:
            if self._error is not None:
                raise self._error
            yield

    def abort(self, error: Exception) -> None:
        with self._tensors:
            self._error = self._error or error
        self.runner.give_up(self._error)


class _TorchExchange:
    """Fulfils `base.Collectives` for one rank of a process group, or of a sub-group of one."""

    def __init__(
        self,
        wire: Wire,
        life: _Life,
        *,
        timeout_seconds: float,
        chunk_bytes: int,
        native_sum: bool,
        traffic: Traffic,
        subgroup: int = 0,
    ) -> None:
        self.rank = wire.rank
        self.size = wire.size
        self.traffic = traffic
        self._wire = wire
        self._life = life
        self._timeout = timeout_seconds
        self._chunk_bytes = chunk_bytes
        self._native_sum = native_sum
        self._others = schedule.others(self.rank, self.size)
        self._subgroup = subgroup
        self._calls_for_subgroups = 0

    def all_gather(
        self, key: Key, shard: Tensor, out: Tensor, *, codec: WireCodec | None = None
    ) -> Handle:
        parts = schedule.cut(checks.flat(out), self.size)
        checks.alike("shard", shard, parts[self.rank].of(out))
        if codec is not None:
            checks.coded(codec, out)
            checks.apart(shard, out)
        return self._begun(key, lambda: self._gather(key, shard, out, parts, codec))

    def reduce_scatter(
        self,
        key: Key,
        values: Tensor,
        out: Tensor,
        *,
        codec: WireCodec | None = None,
        residual: Tensor | None = None,
    ) -> Handle:
        parts = schedule.cut(checks.flat(values), self.size)
        checks.alike("out", out, parts[self.rank].of(values))
        checks.residual(residual, values, codec)
        if codec is not None:
            checks.coded(codec, values)

        def work() -> None:
            if codec is not None:
                self._reduce_coded(key, values, out, parts, codec, residual)
            elif self._native_sum:
                self._summed(key, values)
                with self._touching():
                    out.copy_(parts[self.rank].of(values))
            else:
                self._reduce(key, values, out, parts)

        return self._begun(key, work)

    def all_reduce(self, key: Key, values: Tensor, *, codec: WireCodec | None = None) -> Handle:
        parts = schedule.cut(checks.flat(values), self.size)
        own = parts[self.rank].of(values)
        if codec is not None:
            checks.coded(codec, values)

        def work() -> None:
            if codec is None and self._native_sum:
                self._summed(key, values)
                return
            if codec is None:
                self._reduce(key, values, own, parts)
            else:
                self._reduce_coded(key, values, own, parts, codec, None)
            self._gather(key, own, values, parts, codec)

        return self._begun(key, work)

    def broadcast(self, key: Key, values: Tensor, *, source: int) -> Handle:
        checks.source(source, self.size)
        raw = _bytes(values) if checks.flat(values) else _NOTHING

        def work() -> None:
            for index, piece in enumerate(schedule.chunks(Span(0, len(raw)), self._chunk_bytes)):
                stamp = _stamp(key, "broadcast", index)
                with self._touching():
                    message = torch.cat((stamp, piece.of(raw)))
                self._wire.broadcast(message, source)
                _check(key, source, message, stamp)
                if self.rank == source:
                    self.traffic.sends(len(piece) * len(self._others))
                    continue
                self.traffic.receives(len(piece))
                with self._touching():
                    piece.of(raw).copy_(message[STAMP_BYTES:])

        return self._begun(key, work)

    def exchange(self, key: Key, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        checks.swap(parts, sizes, rank=self.rank, size=self.size)
        own, came = parts[self.rank], list[Tensor]()

        def work() -> None:
            sent = [_NOTHING if k == self.rank else part for k, part in enumerate(parts)]
            wanted = [0 if k == self.rank else size for k, size in enumerate(sizes)]
            came.extend(self._swapped(key, 0, lambda: sent, wanted))

        self._begun(key, work).wait()
        return [own if k == self.rank else part for k, part in enumerate(came)]

    def all_gather_bytes(self, key: Key, data: bytes, *, limit: int) -> list[bytes]:
        own = memory.tensor_of(data, torch.uint8) if data else _NOTHING
        came: list[bytes] = []

        def work() -> None:
            length = torch.tensor([len(data)]).view(torch.uint8)
            told = self._gathered(key, 0, lambda: length, [len(length)] * self.size)
            lengths = [int(one.clone().view(torch.int64)) for one in told]
            checks.within(key, lengths, limit)  # the same on all ranks
            found = self._gathered(key, 1, lambda: own, lengths)
            came.extend(one.numpy().tobytes() for one in found)

        self._begun(key, work).wait()
        return came

    def barrier(self, key: Key) -> Handle:
        return self._begun(key, lambda: self._meet(key))

    def send(self, key: Key, values: Tensor, *, to: int) -> Handle:
        checks.peer("to", to, rank=self.rank, size=self.size)
        raw = _bytes(values) if checks.flat(values) else _NOTHING

        def work() -> None:
            with self._touching():
                told = sending.header(values)
            self._wire.send(torch.cat((_stamp(key, "send", 0), told)), to)
            for index, piece in enumerate(schedule.chunks(Span(0, len(raw)), self._chunk_bytes), 1):
                with self._touching():
                    message = torch.cat((_stamp(key, "send", index), piece.of(raw)))
                self._wire.send(message, to)
            self.traffic.sends(len(told) + len(raw))

        return self._begun(key, work, with_ranks=[to])

    def receive(self, key: Key, out: Tensor, *, source: int) -> Handle:
        checks.peer("source", source, rank=self.rank, size=self.size)
        raw = _bytes(out) if checks.flat(out) else _NOTHING

        def received(index: int, nbytes: int) -> Tensor:
            message = torch.empty(STAMP_BYTES + nbytes, dtype=torch.uint8)
            self._wire.receive(message, source)
            _check(key, source, message, _stamp(key, "send", index))
            self.traffic.receives(nbytes)
            return message[STAMP_BYTES:]

        def work() -> None:
            told = received(0, sending.HEADER_BYTES)
            sending.check_header(key, source, told.numpy().tobytes(), out)
            for index, piece in enumerate(schedule.chunks(Span(0, len(raw)), self._chunk_bytes), 1):
                found = received(index, len(piece))
                with self._touching():
                    piece.of(raw).copy_(found)

        return self._begun(key, work, with_ranks=[source])

    def subgroups(self, members: Sequence[Sequence[int]]) -> list[Collectives | None]:
        lists = subgroups.check(members, self.size)
        call, self._calls_for_subgroups = self._calls_for_subgroups, self._calls_for_subgroups + 1

        def made(place: int, ranks: Sequence[int]) -> Collectives | None:
            if self.rank not in ranks:
                return None
            number = subgroups.number(self._subgroup, call, place, lists)
            others = [rank for rank in ranks if rank != self.rank]
            with self._named(f"sub-group {list(ranks)}", others):
                wire = self._wire.part(f"{number:x}", ranks, timeout_seconds=self._timeout)
            return _TorchExchange(
                wire,
                self._life,
                timeout_seconds=self._timeout,
                chunk_bytes=self._chunk_bytes,
                native_sum=self._native_sum,
                traffic=self.traffic,
                subgroup=number,
            )

        with self._touching():
            pass  # none of a group that is over
        return [made(place, ranks) for place, ranks in enumerate(lists)]

    def abort(self, error: Exception) -> None:
        """Who waits is sent away; what gloo has under way ends at its own deadline."""
        self._life.abort(error)

    def _begun(
        self, key: Key, work: Callable[[], None], *, with_ranks: Sequence[int] | None = None
    ) -> Handle:
        def watched() -> None:
            with self._touching():
                pass  # what was begun before an abort, and not worked on, is not any more
            with self._named(str(key), self._others if with_ranks is None else with_ranks):
                work()

        return self._life.runner.begin(watched)

    def _touching(self) -> AbstractContextManager[None]:
        return self._life.touching()

    @contextmanager
    def _named(self, what: str, ranks: Sequence[int]) -> Iterator[None]:
        try:
            yield
        except RuntimeError as exc:  # gloo has no other: a deadline, a closed connection
            if not isinstance(exc, dist.DistError) and not _is_gloos(exc):
                raise
            away = sorted(ranks)
            raise MissingRanks(
                f"{what}: of rank{'s' * (len(away) > 1)} {', '.join(map(str, away))} one at least "
                f"did not come within {self._timeout:g} s or is gone ({str(exc).splitlines()[0]}); "
                f"nothing is filled in, the step is given up",
                ranks=away,
            ) from exc

    # What is exchanged, chunk by chunk

    def _gather(
        self,
        key: Key,
        shard: Tensor,
        out: Tensor,
        parts: Sequence[Span],
        codec: WireCodec | None,
    ) -> None:
        part = parts[self.rank]
        elements = self._elements(out.dtype, codec)
        coder = codec and part_codec(codec, key, "gather", sender=self.rank, owner=self.rank)
        for index, turn in enumerate(_turns(parts, elements)):

            def message(mine: Span | None = turn[self.rank]) -> Tensor:
                if mine is None:
                    return _NOTHING
                own = place(mine, part, shard)
                return coder.encode(own, inside(mine, part)) if coder else _bytes(own)

            sizes = [0 if one is None else _nbytes(len(one), out.dtype, codec) for one in turn]
            came = self._gathered(key, index, message, sizes)
            with self._touching():
                for piece, found in zip(turn, came, strict=True):
                    if piece is not None and codec is not None:
                        codecs.decode(codec, found, piece.of(out))
                    elif piece is not None:
                        piece.of(out).copy_(found.view(out.dtype))

    def _reduce(self, key: Key, values: Tensor, out: Tensor, parts: Sequence[Span]) -> None:
        part = parts[self.rank]
        *senders, _ = schedule.order(self.rank, self.size)
        for index, turn in enumerate(_turns(parts, self._elements(values.dtype, None))):

            def sent(turn: Turn = turn) -> list[Tensor]:
                return [
                    _NOTHING if one is None or k == self.rank else _bytes(one.of(values))
                    for k, one in enumerate(turn)
                ]

            mine = turn[self.rank]
            nbytes = 0 if mine is None else _nbytes(len(mine), values.dtype, None)
            came = self._swapped(key, index, sent, self._of_others(nbytes))
            if mine is None:
                continue
            with self._touching():
                own, total = mine.of(values), place(mine, part, out)
                if senders:
                    plain.add_up((came[k].view(values.dtype) for k in senders), own, total)
                elif own.data_ptr() != total.data_ptr():
                    total.copy_(own)

    def _reduce_coded(
        self,
        key: Key,
        values: Tensor,
        out: Tensor,
        parts: Sequence[Span],
        codec: WireCodec,
        residual: Tensor | None,
    ) -> None:
        order = schedule.order(self.rank, self.size)
        coders = [
            part_codec(codec, key, "reduce", sender=self.rank, owner=k) for k in range(self.size)
        ]
        for index, turn in enumerate(_turns(parts, self._elements(values.dtype, codec))):
            own = _NOTHING

            def sent(turn: Turn = turn) -> list[Tensor]:
                nonlocal own
                found = [
                    _NOTHING
                    if one is None
                    else coders[k].encode(
                        one.of(values), inside(one, parts[k]), kept(one, residual)
                    )
                    for k, one in enumerate(turn)
                ]
                own, found[self.rank] = found[self.rank], _NOTHING
                return found

            mine = turn[self.rank]
            nbytes = 0 if mine is None else codec.nbytes(len(mine))
            came = self._swapped(key, index, sent, self._of_others(nbytes))
            came[self.rank] = own
            if mine is not None:
                with self._touching():
                    total = place(mine, parts[self.rank], out)
                    codecs.add_up(codec, (came[k] for k in order), total)

    def _summed(self, key: Key, values: Tensor) -> None:
        self._meet(key)  # a native sum carries no stamp
        elements = self._elements(values.dtype, None)
        for piece in schedule.chunks(Span(0, values.numel()), elements):
            with self._touching():
                total = piece.of(values).clone()
            self._wire.all_reduce(total)
            self.traffic.sends(total.nbytes)
            self.traffic.receives(total.nbytes)
            with self._touching():
                piece.of(values).copy_(total)

    def _elements(self, dtype: torch.dtype, codec: WireCodec | None) -> int:
        if codec is not None:
            return codec.chunk_elements(self._chunk_bytes)
        return max(1, self._chunk_bytes // dtype.itemsize)

    # Messages: a stamp, then bytes

    def _meet(self, key: Key) -> None:
        self._gathered(key, 0, lambda: _NOTHING, [0] * self.size)

    def _gathered(
        self, key: Key, index: int, message: Callable[[], Tensor], sizes: Sequence[int]
    ) -> list[Tensor]:
        """The message of each rank, so long as `sizes` say."""
        stamp = _stamp(key, "gather", index)
        own = torch.zeros(_padded(max(sizes)), dtype=torch.uint8)
        own[:STAMP_BYTES] = stamp
        with self._touching():
            mine = message()
            own[STAMP_BYTES : STAMP_BYTES + len(mine)] = mine
        rows = list(torch.empty(self.size, len(own), dtype=torch.uint8))
        self._wire.all_gather(rows, own)
        for sender, row in enumerate(rows):
            _check(key, sender, row, stamp)
        self.traffic.sends(sizes[self.rank] * len(self._others))
        self.traffic.receives(sum(sizes[k] for k in self._others))
        return [
            row[STAMP_BYTES : STAMP_BYTES + size] for row, size in zip(rows, sizes, strict=True)
        ]

    def _of_others(self, nbytes: int) -> list[int]:
        return [0 if k == self.rank else nbytes for k in range(self.size)]

    def _swapped(
        self, key: Key, index: int, sent: Callable[[], Sequence[Tensor]], sizes: Sequence[int]
    ) -> list[Tensor]:
        """What each rank sent to this one, so many bytes as `sizes` say; `sent()[k]` goes to k."""
        stamp = _stamp(key, "reduce", index)
        with self._touching():
            mine = sent()
            lengths = [_padded(len(one)) for one in mine]
            room = torch.empty(sum(lengths), dtype=torch.uint8)
            for row, one in zip(_rows(room, lengths), mine, strict=True):
                row[:STAMP_BYTES] = stamp
                row[STAMP_BYTES : STAMP_BYTES + len(one)] = one
            leaving = sum(len(mine[k]) for k in self._others)
        coming = [_padded(nbytes) for nbytes in sizes]
        came = torch.empty(sum(coming), dtype=torch.uint8)
        self._wire.all_to_all(came, room, coming, lengths)
        rows = _rows(came, coming)
        for sender, row in enumerate(rows):
            _check(key, sender, row, stamp)
        self.traffic.sends(leaving)
        self.traffic.receives(sum(sizes[k] for k in self._others))
        return [
            row[STAMP_BYTES : STAMP_BYTES + size] for row, size in zip(rows, sizes, strict=True)
        ]


class TorchRanks(_TorchExchange):
    """Fulfils `base.Collectives` for one rank of a process group; `close` it before that ends.

    With `native_sum` gloo adds up what travels without a codec: as fast as it can, in an order of
    its own, so the sums are equal to the other transports' within rounding only.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        chunk_bytes: int = CHUNK_BYTES,
        native_sum: bool = False,
        traffic: Traffic | None = None,
    ) -> None:
        wire = torch_wire.of_group(group)
        super().__init__(
            wire,
            _Life(f"rank-{wire.rank}"),
            timeout_seconds=timeout_seconds,
            chunk_bytes=chunk_bytes,
            native_sum=native_sum,
            traffic=Traffic() if traffic is None else traffic,
        )

    def close(self) -> None:
        """Waits for what is under way, also in sub-groups."""
        self._life.runner.close()

    def ends_within(self, seconds: float) -> bool:
        """`close`, for at most so long; False where gloo still has something under way."""
        return self._life.runner.ends_within(seconds)


def _is_gloos(error: RuntimeError) -> bool:
    told = str(error).lower()
    return "gloo" in told or told == "wait timeout"  # who did not come to a new process group


def _check(key: Key, sender: int, message: Tensor, stamp: Tensor) -> None:
    if not torch.equal(message[:STAMP_BYTES], stamp):
        raise ProtocolError(
            f"{key}: what came from rank {sender} belongs to another exchange; all ranks begin "
            f"the same ones in the same order"
        )


def _turns(parts: Sequence[Span], elements: int) -> Iterator[Turn]:
    """One chunk of each part at a time; None where a part has no more."""
    return zip_longest(*(schedule.chunks(part, elements) for part in parts))


def _rows(room: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    stops = list(accumulate(lengths))
    return [room[stop - length : stop] for stop, length in zip(stops, lengths, strict=True)]


def _bytes(values: Tensor) -> Tensor:
    return values.view(torch.uint8)


def _nbytes(elements: int, dtype: torch.dtype, codec: WireCodec | None) -> int:
    return elements * dtype.itemsize if codec is None else codec.nbytes(elements)


def _padded(nbytes: int) -> int:
    """With its stamp, so that the next message begins where every dtype may."""
    return STAMP_BYTES + -(-nbytes // STAMP_BYTES) * STAMP_BYTES


def _stamp(key: Key, stage: str, index: int) -> Tensor:
    digest = hashlib.sha256(f"{key!r} {stage} {index}".encode()).digest()
    return torch.frombuffer(bytearray(digest[:STAMP_BYTES]), dtype=torch.uint8)
