"""One S3 bucket through obstore: its calls, their limits and how their errors are named.

Knows nothing of blobs, hashes or spools. obstore itself looks at AWS_* variables, so every one that
could redirect or re-sign a request is stated here.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from atoll.blobs.access import S3Access
from atoll.errors import ObjectSize, StoreAway, StoreError

if TYPE_CHECKING:
    from obstore.store import S3Credential

PART_BYTES = 8 << 20  # S3 asks for at least 5 MiB; with 4 at a time an upload holds 32 MiB
MAX_PARTS = 10_000  # S3's own limit
CONCURRENT_PARTS = 4


def joined(prefix: str, *names: str) -> str:
    """The key of an object below `prefix`, which may be empty."""
    return "/".join(filter(None, (prefix.strip("/"), *names)))


class ObjectTag(NamedTuple):
    """What changes whenever an object is replaced."""

    nbytes: int
    entity: str | None
    modified: datetime


class ObjectStore:
    """The objects of one bucket. Calls are thread-safe and block until the server answered."""

    def __init__(self, name: str, access: S3Access) -> None:
        self._name = name
        timeout = timedelta(seconds=access.timeout_seconds)
        credential: S3Credential = {
            "access_key_id": access.access_key_id,
            "secret_access_key": access.secret_access_key,
            "token": access.session_token,
            "expires_at": None,
        }
        self._store = S3Store(
            name,
            config={
                "endpoint": access.url,
                "aws_endpoint_url_s3": access.url,  # goes before `endpoint` when in the environment
                "region": access.region,
                "skip_signature": False,
                "virtual_hosted_style_request": False,
            },
            # A provider and not config keys: those would be joined by AWS_SESSION_TOKEN.
            credential_provider=lambda: credential,
            client_options={"allow_http": access.url.startswith("http://"), "timeout": timeout},
            retry_config={"max_retries": access.retries, "retry_timeout": timeout},
        )

    def tag(self, key: str) -> ObjectTag:
        """The object's tag; FileNotFoundError when there is none."""
        with self._naming("look up", key):
            meta = obstore.head(self._store, key)
        return ObjectTag(meta["size"], meta["e_tag"], meta["last_modified"])

    def upload(self, key: str, path: Path, *, nbytes: int) -> None:
        """Stores a local file under `key`, whole or not at all, in parts when it is large."""
        part_bytes = max(PART_BYTES, -(-nbytes // MAX_PARTS))
        try:
            with self._naming("upload", key):
                obstore.put(
                    self._store, key, path, chunk_size=part_bytes, max_concurrency=CONCURRENT_PARTS
                )
        except FileNotFoundError as exc:
            raise StoreError(
                f"cannot upload {self.url(key)}: bucket {self._name!r} does not exist; create it"
            ) from exc

    def put(self, key: str, data: bytes) -> None:
        """Stores a few bytes under `key`."""
        with self._naming("write", key):
            obstore.put(self._store, key, data)

    def pieces(self, key: str, *, nbytes: int) -> Iterator[memoryview]:
        """The object's bytes in order, one bounded request each; FileNotFoundError."""
        for start in range(0, nbytes, PART_BYTES):
            length = min(PART_BYTES, nbytes - start)
            with self._naming("download", key):
                piece = memoryview(obstore.get_range(self._store, key, start=start, length=length))
            # obstore hands on whatever the server sent.
            if len(piece) != length:
                raise ObjectSize(
                    f"{self.url(key)} was asked for {length} bytes from {start} and gave "
                    f"{len(piece)}; check its server, and what stands between"
                )
            yield piece

    def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Key and size of every object below `prefix`."""
        with self._naming("list", prefix):
            for batch in obstore.list(self._store, prefix or None):
                for meta in batch:
                    yield meta["path"], meta["size"]

    def delete(self, key: str) -> None:
        """Removes an object; harmless when it is absent."""
        with contextlib.suppress(FileNotFoundError), self._naming("delete", key):
            obstore.delete(self._store, key)

    def url(self, key: str) -> str:
        """How messages name an object."""
        return f"s3://{self._name}/{key}"

    @contextlib.contextmanager
    def _naming(self, action: str, key: str) -> Iterator[None]:
        try:
            yield
        except BaseError as exc:
            # obstore appends a debug dump of many lines; the first one says what happened.
            reason = str(exc).split("\n", 1)[0]
            raise StoreAway(f"cannot {action} {self.url(key)}: {reason}") from exc


@dataclass(frozen=True)
class ObjectMarker:
    """One small object with a fixed name, read whole and replaced whole."""

    bucket: ObjectStore
    key: str
    limit: int

    def read(self) -> bytes | None:
        """What it holds, up to the limit; None when there is none."""
        try:
            nbytes = min(self.bucket.tag(self.key).nbytes, self.limit)
            return b"".join(bytes(piece) for piece in self.bucket.pieces(self.key, nbytes=nbytes))
        except FileNotFoundError:
            return None

    def write(self, data: bytes) -> None:
        """Replaces the object."""
        self.bucket.put(self.key, data)
