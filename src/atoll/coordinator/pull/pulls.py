"""Announced contributions: checked, pulled from their buckets when it is their turn, accepted.

    announcement -> receipt? -> header -> statement -> turn -> pull -> accept path -> receipt

In the thread of the request. Nothing is visible before the accept path's transaction; after a crash
the island announces again. What is the worker's own fault ends its part in the round, in one
transaction with the record of it; what is ours (a server, a disk) ends nothing, and the island
announces again.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import NoReturn

from atoll.blobs.bucket import Bucket
from atoll.clock import Clock
from atoll.codecs.topk.settings import TopKSettings
from atoll.coordinator.accept.admission import Admission, UploadRequest
from atoll.coordinator.accept.uploads import Uploads, UploadStream
from atoll.coordinator.counters import Counters
from atoll.coordinator.pull import pull as pulling
from atoll.coordinator.pull.places import Places, Servers
from atoll.coordinator.pull.pull import Opened, Pull, Source
from atoll.errors import (
    AtollError,
    ConfigError,
    Conflict,
    LeftOut,
    ObjectRefused,
    StoreAway,
    StoreLate,
    UnknownWorker,
)
from atoll.gather import publish
from atoll.gather import statement as statements
from atoll.gather.keys import PublicKey
from atoll.gather.partial import shortened
from atoll.gather.statement import Statement
from atoll.gather.validate import Expected
from atoll.gather.words import Reason, Skip
from atoll.ledger.records import AnnouncementRecord, ContributionRecord
from atoll.protocol import gather
from atoll.protocol.gather import AnnounceReply, AnnounceRequest
from atoll.strategies.base import Lease

log = logging.getLogger(__name__)

GO_ON = "its rows are open again; go on with the next assignment"


@dataclass(eq=False)
class Pulls:
    """Takes announcements, from request threads. Thread-safe; one pull per worker and round."""

    uploads: Uploads
    admission: Admission
    buckets: Mapping[str, Bucket]
    clock: Clock
    _: KW_ONLY
    counters: Counters
    changed: Callable[[], None]

    def __post_init__(self) -> None:
        self.rounds, self.registry = self.admission.rounds, self.admission.registry
        self.places, self.servers = Places(self.clock), Servers(self.clock)
        self._lock = threading.Lock()
        self._open: dict[Lease, Pull] = {}  # begun and not over
        self._wanted: set[Lease] = set()  # whose turn it was at the last tick

    def announce(self, message: AnnounceRequest) -> AnnounceReply:
        """The receipt, once the contribution is accepted; without one, why it is not yet.

        Conflict for other bytes, or another statement, than were announced before. LeftOut when
        the round goes on without it; else what the accept path refuses, as it does.
        """
        request = UploadRequest(
            message.identity, message.preamble_bytes(), message.sha256, message.nbytes
        )
        document = message.document().decode("utf-8")
        lease: Lease = request.header.round, request.identity.worker_id
        accepted = self.admission.receipt(request)
        if accepted is not None:
            self._check_stated(lease, document)
            return AnnounceReply(receipt=accepted.receipt)
        self._check_skipped(lease)
        try:
            source = self._checked(request, lease, document)
        except Skip as skip:
            self._skip(lease, skip)
        waits_for = self._turn(source, lease)
        if waits_for:
            return AnnounceReply(waits_for=waits_for)
        try:
            return self._pulled(source, request, lease)
        finally:
            self.places.leave(lease)
            self.changed()  # somebody may wait for the place

    def tick(self) -> None:
        """Wakes those that wait for their turn, a place, or a server; on every tick."""
        if self._has_turned() | self.places.call_again() | self.servers.call_again():
            self.changed()

    def _has_turned(self) -> bool:
        """Whether it is somebody's turn since the last tick: by the time of primaries, say."""
        views = [self.rounds.view(r.number) for r in self.rounds.open_rounds]
        before, self._wanted = (
            self._wanted,
            {
                (view.round, worker_id)
                for view in views
                if view is not None
                for worker_id in self.rounds.strategy_of(view.round).waiting_for(view)
            },
        )
        return bool(self._wanted - before)

    def drop_stale(self) -> None:
        """A round closed: forgets what came for rounds that take nothing any more."""
        taking = {r.number for r in self.rounds.open_rounds}
        with self._lock:
            self._open = {lease: pull for lease, pull in self._open.items() if lease[0] in taking}
        self.servers.forget(taking)

    # Before anything is read

    def _check_stated(self, lease: Lease, document: str) -> None:
        """Conflict unless this is what was stated of what is accepted."""
        with self.rounds.ledger.reading() as t:
            known = t.announcements.get(*lease)
        if known is not None and known.statement != document:
            raise _other_statement(lease)

    def _check_skipped(self, lease: Lease) -> None:
        """LeftOut, again, for a worker that this round goes on without."""
        number, worker_id = lease
        if not self.rounds.leased(number, worker_id):
            mine = [skip for skip in self.rounds.skips(number) if skip.worker_id == worker_id]
            for skip in mine[-1:]:
                raise LeftOut(f"{skip.reason}: {skip.sentence}; {GO_ON}")

    def _checked(self, request: UploadRequest, lease: Lease, document: str) -> Source:
        """Where the object is, once header and statement are those of an honest contribution."""
        worker_id = request.identity.worker_id
        with pulling.skipping(worker_id):
            self.admission.check(request)
        header = request.header
        _, layout = self.admission.expected(header.round)
        expected = Expected(
            run_id=header.run_id,
            manifest_sha256=header.manifest_sha256,
            uid=worker_id,
            window=header.round,
            base_digest=header.base_digest or "",
            layout=layout,
            codec=TopKSettings().build(),  # the strategy takes no other
            sample_digest=gather.sample_digest(header.ranges),
        )
        known = self.rounds.announcement(*lease)
        if known is not None and known.statement != document:
            # It may have been given other rows since: only of the same ones there is one statement.
            before = statements.unverified(known.statement.encode())
            if before.sample_digest == expected.sample_digest:
                # Only refused, it is waited for as long as it does not announce the first again.
                raise Skip(Reason.CONFLICT, str(_other_statement(lease)))
            known = None
        publisher = self.registry.publishers.get(worker_id)
        if publisher is None:
            raise UnknownWorker(
                f"the key of worker_id={worker_id!r} is not recorded any more; register again"
            )
        statement = statements.read(document.encode(), PublicKey.parse(publisher.public_key))
        expected.check(statement)
        _check_announced(statement, request)
        if known is None:
            self.rounds.announce(AnnouncementRecord(*lease, document))
            self.changed()
        bucket = self.buckets.get(publisher.bucket)
        if bucket is None:
            raise ConfigError(
                f"the coordinator has no bucket {publisher.bucket!r}, in which {worker_id!r} "
                f"publishes; it has {', '.join(sorted(self.buckets)) or 'none'}"
            )
        prefix = gather.prefix_of(header.run_id, worker_id)
        key = publish.frame_key(prefix, statement.sha256)
        return Source(publisher.bucket, bucket, key, document, statement, expected)

    def _turn(self, source: Source, lease: Lease) -> str:
        """Why it is not pulled now; "" when it is, and then its place must be left again."""
        number, worker_id = lease
        view = self.rounds.view(number)
        if view is None:
            return f"round {number} to open"
        strategy = self.rounds.strategy_of(number)
        waited = strategy.waiting_for(view)
        if worker_id not in waited:
            others = ", ".join(sorted(waited)[:8]) or "the round to close"
            return f"{others}: {worker_id!r} is a reserve of round {number}"
        if self.servers.is_waited_for(lease):
            return f"bucket {source.name!r} to answer"
        return self.places.take(lease, room=lambda: self._room(number))

    def _room(self, round_number: int) -> int:
        view = self.rounds.view(round_number)
        return 0 if view is None else self.rounds.strategy_of(round_number).places(view)

    # The pull

    def _pulled(self, source: Source, request: UploadRequest, lease: Lease) -> AnnounceReply:
        pull = self._pull_of(source, request, lease)
        try:
            record = self._accepted(pull, lease)
        except Skip as skip:
            # Also by saying that there is none: whom it denies something meanwhile, it denies it.
            self.servers.answered(source.name, lease)
            self._forget(lease)
            self._skip(lease, skip)
        except (StoreAway, StoreLate, ObjectRefused) as exc:
            return self._interrupted(pull, lease, exc)
        except BaseException:
            self._forget(lease)
            raise
        self._forget(lease)
        return AnnounceReply(receipt=record.receipt)

    def _pull_of(self, source: Source, request: UploadRequest, lease: Lease) -> Pull:
        """The one that an earlier announcement has begun, or a new one."""
        with self._lock:
            pull = self._open.get(lease)
            if pull is None or not pull.is_of(request):
                pull = self._open[lease] = Pull(request, source, self.clock.now())
            return pull

    def _accepted(self, pull: Pull, lease: Lease) -> ContributionRecord:
        number, worker_id = lease
        if pull.is_anew:
            pull.began, pull.is_anew = self.clock.now(), False
        deadline = pull.began + self._seconds(number)
        opened = pull.opened
        if opened is None:
            tag = pull.source.look(deadline=deadline)
            self.servers.answered(pull.source.name, lease)
            validator = pull.validator()  # before there is anything to be given up again
            stream = self.uploads.begin(pull.request)
            if isinstance(stream, ContributionRecord):
                return stream  # the same was announced twice at once
            opened = pull.opened = Opened(tag, stream, validator)
        view = self.rounds.view(number)
        pull.receive(opened, self._write, deadline=deadline)
        self.servers.answered(pull.source.name, lease)
        # With its server's time of it: by that a copy is told from its original.
        document = pull.source.document
        announced = AnnouncementRecord(number, worker_id, document, opened.tag.modified)
        record = pull.finish(opened, lambda stream: self.uploads.commit(stream, announced))
        reserves = () if view is None else self.rounds.strategy_of(number).reserves(view)
        self.counters.add("pulled_contributions")
        self.counters.add("reserves_used", int(worker_id in reserves))
        log.info(
            "contribution accepted",
            extra={"round": number, "worker": worker_id, "norm": record.norm},
        )
        return record

    def _write(self, stream: UploadStream, piece: memoryview) -> None:
        self.uploads.write(stream, piece)
        self.counters.add("pulled_bytes", piece.nbytes)

    def _interrupted(self, pull: Pull, lease: Lease, exc: AtollError) -> AnnounceReply:
        """Its server did not give it whole: asked again, until the pull's time is over.

        Then it is the worker's fault if the server has answered others meanwhile; else the server
        is away, and everybody waits for it.
        """
        name, seconds = pull.source.name, self._seconds(lease[0])
        self.servers.failed(lease)
        if self.clock.now() - pull.began >= seconds:
            if self.servers.answered_others(name, lease[1], since=pull.began):
                self._forget(lease)
                reason = Reason.MISSING if isinstance(exc, ObjectRefused) else Reason.SLOW
                told = f"bucket {name!r} did not give the object of {lease[1]!r} within "
                self._skip(lease, Skip(reason, f"{told}{seconds:g} s, and gave others': {exc}"))
            # Not from now on: until it is asked again more than its time may pass.
            pull.is_anew = True
        log.warning(
            "bucket did not answer",
            extra={"bucket": name, "worker": lease[1], "code": exc.code, "why": str(exc)},
        )
        return AnnounceReply(waits_for=shortened(f"bucket {name!r} to answer: {exc}"))

    def _forget(self, lease: Lease) -> None:
        """Nothing of it is kept but what is recorded."""
        with self._lock:
            pull = self._open.pop(lease, None)
        if pull is not None and pull.opened is not None:
            self.uploads.abandon(pull.opened.stream)

    def _seconds(self, round_number: int) -> float:
        return self.rounds.manifests.of_round(round_number).manifest.gather.pull_seconds

    def _skip(self, lease: Lease, skip: Skip) -> NoReturn:
        """The round goes on without the worker."""
        (number, worker_id), sentence = lease, shortened(skip.sentence)
        told = f"{skip.reason}: {sentence}; {GO_ON}"
        if not self.rounds.skip(number, worker_id, reason=skip.reason, sentence=sentence):
            self.admission.destination(number)  # closed meanwhile: StaleContribution
            raise LeftOut(told) from skip
        log.warning(
            "contribution skipped",
            extra={
                "round": number,
                "worker": worker_id,
                "reason": str(skip.reason),
                "sentence": sentence,
            },
        )
        self.changed()
        raise LeftOut(told) from skip


def _check_announced(statement: Statement, request: UploadRequest) -> None:
    for name in ("sha256", "nbytes"):
        stated, announced = getattr(statement, name), getattr(request, name)
        if stated != announced:
            raise Skip(
                Reason.STATEMENT,
                f"the statement of {statement.uid!r} has {name}={stated!r}, announced is "
                f"{announced!r}",
            )


def _other_statement(lease: Lease) -> Conflict:
    return Conflict(
        f"worker_id={lease[1]!r} has announced another statement for round {lease[0]}; the first "
        f"one stands"
    )
