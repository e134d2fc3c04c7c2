"""Exchanges of values as they are.

What is added is added in the order of `schedule.order`, chunk by chunk, so ring and direct exchange
give the same bits. Half floats are added in fp32 and rounded once, at the end; partial sums of them
travel as fp32.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor

from atoll.collectives import memory, schedule
from atoll.collectives.base import Key, Label
from atoll.collectives.places import Added, Written
from atoll.collectives.post import Post
from atoll.layout import Span

HALF = (torch.float16, torch.bfloat16)


class PlainRing:
    """From neighbour to neighbour; a partial sum goes on while the next chunk is on its way."""

    def __init__(self, post: Post) -> None:
        self._post = post

    def gather(
        self, key: Key, first: int, out: Tensor, parts: Sequence[Span], until: float
    ) -> None:
        """Makes `out`, which holds this rank's part, whole; its phases count from `first`."""
        post = self._post
        hops = schedule.ring_gather(post.rank, post.size)
        cut = partial(pieces, post, dtype=out.dtype)
        for piece in cut(parts[post.rank]) if hops else ():
            post.send(post.after, Label(key, first, piece), piece.of(out))
        coming = [(turn, one) for turn, hop in enumerate(hops) for one in cut(parts[hop.receives])]

        def sent_on(turn: int, piece: Span) -> None:
            if turn < len(hops) - 1:
                post.send(post.after, Label(key, first + turn + 1, piece), piece.of(out))

        for turn, piece in coming:
            place = Written(piece.of(out), partial(sent_on, turn, piece))
            post.expect(Label(key, first + turn, piece), post.before, place)
        for turn, piece in coming:
            label = Label(key, first + turn, piece)
            if not into(post, piece.of(out), label, post.before, until):
                sent_on(turn, piece)

    def reduce(
        self, key: Key, values: Tensor, out: Tensor, parts: Sequence[Span], until: float
    ) -> None:
        """`out` becomes the SUM of this rank's part; two ranks at least."""
        post = self._post
        hops = schedule.ring_reduce(post.rank, post.size)
        for piece in pieces(post, parts[hops[0].sends], values.dtype):
            post.send(post.after, Label(key, 0, piece), _wide(piece.of(values)))
        coming = [
            (turn, piece)
            for turn, hop in enumerate(hops)
            for piece in pieces(post, parts[hop.receives], values.dtype)
        ]

        def goal(turn: int, piece: Span) -> Tensor:
            """Where a sum belongs: the own values are used up, so a partial one takes theirs."""
            is_last = turn == len(hops) - 1
            return place(piece, parts[post.rank], out) if is_last else piece.of(values)

        def sent_on(turn: int, piece: Span, total: Tensor) -> None:
            if turn < len(hops) - 1:
                post.send(post.after, Label(key, turn + 1, piece), total)

        for turn, piece in coming if _fold(values) == values.dtype else ():
            total = goal(turn, piece)
            then = partial(sent_on, turn, piece, total)
            post.expect(Label(key, turn, piece), post.before, Added(piece.of(values), total, then))
        for turn, piece in coming:
            own, total = piece.of(values), goal(turn, piece)
            nbytes = own.numel() * _fold(own).itemsize
            data = post.take(Label(key, turn, piece), post.before, nbytes=nbytes, until=until)
            came = memory.tensor_of(data, _fold(own))
            if came.data_ptr() == total.data_ptr():
                continue  # it was added, and sent on, as it came
            if turn == len(hops) - 1:
                _add_into(came, own, total)
            else:
                sent_on(turn, piece, _added(came, own, total))


