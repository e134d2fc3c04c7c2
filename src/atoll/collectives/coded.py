"""Exchanges of fp32 values by a codec: what is sent are its bytes, what is added are fp32 values.

Gathered parts are encoded once, by their owner, and go on unchanged; every rank, the owner too,
gets what the bytes say. For a sum there are two ways, which give different bits here:

    direct   each rank encodes its part for each owner once, and the owner its own, too, so that
             who owns a part changes nothing; the owner adds what the bytes say in `schedule.order`.
    ring     a partial sum is decoded, added to and encoded again at every hop, so it is rounded
             size - 1 times; the owner adds its own values as they are.

Encoding runs a few chunks ahead of what has come, so that little memory holds bytes under way.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, islice, zip_longest

import torch
from torch import Tensor

from atoll.collectives import codecs, memory, schedule
from atoll.collectives.base import Key, Label
from atoll.collectives.codecs import PartCodec, WireCodec
from atoll.collectives.plain import place
from atoll.collectives.post import Post
from atoll.layout import Span

AHEAD = 3  # chunks for each peer that are encoded before the first that comes is waited for


class _Coded:
    """What both ways share: one exchange of one rank."""

    def __init__(self, post: Post, coding: WireCodec) -> None:
        self._post = post
        self._coding = coding

    def _pieces(self, span: Span) -> Iterator[Span]:
        return schedule.chunks(span, self._coding.chunk_elements(self._post.chunk_bytes))

    def _take(
        self,
        label: Label,
        sender: int,
        until: float,
        *,
        with_others: Sequence[int] = (),
    ) -> Tensor:
        nbytes = self._coding.nbytes(len(label.span))
        data = self._post.take(label, sender, nbytes=nbytes, until=until, with_others=with_others)
        return memory.tensor_of(data, torch.uint8)

    def _publish(
        self, key: Key, phase: int, shard: Tensor, out: Tensor, part: Span, to: Sequence[int]
    ) -> Iterator[None]:
        """Encodes and sends the own part chunk by chunk; `out` gets what was sent.

        A rank may give a part of `out` as its `shard`: a chunk is read before it is written.
        """
        coder = self._part_codec(key, "gather", self._post.rank)
        for piece in self._pieces(part):
            payload = coder.encode(place(piece, part, shard), inside(piece, part))
            codecs.decode(self._coding, payload, piece.of(out))
            for rank in to:
                self._post.send(rank, Label(key, phase, piece), payload)
            yield

    def _part_codec(self, key: Key, stage: codecs.Stage, owner: int) -> PartCodec:
        return part_codec(self._coding, key, stage, sender=self._post.rank, owner=owner)


class CodedRing(_Coded):
    """From neighbour to neighbour."""

    def gather(
        self,
        key: Key,
        first: int,
        shard: Tensor,
        out: Tensor,
        parts: Sequence[Span],
        until: float,
    ) -> None:
        """Makes `out` whole; its phases count from `first`."""
        post = self._post
        hops = schedule.ring_gather(post.rank, post.size)
        to = [post.after] if hops else []
        own = _begun(self._publish(key, first, shard, out, parts[post.rank], to))
        for tick in self._ticks([parts[hop.receives] for hop in hops]):
            next(own, None)
            for turn, piece in tick:
                payload = self._take(Label(key, first + turn, piece), post.before, until)
                if turn < len(hops) - 1:
                    post.send(post.after, Label(key, first + turn + 1, piece), payload)
                codecs.decode(self._coding, payload, piece.of(out))
        _finish(own)

    def reduce(
        self,
        key: Key,
        values: Tensor,
        out: Tensor,
        parts: Sequence[Span],
        residual: Tensor | None,
        until: float,
    ) -> None:
        """`out` becomes the SUM of this rank's part; two ranks at least."""
        post = self._post
        hops = schedule.ring_reduce(post.rank, post.size)
        own = _begun(self._first(key, values, parts, hops[0].sends, residual))
        coders = [self._part_codec(key, "reduce", hop.receives) for hop in hops]
        for tick in self._ticks([parts[hop.receives] for hop in hops]):
            next(own, None)
            for turn, piece in tick:
                part = parts[hops[turn].receives]
                payload = self._take(Label(key, turn, piece), post.before, until)
                partial = piece.of(values)  # used up, so the sum takes their place
                codecs.fold(self._coding, payload, partial)
                if turn == len(hops) - 1:
                    place(piece, part, out).copy_(partial)
                else:
                    kept_back = kept(piece, residual)
                    again = coders[turn].encode(partial, inside(piece, part), kept_back)
                    post.send(post.after, Label(key, turn + 1, piece), again)
        _finish(own)

    def _ticks(self, parts: Sequence[Span]) -> Iterator[list[tuple[int, Span]]]:
        """What comes, as (turn, piece), in the very order in which the rank before sends it.

        A piece of turn t comes t * AHEAD ticks after its like of turn 0. Whoever sends one of its
        own and then passes on what a tick brought sends in this order, AHEAD ticks later: nothing
        waits in a mailbox in front of what is wanted first, which could not come in if it is full.
        """
        turns = [list(self._pieces(part)) for part in parts]
        last = max((len(pieces) + t * AHEAD for t, pieces in enumerate(turns)), default=0)
        for tick in range(last):
            places = enumerate(tick - t * AHEAD for t in range(len(turns)))
            yield [(t, turns[t][k]) for t, k in places if 0 <= k < len(turns[t])]

    def _first(
        self,
        key: Key,
        values: Tensor,
        parts: Sequence[Span],
        owner: int,
        residual: Tensor | None,
    ) -> Iterator[None]:
        """The part whose sum begins at this rank."""
        post, part = self._post, parts[owner]
        coder = self._part_codec(key, "reduce", owner)
        for piece in self._pieces(part):
            payload = coder.encode(piece.of(values), inside(piece, part), kept(piece, residual))
            post.send(post.after, Label(key, 0, piece), payload)
            yield


