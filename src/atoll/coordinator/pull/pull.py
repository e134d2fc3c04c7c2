"""One object on its way from a bucket into the accept path: looked up, streamed, checked, stored.

Every byte goes once through the validator, which says precisely what is wrong with it, and then
through the upload that every contribution takes. What a server broke off goes on behind what came.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from atoll.blobs.bucket import Bucket, Tag
from atoll.coordinator.accept.admission import UploadRequest
from atoll.coordinator.accept.uploads import UploadStream
from atoll.errors import (
    ContributionError,
    FrameError,
    ObjectChanged,
    ObjectMissing,
    ObjectSize,
    WrongBase,
)
from atoll.gather.statement import Statement
from atoll.gather.validate import Expected, Validator
from atoll.gather.words import Reason, Skip
from atoll.ledger.records import ContributionRecord


@contextmanager
def skipping(uid: str) -> Iterator[None]:
    """What an object turns out to be is its worker's; other errors pass through as they are."""
    try:
        yield
    except ObjectMissing as exc:
        raise Skip(Reason.MISSING, str(exc)) from exc
    except ObjectChanged as exc:
        raise Skip(Reason.CHANGED, str(exc)) from exc
    except ObjectSize as exc:
        raise Skip(Reason.SIZE, str(exc)) from exc
    except WrongBase:
        raise  # the round is another one by now
    except (FrameError, ContributionError) as exc:
        raise Skip(Reason.FRAME, f"the contribution of {uid!r} is refused: {exc}") from exc


@dataclass(frozen=True)
class Source:
    """Where an object is, and what it must be."""

    name: str  # of the bucket
    bucket: Bucket
    key: str
    document: str
    statement: Statement
    expected: Expected

    def look(self, *, deadline: float) -> Tag:
        """The tag of the very object that is read from here on; Skip when it cannot be it."""
        tag = self.bucket.look(self.key, deadline=deadline)
        if tag is None:
            raise Skip(Reason.MISSING, f"{self.expected.uid!r} has no object {self.key!r}")
        if tag.nbytes != self.statement.nbytes:
            raise Skip(
                Reason.SIZE,
                f"the object of {self.expected.uid!r} has {tag.nbytes} bytes; its statement says "
                f"{self.statement.nbytes}",
            )
        return tag


@dataclass(frozen=True)
class Opened:
    """An object that was looked up, and what takes its bytes."""

    tag: Tag
    stream: UploadStream
    validator: Validator


@dataclass(eq=False)
class Pull:
    """What has come of an object. Used by the one thread that has its place."""

    request: UploadRequest
    source: Source
    began: float
    opened: Opened | None = None
    is_anew: bool = False  # whether its time counts from when it is next asked for

    def is_of(self, request: UploadRequest) -> bool:
        """Whether it is of these bytes, by this life of the worker."""
        lives = self.request.identity.incarnation, request.identity.incarnation
        same = (self.request.sha256, self.request.preamble) == (request.sha256, request.preamble)
        return same and lives[0] == lives[1]

    def validator(self) -> Validator:
        """One of which nothing has come yet; Skip where the statement is another's."""
        return Validator(self.source.expected, self.source.statement)

    def receive(
        self,
        opened: Opened,
        write: Callable[[UploadStream, memoryview], None],
        *,
        deadline: float,
    ) -> None:
        """Takes what is still missing; Skip for what no contribution of this round can be.

        StoreAway, StoreLate and ObjectRefused leave what came: another call goes on behind it.
        """
        source, tag, validator = self.source, opened.tag, opened.validator
        with skipping(source.expected.uid):
            for piece in source.bucket.pieces(
                source.key, tag, validator.nbytes, tag.nbytes, deadline=deadline
            ):
                validator.feed(piece)
                write(opened.stream, piece)

    def finish(
        self, opened: Opened, commit: Callable[[UploadStream], ContributionRecord]
    ) -> ContributionRecord:
        """Stores and records it, once it is whole."""
        with skipping(self.source.expected.uid):
            opened.validator.finish()
            return commit(opened.stream)