class PlainDirect:
    """Everybody sends to everybody; who owns a part adds it up itself."""

    def __init__(self, post: Post) -> None:
        self._post = post

    def gather(
        self, key: Key, first: int, out: Tensor, parts: Sequence[Span], until: float
    ) -> None:
        """Makes `out`, which holds this rank's part, whole."""
        post = self._post
        for piece in pieces(post, parts[post.rank], out.dtype):
            for to in post.others:
                post.send(to, Label(key, first, piece), piece.of(out))
        for sender in post.others:
            for piece in pieces(post, parts[sender], out.dtype):
                post.expect(Label(key, first, piece), sender, Written(piece.of(out)))
        # One chunk of each in turn: nobody's stream stands still while another's is read.
        turns = zip_longest(*(pieces(post, parts[k], out.dtype) for k in post.others))
        for turn in turns:
            for sender, piece in zip(post.others, turn, strict=True):
                if piece is not None:
                    into(post, piece.of(out), Label(key, first, piece), sender, until)

    def reduce(
        self, key: Key, values: Tensor, out: Tensor, parts: Sequence[Span], until: float
    ) -> None:
        """`out` becomes the SUM of this rank's part; two ranks at least."""
        post = self._post
        turns = zip_longest(*(pieces(post, parts[k], values.dtype) for k in post.others))
        for turn in turns:
            for to, piece in zip(post.others, turn, strict=True):
                if piece is not None:
                    post.send(to, Label(key, 0, piece), piece.of(values))
        *senders, _ = schedule.order(post.rank, post.size)
        for piece in pieces(post, parts[post.rank], values.dtype):
            label, own = Label(key, 0, piece), piece.of(values)
            nbytes = own.numel() * own.element_size()
            came = (
                post.take(label, sender, nbytes=nbytes, until=until, with_others=senders)
                for sender in senders
            )
            theirs = (memory.tensor_of(data, own.dtype) for data in came)
            add_up(theirs, own, place(piece, parts[post.rank], out))


def pieces(post: Post, span: Span, dtype: torch.dtype) -> Iterable[Span]:
    """Of a part, each a message; as large as a chunk may be when it travels widest."""
    itemsize = (torch.float32 if dtype in HALF else dtype).itemsize
    return schedule.chunks(span, max(1, post.chunk_bytes // itemsize))


def into(post: Post, place: Tensor, label: Label, sender: int, until: float) -> bool:
    """`place` becomes what a message says; True: it was received here."""
    nbytes = place.numel() * place.element_size()
    data = post.take(label, sender, nbytes=nbytes, until=until)
    came = memory.tensor_of(data, place.dtype)
    is_here = came.data_ptr() == place.data_ptr()
    if not is_here:
        place.copy_(came)
    return is_here


def place(piece: Span, part: Span, out: Tensor) -> Tensor:
    """Where a piece of a rank's part lies in a tensor that is that part alone."""
    return out[piece.start - part.start : piece.stop - part.start]


def _fold(values: Tensor) -> torch.dtype:
    return torch.float32 if values.dtype in HALF else values.dtype


def _wide(values: Tensor) -> Tensor:
    """As it is added up."""
    return values.to(_fold(values))


def add_up(came: Iterable[Tensor], own: Tensor, place: Tensor) -> None:
    """`place`, which may be `own`, becomes the sum of what came, in that order, and the own values.

    What came is for reading alone, one at a time, and there is one at least.
    """
    total: Tensor | None = None
    for index, one in enumerate(came):
        if total is None:
            total = _wide(one)
        else:
            total = total.add_(one) if index > 1 else total + _wide(one)
    assert total is not None
    _add_into(total, own, place)


def _add_into(total: Tensor, own: Tensor, place: Tensor) -> None:
    """`place`, which may be `own`, becomes the sum so far plus the own values."""
    found = _added(total, own, place)
    if found.dtype != place.dtype:
        place.copy_(found)


def _added(came: Tensor, own: Tensor, place: Tensor) -> Tensor:
    """The sum of both: at `place`, which may be `own`, unless that is a half float."""
    if came.dtype == place.dtype:
        return torch.add(came, own, out=place)  # in one pass
    return came + _wide(own)
