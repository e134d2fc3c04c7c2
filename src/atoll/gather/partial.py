"""What one rank found out about the peers it was given, as values and as bounded canonical JSON.

Payloads are named, never carried: they stay in the spool of the rank that fetched them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from atoll import canonical
from atoll.codecs.base import Codec
from atoll.codecs.topk.chunks import CHUNK
from atoll.errors import FrameError
from atoll.gather.statement import MAX_BYTES as MAX_STATEMENT_BYTES
from atoll.gather.words import Reason
from atoll.layout import Layout, Span, TensorSpec
from atoll.wire import schema

LIMIT_BYTES = 8 << 20  # norms of 64 peers x 1,000 tensors are 1.3 MB
MAX_SENTENCE = 500
_OF = "partial"
_REASON = schema.one_of([str(reason) for reason in Reason])
_LIST = schema.Rule("a list", lambda value: isinstance(value, list))
_OBJECT = schema.Rule("a JSON object", lambda value: isinstance(value, dict))
_SENTENCE = schema.Rule(
    f"a string of at most {MAX_SENTENCE} characters",
    lambda value: isinstance(value, str) and len(value) <= MAX_SENTENCE,
)
_STATEMENT = schema.Rule(
    f"a string of at most {MAX_STATEMENT_BYTES} ASCII characters",
    lambda value: isinstance(value, str) and value.isascii() and len(value) <= MAX_STATEMENT_BYTES,
)
_NAME = schema.matching("[!-~]{1,64}", "1 to 64 printable ASCII characters without spaces")


@dataclass(frozen=True, slots=True)
class Accepted:
    """A peer whose object is whole and valid, and lies in the spool of `rank`."""

    uid: str
    sha256: str
    nbytes: int  # of the object
    squares: tuple[float, ...]  # norm² per parameter, in the layout's order
    stamp: float | None  # the object's time by its own server; None where it told none
    payload_start: int  # where the payload begins in the object
    rank: int = field(compare=False)  # who fetched it; says nothing about the peer
    statement: str = ""  # what the peer signed, as it was read; an artifact carries it


@dataclass(frozen=True, slots=True)
class Skipped:
    """A peer that is left out, and why.

    Where a server was away, its peers are blamed only if it answered others: `server` is which, and
    `otherwise` what it is then.
    """

    uid: str
    reason: Reason
    sentence: str
    server: str = ""
    otherwise: Reason | None = None


@dataclass(frozen=True, slots=True)
class PayloadRef:
    """The chunks of a payload that hold a parameter: bytes `[start, stop)`, counted in it."""

    uid: str
    sha256: str
    start: int
    stop: int


class Settled:
    """Peers of whom each is accepted or skipped, in uid order: a rank's, or all of a window."""

    __slots__ = ()
    accepted: tuple[Accepted, ...]
    skipped: tuple[Skipped, ...]

    @property
    def uids(self) -> tuple[str, ...]:
        return tuple(one.uid for one in self.accepted)

    @property
    def skipped_uids(self) -> tuple[str, ...]:
        return tuple(one.uid for one in self.skipped)

    @property
    def reasons(self) -> dict[str, Reason]:
        """Why each skipped uid is."""
        return {one.uid: one.reason for one in self.skipped}


