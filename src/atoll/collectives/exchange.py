"""The collectives themselves, on a port that sends and a mailbox that receives.

Written once for all transports that carry messages between ranks. A message is a chunk of a part;
it is sent on, or added up, while the next one is on its way: `plain` says how with values as they
are, `coded` with a codec. Owns what a caller begins, and what is refused before anything is sent.
"""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Literal, Protocol

import torch
from torch import Tensor

from atoll.clock import Clock
from atoll.collectives import checks, memory, plain, schedule, sending, subgroups
from atoll.collectives.base import Collectives, Handle, Key, Label
from atoll.collectives.codecs import WireCodec
from atoll.collectives.coded import CodedDirect, CodedRing
from atoll.collectives.mailbox import Mailbox
from atoll.collectives.places import Written
from atoll.collectives.plain import PlainDirect, PlainRing
from atoll.collectives.post import Port, Post
from atoll.layout import Span
from atoll.traffic import Traffic

CHUNK_BYTES = 4 << 20  # what a message costs besides its bytes is paid less often
Way = Literal["ring", "direct"]


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
        traffic: Traffic | None = None,
        parent: "Exchange | None" = None,
        members: Sequence[int] | None = None,
        subgroup: int = 0,
    ) -> None:
        """A sub-group says its `members` of the whole group, whose port and mailbox it has.

        It shares the fate of its `parent`.
        """
        self.traffic = Traffic() if traffic is None else traffic
        self._post = Post(
            rank=rank,
            size=size,
            port=port,
            mailbox=mailbox,
            timeout_seconds=timeout_seconds,
            chunk_bytes=chunk_bytes,
            traffic=self.traffic,
            members=members,
            subgroup=subgroup,
        )
        self.rank = rank
        self.size = size
        self._port = port
        self._parent = parent
        self._mailbox = mailbox
        self._runner = runner
        self._clock = clock
        self._way = way
        self._timeout = timeout_seconds
        self._calls_for_subgroups = 0
        self._plain = (PlainRing if way == "ring" else PlainDirect)(self._post)

    # What a caller begins

    def all_gather(
        self, key: Key, shard: Tensor, out: Tensor, *, codec: WireCodec | None = None
    ) -> Handle:
        parts = schedule.cut(checks.flat(out), self.size)
        own = parts[self.rank].of(out)
        checks.alike("shard", shard, own)
        if codec is not None:
            checks.coded(codec, out)
            checks.apart(shard, out)
            by = self._coded(codec)
            return self._begun(lambda until: by.gather(key, 0, shard, out, parts, until))

        def work(until: float) -> None:
            if shard.data_ptr() != own.data_ptr():
                own.copy_(shard)
            self._plain.gather(key, 0, out, parts, until)

        return self._begun(work)

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
        reduce = self._reduction(key, values, out, codec, residual)
        return self._begun(reduce)

    def all_reduce(self, key: Key, values: Tensor, *, codec: WireCodec | None = None) -> Handle:
        parts = schedule.cut(checks.flat(values), self.size)
        own = parts[self.rank].of(values)
        reduce = self._reduction(key, values, own, codec, None)
        first = self.size  # phases of the gather come after all of the reduction

        def work(until: float) -> None:
            reduce(until)
            if codec is None:
                self._plain.gather(key, first, values, parts, until)
            else:
                self._coded(codec).gather(key, first, own, values, parts, until)

        return self._begun(work)

    def broadcast(self, key: Key, values: Tensor, *, source: int) -> Handle:
        checks.source(source, self.size)
        checks.flat(values)
        post = self._post
        pieces = list(plain.pieces(post, Span(0, values.numel()), values.dtype))

        def work(until: float) -> None:
            if self.rank == source:
                for piece in pieces:
                    for to in post.others:
                        post.send(to, Label(key, 0, piece), piece.of(values))
            else:
                for piece in pieces:
                    plain.into(post, piece.of(values), Label(key, 0, piece), source, until)

        return self._begun(work)

    def exchange(self, key: Key, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        checks.swap(parts, sizes, rank=self.rank, size=self.size)
        came = _rooms(parts[self.rank], sizes, self.rank)
        self._begun(lambda until: self._swap(key, 0, parts, came, until)).wait()
        return came

    def all_gather_bytes(self, key: Key, data: bytes, *, limit: int) -> list[bytes]:
        length = torch.tensor([len(data)]).view(torch.uint8)
        told = _rooms(length, [len(length)] * self.size, self.rank)
        own = memory.tensor_of(data, torch.uint8) if data else length[:0]
        came: list[Tensor] = []

        def work(until: float) -> None:
            self._swap(key, 0, [length] * self.size, told, until)
            lengths = [int(one.view(torch.int64)) for one in told]
            checks.within(key, lengths, limit)  # the same on all ranks
            came.extend(_rooms(own, lengths, self.rank))
            self._swap(key, 1, [own] * self.size, came, until)

        self._begun(work).wait()
        return [one.numpy().tobytes() for one in came]

    def barrier(self, key: Key) -> Handle:
        here = torch.zeros(1, dtype=torch.uint8)
        label, others = Label(key, 0, Span(0, 1)), self._post.others

        def work(until: float) -> None:
            for to in others:
                self._post.send(to, label, here)
            for sender in others:
                self._post.take(label, sender, nbytes=1, until=until, with_others=others)

        return self._begun(work)

    def send(self, key: Key, values: Tensor, *, to: int) -> Handle:
        checks.peer("to", to, rank=self.rank, size=self.size)
        checks.flat(values)
        return self._begun(lambda _: sending.send(self._post, key, values, to))

    def receive(self, key: Key, out: Tensor, *, source: int) -> Handle:
        checks.peer("source", source, rank=self.rank, size=self.size)
        checks.flat(out)
        return self._begun(lambda until: sending.receive(self._post, key, out, source, until))

    def subgroups(self, members: Sequence[Sequence[int]]) -> list[Collectives | None]:
        lists = subgroups.check(members, self.size)
        call, self._calls_for_subgroups = self._calls_for_subgroups, self._calls_for_subgroups + 1

        def made(place: int, ranks: Sequence[int]) -> Collectives | None:
            number = subgroups.number(self._post.subgroup, call, place, lists)
            return self._subgroup(ranks, number) if self.rank in ranks else None

        return [made(place, ranks) for place, ranks in enumerate(lists)]

    def abort(self, error: Exception) -> None:
        if self._parent is None:
            self._mailbox.abort(error)
        else:
            self._parent.abort(error)

    def _subgroup(self, ranks: Sequence[int], number: int) -> "Exchange":
        return Exchange(
            rank=ranks.index(self.rank),
            size=len(ranks),
            port=self._port,
            mailbox=self._mailbox,
            runner=self._runner,  # one thing at a time, or errors would take others' memory back
            clock=self._clock,
            way=self._way,
            timeout_seconds=self._timeout,
            chunk_bytes=self._post.chunk_bytes,
            traffic=self.traffic,
            parent=self,
            members=[self._post.members[rank] for rank in ranks],
            subgroup=number,
        )

    def _swap(
        self, key: Key, phase: int, parts: Sequence[Tensor], came: Sequence[Tensor], until: float
    ) -> None:
        """Sends each rank its part and fills `came`, by turns, so that nobody's stream stands."""
        post = self._post

        def turns(tensors: Sequence[Tensor]) -> list[tuple[int, Label, Tensor]]:
            cut = [schedule.chunks(Span(0, len(tensors[k])), post.chunk_bytes) for k in post.others]
            return [
                (rank, Label(key, phase, piece), piece.of(tensors[rank]))
                for turn in zip_longest(*cut)
                for rank, piece in zip(post.others, turn, strict=True)
                if piece is not None
            ]

        for sender, label, place in turns(came):
            post.expect(label, sender, Written(place))
        for to, label, values in turns(parts):
            post.send(to, label, values)
        for sender, label, place in turns(came):
            plain.into(post, place, label, sender, until)

    def _begun(self, work: Callable[[float], None]) -> Handle:
        def timed() -> None:
            until = self._clock.now() + self._timeout
            try:
                work(until)
                self._post.flush(until=until)
            except Exception:
                # Whoever waited may change or free the tensors now, and what was queued would be
                # sent with whatever is in their place. What still comes would queue more.
                self._post.withdraw()
                self._post.drop()
                raise
            finally:
                self._post.withdraw()

        return self._runner.begin(timed)

    def _coded(self, codec: WireCodec) -> CodedRing | CodedDirect:
        # One rank has no neighbour; its own values are rounded as by direct exchange.
        kind = CodedRing if self._way == "ring" and self.size > 1 else CodedDirect
        return kind(self._post, codec)

    def _reduction(
        self,
        key: Key,
        values: Tensor,
        out: Tensor,
        codec: WireCodec | None,
        residual: Tensor | None,
    ) -> Callable[[float], None]:
        parts = schedule.cut(values.numel(), self.size)
        if codec is not None:
            checks.coded(codec, values)
            by = self._coded(codec)
            return lambda until: by.reduce(key, values, out, parts, residual, until)

        def work(until: float) -> None:
            if self.size > 1:
                self._plain.reduce(key, values, out, parts, until)
            elif out.data_ptr() != values.data_ptr():
                out.copy_(values)

        return work


def _rooms(own: Tensor, sizes: Sequence[int], rank: int) -> list[Tensor]:
    """A place for what each rank sends; what is this rank's own is there already."""
    return [
        own if k == rank else torch.empty(size, dtype=torch.uint8) for k, size in enumerate(sizes)
    ]
