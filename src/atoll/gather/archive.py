"""Where a group keeps its artifacts and whole weights, and where late joiners find them.

    <prefix>/windows/<window>.json     the signed record, created last and never replaced
    <prefix>/bodies/<sha256>           what it names; none where nobody was applied
    <prefix>/weights/<digest>          whole weights after a window, little-endian fp32

Owns reading and writing. Whether a record follows another is the replica's question.
"""

import hashlib
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from atoll import files
from atoll.blobs.bucket import Bucket, Tag
from atoll.clock import Clock
from atoll.errors import Conflict, FrameError, ObjectMissing, StoreAway, StoreLate
from atoll.gather import artifact as artifacts
from atoll.gather.artifact import Artifact
from atoll.gather.keys import PublicKey, SecretKey
from atoll.layout import Layout

_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.1, 2.0
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_NAME = re.compile(r"([0-9]{8}|[1-9][0-9]{8,18})\.json\Z")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """An artifact, and the sha256 of its record."""

    artifact: Artifact
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Archive:
    """One run's artifacts in a bucket. Blocking; a server may say nothing for `seconds`."""

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
        key = self._record_key(window)
        tag = self._look(key)
        if tag is None:
            return None
        stop = min(tag.nbytes, artifacts.MAX_BYTES + 1)
        return b"".join(bytes(piece) for piece in self._pieces(key, tag, 0, stop))

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
        names = (key.removeprefix(folder + "/") for key in self.bucket.keys(folder))
        return sorted(int(match[1]) for name in names if (match := _NAME.match(name)))

    def create(self, made: Artifact, body: Path, key: SecretKey) -> Recorded:
        """Stores a window's artifact, body first; the same again is harmless.

        Conflict where another record of the window stands: start the group again, it applies that.
        """
        document = artifacts.signed(made, key)
        if made.body_bytes:
            where = self.body_key(made)
            found = self._look(where)
            if found is None or found.nbytes != made.body_bytes:
                self.bucket.put(where, body)
        self.bucket.create(self._record_key(made.window), document)
        stored = self.document(made.window)
        if stored != document:
            raise Conflict(
                f"{self._record_key(made.window)!r} holds another artifact of window "
                f"{made.window}; it stands, so start the group again and it applies that one"
            )
        return self.read(document, made.window)

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
        key = self.weights_key(digest)
        if self._look(key) is None:
            self.bucket.put(key, path)

    def has_weights(self, digest: str) -> bool:
        """Whether whole weights of that digest, in their size, are there."""
        tag = self._look(self.weights_key(digest))
        return tag is not None and tag.nbytes == self.layout.nbytes

    # What is not needed any more

    def remove_record(self, window: int) -> None:
        """Removes a window's record; what it names is left."""
        self.bucket.remove(self._record_key(window))

    def remove_but(self, *, bodies: Collection[str], weights: Collection[str]) -> None:
        """Removes every other body, and the whole weights of every other digest."""
        for folder, named in (("bodies", bodies), ("weights", weights)):
            where = f"{self.prefix}/{folder}"
            for key in sorted(self.bucket.keys(where)):
                name = key.removeprefix(where + "/")
                if _SHA256.match(name) and name not in named:
                    self.bucket.remove(key)

    # Reading what may break off

    def stream(self, key: str, nbytes: int, start: int, stop: int) -> Iterator[memoryview]:
        """The bytes [start, stop) of an object of `nbytes`; each piece is good until the next one.

        Where its server breaks off it goes on behind what came, as long as something comes within
        `seconds`. ObjectMissing, FrameError where the object is not there, or of another size.
        """
        if start == stop:
            return
        tag = self._look(key)
        if tag is None:
            raise ObjectMissing(f"object {key!r} is named by a record and not there; restore it")
        if tag.nbytes != nbytes:
            raise FrameError(f"object {key!r} has {tag.nbytes} bytes where {nbytes} belong")
        yield from self._pieces(key, tag, start, stop)

    def _look(self, key: str) -> Tag | None:
        patience = _Patience(self.clock, self.seconds)
        while True:
            try:
                return self.bucket.look(key, deadline=self._deadline())
            except (StoreAway, StoreLate):
                if not patience.wait():
                    raise

    def _pieces(self, key: str, tag: Tag, start: int, stop: int) -> Iterator[memoryview]:
        patience = _Patience(self.clock, self.seconds)
        while start < stop:
            try:
                for piece in self.bucket.pieces(key, tag, start, stop, deadline=self._deadline()):
                    start += len(piece)
                    patience.heard()
                    yield piece
            except (StoreAway, StoreLate):
                if not patience.wait():
                    raise

    def _deadline(self) -> float:
        return self.clock.now() + self.seconds

    def _record_key(self, window: int) -> str:
        return f"{self.prefix}/windows/{window:08d}.json"

    def body_key(self, made: Artifact) -> str:
        """Where a body is."""
        return f"{self.prefix}/bodies/{made.body_sha256}"

    def weights_key(self, digest: str) -> str:
        """Where whole weights are."""
        return f"{self.prefix}/weights/{digest}"


class _Patience:
    """How long a server may say nothing before its error stands; waits in between."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds
        self.heard()

    def heard(self) -> None:
        self._last, self._wait = self._clock.now(), _FIRST_WAIT_SECONDS

    def wait(self) -> bool:
        """False, at once, where it has been too long."""
        if self._clock.now() + self._wait - self._last >= self._seconds:
            return False
        self._clock.sleep(self._wait)
        self._wait = min(_LONGEST_WAIT_SECONDS, 2 * self._wait)
        return True
