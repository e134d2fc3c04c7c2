"""Where a group keeps its artifacts and whole weights, and where late joiners find them.

    <prefix>/windows/<window>.json     the signed record, created last and never replaced
    <prefix>/bodies/<sha256>           what it names; none where nobody was applied
    <prefix>/weights/<digest>          whole weights after a window, little-endian fp32

Owns reading and writing. Whether a record follows another is the replica's question.
"""

import hashlib
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from atoll import files
from atoll.blobs.bucket import Bucket, Tag
from atoll.clock import Clock
from atoll.errors import Conflict, FrameError, ObjectMissing, StoreAway, StoreLate
from atoll.gather import artifact as artifacts
from atoll.gather.artifact import Artifact
from atoll.gather.keys import PublicKey, SecretKey
from atoll.gather.patience import Patience
from atoll.layout import Layout

T = TypeVar("T")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_NAME = re.compile(r"([0-9]{8}|[1-9][0-9]{8,18})\.json\Z")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """An artifact, and the sha256 of its record."""

    artifact: Artifact
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Archive:
    """One run's artifacts in a bucket. Blocking.

    A server that is away, overloaded or late is asked again, with pauses, for `seconds`; then its
    error stands.
    """

    bucket: Bucket
    prefix: str
    key: PublicKey
    layout: Layout
    clock: Clock
    run_id: str
    manifest_sha256: str
    seconds: float = 60.0

    def document(self, window: int) -> bytes | None:
        """The record of a window as it is stored; of one that is too long, as much as shows it."""
        return self._document(window, self._patience())

    def _document(self, window: int, patience: Patience) -> bytes | None:
        key = self._record_key(window)
        tag = self._look(key, patience)
        if tag is None:
            return None
        stop = min(tag.nbytes, artifacts.MAX_BYTES + 1)
        return b"".join(bytes(piece) for piece in self._pieces(key, tag, 0, stop, patience))

    def read(self, document: bytes, window: int) -> Recorded:
        """The record in `document`, of this run and window; FrameError where it is not."""
        found = artifacts.read(document, self.key, layout=self.layout)
        for name, wanted in (
            ("run_id", self.run_id),
            ("manifest_sha256", self.manifest_sha256),
            ("window", window),
        ):
            if getattr(found, name) != wanted:
                raise FrameError(
                    f"the artifact of window {window} has {name}={getattr(found, name)!r} where "
                    f"{wanted!r} belongs; it is another one's, see who writes to the archive"
                )
        return Recorded(artifact=found, sha256=artifacts.sha256_of(document))

    def find(self, window: int) -> Recorded | None:
        """A window's record, checked; None where there is none."""
        document = self.document(window)
        return None if document is None else self.read(document, window)

    def windows(self) -> list[int]:
        """Those that have a record, ascending."""
        folder = f"{self.prefix}/windows"
        names = (key.removeprefix(folder + "/") for key in self._keys(folder))
        return sorted(int(match[1]) for name in names if (match := _NAME.match(name)))

    def create(self, made: Artifact, body: Path, key: SecretKey) -> Recorded:
        """Stores a window's artifact, body first; the same again is harmless.

        Other ranks wait for this one: `seconds` are for all attempts that fail, together.
        Conflict where another record of the window stands: start the group again, it applies that.
        """
        document = artifacts.signed(made, key)
        recorded = self.read(document, made.window)  # before it stands for ever
        patience = Patience(self.clock, self.seconds, in_all=True)
        if made.body_bytes and not self._has_body(made, patience):
            _again(partial(self.bucket.put, self.body_key(made), body), patience)
        # Where it was created and no answer came, the next attempt finds it there.
        _again(partial(self.bucket.create, self._record_key(made.window), document), patience)
        stored = self._document(made.window, patience)
        if stored != document:
            raise Conflict(
                f"{self._record_key(made.window)!r} holds another artifact of window "
                f"{made.window}; it stands, so start the group again and it applies that one"
            )
        return recorded

    def _has_body(self, made: Artifact, patience: Patience) -> bool:
        """Whether its bytes are there already; a name alone says nothing."""
        key, digest = self.body_key(made), hashlib.sha256()
        tag = self._look(key, patience)
        if tag is None or tag.nbytes != made.body_bytes:
            return False
        for piece in self._pieces(key, tag, 0, tag.nbytes, patience):
            digest.update(piece)
        return digest.hexdigest() == made.body_sha256

    def fetch(self, made: Artifact, path: Path) -> None:
        """Brings a body to `path`, streamed; FrameError where it is not what its record names."""
        digest = hashlib.sha256()
        with files.naming("write an artifact's body to", path), path.open("wb") as file:
            for piece in self.stream(self.body_key(made), made.body_bytes, 0, made.body_bytes):
                digest.update(piece)
                file.write(piece)
        if digest.hexdigest() != made.body_sha256:
            path.unlink()
            raise FrameError(
                f"the body of window {made.window} has the sha256 {digest.hexdigest()}, its record "
                f"says {made.body_sha256}; nothing of it was applied"
            )

    # Whole weights

    def put_weights(self, digest: str, path: Path) -> None:
        """Stores whole weights, unless they are there."""
        if not self.has_weights(digest):
            _again(partial(self.bucket.put, self.weights_key(digest), path), self._patience())

    def has_weights(self, digest: str) -> bool:
        """Whether whole weights of that digest, in their size, are there."""
        tag = self._look(self.weights_key(digest), self._patience())
        return tag is not None and tag.nbytes == self.layout.nbytes

    # What is not needed any more

    def remove_record(self, window: int) -> None:
        """Removes a window's record; what it names is left."""
        self._remove(self._record_key(window))

    def remove_but(self, *, bodies: Collection[str], weights: Collection[str]) -> None:
        """Removes every other body, and the whole weights of every other digest."""
        for folder, named in (("bodies", bodies), ("weights", weights)):
            where = f"{self.prefix}/{folder}"
            for key in sorted(self._keys(where)):
                name = key.removeprefix(where + "/")
                if _SHA256.match(name) and name not in named:
                    self._remove(key)

    def _remove(self, key: str) -> None:
        _again(partial(self.bucket.remove, key), self._patience())

    def _keys(self, folder: str) -> list[str]:
        return _again(lambda: list(self.bucket.keys(folder)), self._patience())

    # Reading what may break off

    def stream(self, key: str, nbytes: int, start: int, stop: int) -> Iterator[memoryview]:
        """The bytes [start, stop) of an object of `nbytes`; each piece is good until the next one.

        Where its server breaks off it goes on behind what came, as long as something comes within
        `seconds`. ObjectMissing, FrameError where the object is not there, or of another size.
        """
        if start == stop:
            return
        patience = self._patience()
        tag = self._look(key, patience)
        if tag is None:
            raise ObjectMissing(f"object {key!r} is named by a record and not there; restore it")
        if tag.nbytes != nbytes:
            raise FrameError(f"object {key!r} has {tag.nbytes} bytes where {nbytes} belong")
        yield from self._pieces(key, tag, start, stop, patience)

    def _look(self, key: str, patience: Patience) -> Tag | None:
        return _again(lambda: self.bucket.look(key, deadline=patience.deadline()), patience)

    def _pieces(
        self, key: str, tag: Tag, start: int, stop: int, patience: Patience
    ) -> Iterator[memoryview]:
        while start < stop:
            try:
                deadline = patience.deadline()
                for piece in self.bucket.pieces(key, tag, start, stop, deadline=deadline):
                    start += len(piece)
                    patience.heard()
                    yield piece
            except (StoreAway, StoreLate):
                if not patience.wait():
                    raise

    def _patience(self) -> Patience:
        return Patience(self.clock, self.seconds)

    def _record_key(self, window: int) -> str:
        return f"{self.prefix}/windows/{window:08d}.json"

    def body_key(self, made: Artifact) -> str:
        """Where a body is."""
        return f"{self.prefix}/bodies/{made.body_sha256}"

    def weights_key(self, digest: str) -> str:
        """Where whole weights are."""
        return f"{self.prefix}/weights/{digest}"


def _again(attempt: Callable[[], T], patience: Patience) -> T:
    """What an attempt gives, the first or a later one; the last one's error once it is too late."""
    while True:
        try:
            found = attempt()
        except (StoreAway, StoreLate):
            if not patience.wait():
                raise
        else:
            patience.heard()
            return found
