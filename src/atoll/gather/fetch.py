"""Fetches and checks the peers that a rank was given; each ends accepted or skipped, none raises.

A few places to download, held by quick peers alone (`places`). An object is asked for in pieces
that grow while its server is quick and take a part of a turn, so a piece is rarely cut. A slow
peer goes on beside the places, and lets the next one there at the end of a piece after its turn.
What came is in the spool: the next turn, or the next life of this process, goes on behind it. What
checks an object is made anew for each turn and fed from the spool, so memory is that of the places,
not of the peers.
"""

import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from atoll.blobs.bucket import Bucket
from atoll.clock import Clock
from atoll.errors import (
    AtollError,
    ConfigError,
    DiskFailed,
    ObjectChanged,
    ObjectMissing,
    ObjectRefused,
    ObjectSize,
    StorageFull,
    StoreAway,
    StoreLate,
)
from atoll.gather import publish
from atoll.gather import statement as statements
from atoll.gather.errand import Errand, Pace
from atoll.gather.partial import Accepted, Partial, Skipped, shortened
from atoll.gather.peers import Peer
from atoll.gather.places import (
    FIRST_PIECE_BYTES,
    MOST_TRIALS,
    WIDTH,
    Places,
    Run,
    in_threads,
)
from atoll.gather.spool import Part, Record, Spool
from atoll.gather.statement import Statement
from atoll.gather.words import Reason, Skip

log = logging.getLogger(__name__)

LEAST_PIECE_BYTES = 512
_GROWTH = 4
_OBJECT = "object where its statement points"
_LATE = 4  # so many times what a quick peer's piece should take, before it is cut
_OF_A_TURN = 4  # quick is who takes a quarter of what a call may


class Checked(Protocol):
    """What a validator knows of an object that it has seen whole."""

    @property
    def sha256(self) -> str: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def payload_start(self) -> int: ...

    @property
    def squares(self) -> tuple[float, ...]: ...


class Validator(Protocol):
    """Checks an object as its bytes come, cut anyhow; both raise Skip."""

    def feed(self, piece: memoryview, /) -> object: ...

    def finish(self) -> Checked: ...


class ValidatorOf(Protocol):
    """The validator of a peer's object; Skip when the statement is not the window's."""

    def __call__(self, peer: Peer, statement: Statement, /) -> Validator: ...


@dataclass(frozen=True, slots=True)
class Fetched:
    """What became of the peers, in uid order."""

    accepted: tuple[Accepted, ...]
    skipped: tuple[Skipped, ...]
    answered: tuple[str, ...]  # servers that answered somebody while others failed
    received_bytes: int  # of objects, in this call

    def partial(self, rank: int) -> Partial:
        """As the ranks tell each other."""
        return Partial(rank, self.accepted, self.skipped, self.answered)


@dataclass(frozen=True, kw_only=True)
class Fetcher:
    """What one rank fetches a window's peers with."""

    window: int
    buckets: Mapping[str, Bucket]
    validator_of: ValidatorOf
    spool: Spool
    clock: Clock
    slots: int
    piece_bytes: int
    rank: int = 0
    pace: Pace = field(default_factory=Pace)
    jitter: random.Random = field(default_factory=lambda: random.Random(0))
    run: Run = in_threads  # all places at once; a simulation gives fibers

    def fetch(self, peers: Sequence[Peer], *, deadline: float) -> Fetched:
        """Accepts or skips each of `peers`, by the time `deadline` of the clock.

        ConfigError for a bucket that the run does not have. A disk that fails raises, for it is
        nobody's fault but this rank's; a full one skips.
        """
        for peer in peers:
            if peer.bucket not in self.buckets:
                raise ConfigError(
                    f"peer {peer.uid!r} has bucket={peer.bucket!r}; the run has "
                    f"{', '.join(sorted(self.buckets))}"
                )
        return _Fetch(self, peers, deadline).done()