class CodedDirect(_Coded):
    """Everybody sends to everybody."""

    def gather(
        self,
        key: Key,
        first: int,
        shard: Tensor,
        out: Tensor,
        parts: Sequence[Span],
        until: float,
    ) -> None:
        """Makes `out` whole."""
        post = self._post
        own = _begun(self._publish(key, first, shard, out, parts[post.rank], post.others))
        turns = zip_longest(*(self._pieces(parts[k]) for k in post.others))
        for turn in turns:
            for sender, piece in zip(post.others, turn, strict=True):
                if piece is not None:
                    payload = self._take(Label(key, first, piece), sender, until)
                    codecs.decode(self._coding, payload, piece.of(out))
            next(own, None)
        _finish(own)

    def reduce(
        self,
        key: Key,
        values: Tensor,
        out: Tensor,
        parts: Sequence[Span],
        residual: Tensor | None,
        until: float,
    ) -> None:
        """`out` becomes the SUM of this rank's part."""
        post, part = self._post, parts[self._post.rank]
        theirs = _begun(self._for_others(key, values, parts, residual))
        coder = self._part_codec(key, "reduce", post.rank)
        *senders, _ = schedule.order(post.rank, post.size)
        for piece in self._pieces(part):
            # Before `out` changes, which may be these very values.
            own = coder.encode(piece.of(values), inside(piece, part), kept(piece, residual))
            label = Label(key, 0, piece)
            came = (self._take(label, k, until, with_others=senders) for k in senders)
            codecs.add_up(self._coding, chain(came, [own]), place(piece, part, out))
            next(theirs, None)
        _finish(theirs)

    def _for_others(
        self, key: Key, values: Tensor, parts: Sequence[Span], residual: Tensor | None
    ) -> Iterator[None]:
        """One chunk for each owner at a time."""
        post = self._post
        coders = [self._part_codec(key, "reduce", owner) for owner in range(post.size)]
        for turn in zip_longest(*(self._pieces(parts[k]) for k in post.others)):
            for to, piece in zip(post.others, turn, strict=True):
                if piece is not None:
                    payload = coders[to].encode(
                        piece.of(values), inside(piece, parts[to]), kept(piece, residual)
                    )
                    post.send(to, Label(key, 0, piece), payload)
            yield


def part_codec(
    coding: WireCodec, key: Key, stage: codecs.Stage, *, sender: int, owner: int
) -> PartCodec:
    """For what one rank sends of one part in one exchange."""
    numbers = {"step": key.step, "micro": key.micro, "unit": key.unit}
    return coding.part(stage, sender=sender, owner=owner, **numbers)


def _begun(sending: Iterator[None]) -> Iterator[None]:
    """The same, with the first few chunks sent."""
    for _ in islice(sending, AHEAD):
        pass
    return sending


def _finish(sending: Iterator[None]) -> None:
    for _ in sending:
        pass


def inside(piece: Span, part: Span) -> Span:
    """A piece of the whole tensor as one of its part."""
    return Span(piece.start - part.start, piece.stop - part.start)


def kept(piece: Span, residual: Tensor | None) -> Tensor | None:
    """A piece's part of what is kept of rounding, where anything is."""
    return None if residual is None else piece.of(residual)
