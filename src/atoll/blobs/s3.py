"""Blobs as objects of an S3 bucket, with a local spool.

A writer fills a local draft while hashing; `commit` uploads it in parts and returns after the
server confirmed the object and its size. A reader downloads to a local cache file while hashing,
so bytes are checked before the first is served and memory stays bounded. Durability is the
server's. An upload cut off by a crash leaves parts that S3 never shows; a lifecycle rule
(AbortIncompleteMultipartUpload) frees them.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from atoll import files as filesystem
from atoll.blobs import names
from atoll.blobs.access import S3Access
from atoll.blobs.base import BlobRef
from atoll.blobs.cache import CachedFiles
from atoll.blobs.drafts import Drafts, FileDraft, FileReader
from atoll.blobs.objects import ObjectStore, ObjectTag, joined
from atoll.errors import StoreError

CACHE_BYTES = 8 << 30


class S3Blobs:
    """A store of blobs at `s3://bucket/prefix`; `spool` is a local directory of its own.

    Safe to share between threads; a writer is used by one at a time.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str,
        *,
        access: S3Access,
        spool: Path,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._bucket = ObjectStore(bucket, access)
        self._prefix = prefix.strip("/")
        for directory in (spool / "tmp", spool / "cache"):
            with filesystem.naming("make", directory):
                directory.mkdir(parents=True, exist_ok=True)
        self._drafts = Drafts(filesystem.SYSTEM, spool / "tmp")
        self._cache = CachedFiles(spool / "cache", budget_bytes=cache_bytes)
        # Objects that this process wrote or has hashed, as they were then.
        self._verified: dict[str, ObjectTag] = {}

    def writer(self, *, expect_bytes: int | None = None) -> FileDraft:
        return self._drafts.new(self._commit, expect_bytes=expect_bytes)

    def open(self, sha256: str) -> FileReader:
        key = self._key(sha256)
        try:
            tag = self._bucket.tag(key)
            if self._verified.get(sha256) == tag:
                reader = self._cache.open(sha256)
                if reader is not None:
                    return reader
            return self._download(sha256, key, tag)
        except FileNotFoundError as exc:
            raise names.missing(sha256, self._bucket.url(key)) from exc

    def stored(self) -> Iterator[BlobRef]:
        for key, nbytes in self._bucket.sizes(self._prefix):
            name = key.rsplit("/", 1)[-1]
            if names.is_name(name) and key == self._key(name):
                yield BlobRef(name, nbytes)

    def delete(self, sha256: str) -> None:
        key = self._key(sha256)
        self._verified.pop(sha256, None)
        self._cache.drop(sha256)
        self._bucket.delete(key)

    def sweep(self) -> None:
        self._drafts.sweep()
        self._cache.sweep()

    def close(self) -> None:
        """Drops the drafts that are still open and every local copy."""
        self._drafts.drop_all()
        self._cache.clear()

    def _key(self, sha256: str) -> str:
        return joined(self._prefix, names.folder(sha256), sha256)

    def _tag(self, key: str) -> ObjectTag | None:
        with contextlib.suppress(FileNotFoundError):
            return self._bucket.tag(key)
        return None

    def _download(self, sha256: str, key: str, tag: ObjectTag) -> FileReader:
        draft = self.writer(expect_bytes=tag.nbytes)
        with draft.dropped_on_error():
            for piece in self._bucket.pieces(key, nbytes=tag.nbytes):
                draft.write(piece)
            draft.finish()
            found = draft.digest()
            if found != sha256:
                where = self._bucket.url(key)
                raise names.changed(sha256, where, found=found, nbytes=draft.nbytes)
        self._verified[sha256] = tag
        return self._cache.adopt(sha256, draft)

    def _commit(self, draft: FileDraft) -> BlobRef:
        ref = BlobRef(draft.digest(), draft.nbytes)
        key = self._key(ref.sha256)
        draft.finish()
        # Only an object that this process knows to be right is kept; any other is written again,
        # which also heals a damaged one.
        known = self._verified.get(ref.sha256)
        if known is None or self._tag(key) != known:
            self._bucket.upload(key, draft.path, nbytes=ref.nbytes)
            tag = self._tag(key)
            if tag is None or tag.nbytes != ref.nbytes:
                raise StoreError(
                    f"{self._bucket.url(key)} was uploaded with {ref.nbytes} bytes, but the server "
                    f"shows {tag and tag.nbytes}; check the server and send it again"
                )
            self._verified[ref.sha256] = tag
        self._cache.adopt(ref.sha256, draft).close()
        return ref