@dataclass(frozen=True, slots=True)
class Partial(Settled):
    """One rank's peers, each accepted or skipped, in uid order."""

    rank: int
    accepted: tuple[Accepted, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    answered: tuple[str, ...] = ()  # servers that answered somebody while others failed

    @property
    def assigned(self) -> int:
        """How many peers the rank was given."""
        return len(self.accepted) + len(self.skipped)

    @property
    def success_rate_part(self) -> float:
        """Accepted / assigned; 0.0 for a rank that was given nobody."""
        return len(self.accepted) / self.assigned if self.assigned else 0.0

    @property
    def squares(self) -> Mapping[str, tuple[float, ...]]:
        """norm² per parameter of each accepted uid."""
        return {one.uid: one.squares for one in self.accepted}

    @property
    def download_bytes(self) -> int:
        """Of the accepted objects."""
        return sum(one.nbytes for one in self.accepted)

    def payloads(self, layout: Layout, codec: Codec) -> dict[str, list[PayloadRef]]:
        """Where each parameter's values lie, by its name; lists aligned with `uids`."""
        return {
            spec.name: [
                PayloadRef(one.uid, one.sha256, *bytes_of(spec, layout, codec))
                for one in self.accepted
            ]
            for spec in layout.tensors
        }

    def dumps(self) -> bytes:
        """Canonical JSON; FrameError where it is larger than anybody takes."""
        return bounded(self.plain())

    def plain(self) -> dict[str, object]:
        """As JSON has it."""
        return {
            "accepted": [
                [
                    *(a.uid, a.sha256, a.nbytes, list(a.squares), a.stamp, a.payload_start),
                    a.statement,
                ]
                for a in self.accepted
            ],
            "answered": list(self.answered),
            "rank": self.rank,
            "skipped": [
                [s.uid, str(s.reason), s.sentence, s.server, s.otherwise and str(s.otherwise)]
                for s in self.skipped
            ],
        }


def chunks_of(spec: TensorSpec, layout: Layout) -> Span:
    """The elements of the whole chunks that hold a parameter; the layout's last one is short."""
    start = spec.span.start // CHUNK * CHUNK
    return Span(start, min(-(-spec.span.stop // CHUNK) * CHUNK, layout.size))


def bytes_of(spec: TensorSpec, layout: Layout, codec: Codec) -> tuple[int, int]:
    """Where those chunks begin and end in a payload."""
    span = chunks_of(spec, layout)
    return codec.encoded_bytes(span.start), codec.encoded_bytes(span.stop)


def shortened(sentence: str) -> str:
    """A sentence that fits into a partial: what a peer's bytes say may be long, or not ASCII."""
    told = sentence.encode("ascii", "backslashreplace").decode()
    return told if len(told) <= MAX_SENTENCE else told[: MAX_SENTENCE - 3] + "..."


def bounded(plain: object) -> bytes:
    """Canonical JSON of at most `LIMIT_BYTES`."""
    data = canonical.dumps(plain).encode("ascii")
    if len(data) > LIMIT_BYTES:
        raise FrameError(
            f"a {_OF} of {len(data)} bytes is larger than the {LIMIT_BYTES} that ranks take; "
            f"use more ranks or fewer peers"
        )
    return data


def loads(data: bytes, *, layout: Layout) -> Partial:
    """The partial in `data`, every field checked; FrameError names the first that is off."""
    if len(data) > LIMIT_BYTES:
        raise FrameError(f"{_OF} has {len(data)} bytes; at most {LIMIT_BYTES} are allowed")
    return parsed(schema.object_of(data, of=_OF), layout=layout)


def parsed(found: dict[str, object], *, layout: Layout) -> Partial:
    """The partial in a JSON object."""
    schema.keys(found, known=("accepted", "answered", "rank", "skipped"), of=_OF)
    table: dict[str, Any] = found  # of any type until each rule has held
    schema.WHOLE.check("rank", table["rank"], of=_OF)
    for name in ("accepted", "answered", "skipped"):
        _LIST.check(name, table[name], of=_OF)
    for server in table["answered"]:
        _NAME.check("answered entry", server, of=_OF)
    accepted = tuple(_accepted(row, table["rank"], layout) for row in table["accepted"])
    skipped = tuple(_skipped(row) for row in table["skipped"])
    for name, uids in (
        ("accepted", [one.uid for one in accepted]),
        ("skipped", [one.uid for one in skipped]),
        ("answered", table["answered"]),
    ):
        if uids != sorted(set(uids)):
            raise FrameError(f"{_OF} {name} are not in order, each once; the sender is damaged")
    return Partial(table["rank"], accepted, skipped, tuple(table["answered"]))


def _accepted(row: object, rank: int, layout: Layout) -> Accepted:
    uid, sha256, nbytes, squares, stamp, payload_start, statement = _row(row, 7, "accepted")
    schema.WORKER_ID.check("accepted uid", uid, of=_OF)
    schema.SHA256.check("accepted sha256", sha256, of=_OF)
    schema.NATURAL.check("accepted nbytes", nbytes, of=_OF)
    schema.WHOLE.check("accepted payload_start", payload_start, of=_OF)
    _LIST.check("accepted squares", squares, of=_OF)
    if len(squares) != len(layout.tensors):
        raise FrameError(
            f"{_OF} of rank {rank} has {len(squares)} norms of {uid!r}; the layout has "
            f"{len(layout.tensors)} tensors"
        )
    for square in squares:
        schema.NORM.check("accepted square", square, of=_OF)
    if stamp is not None:
        schema.REAL.check("accepted stamp", stamp, of=_OF)
    _STATEMENT.check("accepted statement", statement, of=_OF)
    return Accepted(uid, sha256, nbytes, tuple(squares), stamp, payload_start, rank, statement)


def _skipped(row: object) -> Skipped:
    uid, reason, sentence, server, otherwise = _row(row, 5, "skipped")
    schema.WORKER_ID.check("skipped uid", uid, of=_OF)
    _REASON.check("skipped reason", reason, of=_OF)
    _SENTENCE.check("skipped sentence", sentence, of=_OF)
    if server != "":
        _NAME.check("skipped server", server, of=_OF)
    if otherwise is not None:
        _REASON.check("skipped otherwise", otherwise, of=_OF)
    return Skipped(
        uid, Reason(reason), sentence, server, None if otherwise is None else Reason(otherwise)
    )


def _row(row: object, columns: int, name: str) -> list[Any]:
    if not isinstance(row, list) or len(row) != columns:
        raise FrameError(f"{_OF} {name} entry must be a list of {columns}")
    return row