class _Fetch:
    """One call of `fetch`."""

    def __init__(self, by: Fetcher, peers: Sequence[Peer], deadline: float) -> None:
        self._by = by
        self._clock = by.clock
        self._deadline = deadline
        self._started = by.clock.now()
        first = min(FIRST_PIECE_BYTES, by.piece_bytes)
        self._errands = [
            Errand(peer, by.pace.turn_seconds, by.pace.first_wait_seconds, first)
            for peer in sorted(peers, key=lambda peer: peer.uid)
        ]
        self._places = Places(
            self._errands,
            slots=by.slots,
            grace_seconds=by.pace.turn_seconds / _OF_A_TURN,
            clock=by.clock,
            deadline=deadline,
        )
        self._accepted: dict[str, Accepted] = {}
        self._answers: dict[str, float] = {}  # by server, the last one
        self._received: dict[str, int] = {}  # by uid

    def done(self) -> Fetched:
        count = min(WIDTH * self._by.slots + MOST_TRIALS, len(self._errands))
        if count:
            self._by.run([self._work] * count)
        if self._places.error is not None:
            raise self._places.error
        skipped = tuple(
            errand.skipped or errand.at_deadline()
            for errand in self._errands
            if errand.peer.uid not in self._accepted
        )
        accepted = tuple(one for _, one in sorted(self._accepted.items()))
        received = sum(self._received.values())
        return Fetched(accepted, skipped, self._answered(), received)

    def _answered(self) -> tuple[str, ...]:
        """Servers that answered somebody after one of their peers began to fail, or never failed.

        So one that went away after it had served others is not taken for a peer's own trouble.
        """
        since: dict[str, float] = {}
        for errand in self._errands:
            if errand.trouble is not None:
                server = errand.peer.bucket
                since[server] = min(since.get(server, errand.trouble_since), errand.trouble_since)
        return tuple(
            sorted(s for s, at in self._answers.items() if s not in since or at > since[s])
        )

    # One place

    def _work(self) -> None:
        while (errand := self._places.take()) is not None:
            try:
                is_settled = self._turn(errand)
            except BaseException as exc:
                self._places.give_up(errand, exc)
                return
            if is_settled:
                self._places.settle(errand)
            else:
                self._places.put_back(errand)

    def _turn(self, errand: Errand) -> bool:
        """Whether the peer needs no more turns."""
        errand.has_begun = True
        errand.ready_at = 0.0
        try:
            accepted = self._fetched(errand)
        except Skip as skip:
            return self._skip(errand, skip)
        except ObjectMissing:
            errand.missed = errand.missed or _OBJECT
            return self._missed(errand)
        except ObjectChanged as exc:
            return self._skip(errand, Skip(Reason.CHANGED, str(exc)))
        except ObjectSize as exc:
            return self._skip(errand, Skip(Reason.SIZE, str(exc)))
        except ObjectRefused as exc:
            errand.failed(exc, self._clock.now())
            errand.skipped = errand.away(Reason.MISSING)
            return True
        except StoreAway as exc:
            errand.failed(exc, self._clock.now())
            errand.retry(self._clock.now(), self._by.pace, self._by.jitter)
            return False
        except StoreLate:
            # Cut by the end of its turn: that it is slow is known now. At the deadline it is not.
            errand.is_slow = errand.is_slow or self._clock.now() < self._deadline
            errand.is_known = True
            return False
        except StorageFull as exc:
            return self._skip(errand, Skip(Reason.DISK_FULL, str(exc)))
        if accepted is not None:
            self._accepted[errand.peer.uid] = accepted
        return accepted is not None

    def _skip(self, errand: Errand, skip: Skip) -> bool:
        uid = errand.peer.uid
        self._by.spool.forget(uid)
        if errand.found_in_spool and skip.reason is not Reason.DISK_FULL:
            # Bytes of an earlier life may have been lost by our disk: that says nothing yet.
            log.warning("spooled object is fetched anew", extra={"uid": uid, "why": skip.sentence})
            errand.found_in_spool, errand.record = False, None
            return False
        errand.skipped = Skipped(uid, skip.reason, shortened(skip.sentence))
        return True

    def _missed(self, errand: Errand) -> bool:
        now = self._clock.now()
        if now - self._started >= self._by.pace.patience_seconds:
            errand.skipped = errand.at_deadline()
            return True
        errand.retry(now, self._by.pace, self._by.jitter)
        return False

    # One peer's turn

    def _fetched(self, errand: Errand) -> Accepted | None:
        """The peer, once its object is whole; None where it gives its place up before."""
        peer, spool = errand.peer, self._by.spool
        record = errand.record
        if record is None:
            record = spool.record(peer.uid)
            errand.found_in_spool = record is not None
        if record is None:
            record = self._pinned(errand)
        errand.record = record
        with _guarded(peer):
            statement = statements.read(record.document, peer.key)
            validator = self._by.validator_of(peer, statement)
        if record.tag.nbytes != statement.nbytes:
            raise Skip(
                Reason.SIZE,
                f"the object of {peer.uid!r} has {record.tag.nbytes} bytes; its statement says "
                f"{statement.nbytes}",
            )
        if errand.found_in_spool and spool.has(statement.sha256):
            return self._finished_before(errand, record, statement, validator)
        with spool.draft(peer.uid, statement.nbytes) as part:
            for piece in part.written():
                with _guarded(peer):
                    validator.feed(piece)
            if not self._download(errand, record, statement, validator, part):
                return None
            with _guarded(peer):
                checked = validator.finish()
            spool.finish(part, statement.sha256)
        return self._accept(errand, record, statement, checked)

    def _pinned(self, errand: Errand) -> Record:
        """The peer's statement and its object's tag, from now on the only ones."""
        peer, bucket = errand.peer, self._by.buckets[errand.peer.bucket]
        key = publish.statement_key(peer.prefix, self._by.window)
        with self._call(errand) as until:
            tag = bucket.look(key, deadline=until)
            self._heard(errand)
            if tag is None:
                errand.missed, errand.was_missing = "statement", True
                raise ObjectMissing
            if tag.nbytes > statements.MAX_BYTES:
                raise Skip(
                    Reason.STATEMENT,
                    f"the statement of {peer.uid!r} has {tag.nbytes} bytes; at most "
                    f"{statements.MAX_BYTES} are allowed",
                )
            # Joined piece by piece: a piece is good until the next one.
            document = b"".join(
                bytes(piece) for piece in bucket.pieces(key, tag, 0, tag.nbytes, deadline=until)
            )
        with _guarded(peer):
            statement = statements.read(document, peer.key)
            self._by.validator_of(peer, statement)  # before its object is even looked for
        with self._call(errand) as until:
            place = publish.frame_key(peer.prefix, statement.sha256)
            found = bucket.look(place, deadline=until)
            self._heard(errand)
        if found is None:
            errand.missed = _OBJECT
            raise ObjectMissing
        errand.missed = ""
        record = Record(document, found)
        self._by.spool.forget(peer.uid)  # bytes of another statement's object
        self._by.spool.keep(peer.uid, record)
        return record

    def _download(
        self,
        errand: Errand,
        record: Record,
        statement: Statement,
        validator: Validator,
        part: Part,
    ) -> bool:
        """Whether the object is whole; False where the place is given up at the end of a piece."""
        peer, bucket = errand.peer, self._by.buckets[errand.peer.bucket]
        key = publish.frame_key(peer.prefix, statement.sha256)
        turn_ends = self._clock.now() + self._by.pace.turn_seconds
        while part.offset < part.nbytes:
            if not self._places.may_go_on(errand):
                return False
            now, limit = self._clock.now(), errand.limit_seconds
            if errand.is_slow and now >= turn_ends and self._places.is_wanted():
                return False
            start = part.offset
            stop = min(start + errand.piece_bytes, part.nbytes)
            is_cut = False
            try:
                expected = self._places.expected_seconds(errand)
                with self._call(errand, _LATE * expected) as until:
                    for piece in bucket.pieces(key, record.tag, start, stop, deadline=until):
                        with _guarded(peer):
                            validator.feed(piece)
                        part.write(piece)
            except StoreLate:
                is_cut = self._clock.now() < self._deadline
                raise
            finally:
                if part.offset > start:
                    errand.limit_seconds = limit  # it said something in time
                self._measured(errand, part.offset - start, self._clock.now() - now, is_cut)
        return True

    def _measured(self, errand: Errand, nbytes: int, seconds: float, is_cut: bool) -> None:
        """The next piece is larger where this one was quick, and half of what came where cut."""
        if not nbytes:
            return
        uid = errand.peer.uid
        self._received[uid] = self._received.get(uid, 0) + nbytes
        self._heard(errand)
        errand.missed = ""
        self._places.seen(errand, nbytes, seconds, is_cut=is_cut)
        if is_cut:
            errand.piece_bytes = max(LEAST_PIECE_BYTES, nbytes // 2)
        elif seconds <= errand.limit_seconds / _OF_A_TURN:
            errand.piece_bytes = min(self._by.piece_bytes, errand.piece_bytes * _GROWTH)

    def _finished_before(
        self, errand: Errand, record: Record, statement: Statement, validator: Validator
    ) -> Accepted:
        """An object that an earlier life has finished, checked again as if it came now."""
        spool, sha256 = self._by.spool, statement.sha256
        try:
            with spool.open(sha256) as reader, _guarded(errand.peer):
                for start in range(0, reader.nbytes, FIRST_PIECE_BYTES):  # it is on trial
                    length = min(FIRST_PIECE_BYTES, reader.nbytes - start)
                    validator.feed(memoryview(reader.read(start, length)))
                checked = validator.finish()
        except Skip:
            spool.drop_if_damaged(sha256)
            raise
        return self._accept(errand, record, statement, checked)

    def _accept(
        self, errand: Errand, record: Record, statement: Statement, checked: Checked
    ) -> Accepted:
        return Accepted(
            uid=errand.peer.uid,
            sha256=statement.sha256,
            nbytes=statement.nbytes,
            squares=tuple(checked.squares),
            stamp=record.tag.modified,
            payload_start=checked.payload_start,
            rank=self._by.rank,
            statement=record.document.decode("ascii"),
        )

    # A server's answers

    @contextmanager
    def _call(self, errand: Errand, least_seconds: float = 0.0) -> Iterator[float]:
        """Until when a call may take; one that says nothing in time may take longer next time."""
        seconds = max(errand.limit_seconds, least_seconds)
        until = min(self._deadline, self._clock.now() + seconds)
        try:
            yield until
        except StoreLate as exc:
            if until < self._deadline:  # it had its time; whoever got bytes takes this back
                longest = self._by.pace.longest_turn_seconds
                errand.limit_seconds = min(longest, errand.limit_seconds * 2)
                errand.failed(exc, self._clock.now())
            raise

    def _heard(self, errand: Errand) -> None:
        self._answers[errand.peer.bucket] = self._clock.now()
        errand.answered(self._by.pace)


@contextmanager
def _guarded(peer: Peer) -> Iterator[None]:
    """Whatever a peer's bytes lead to is a skip of that peer, and nobody else's trouble."""
    try:
        yield
    except (Skip, StorageFull, DiskFailed):
        raise
    except AtollError as exc:
        raise Skip(Reason.FRAME, str(exc)) from exc
    except Exception as exc:  # a fault of ours in code that reads hostile bytes
        log.exception("checking a peer's object failed", extra={"uid": peer.uid})
        told = f"the object of {peer.uid!r} could not be checked ({type(exc).__name__})"
        raise Skip(Reason.FRAME, told) from exc
