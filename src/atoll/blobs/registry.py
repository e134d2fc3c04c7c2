"""From a location in a run file to the store it names. Reads no environment."""

from pathlib import Path

from atoll.blobs.access import S3Access
from atoll.blobs.base import Blobs
from atoll.blobs.directory import DirectoryBlobs
from atoll.blobs.memory import MemoryBlobs
from atoll.errors import ConfigError


def open_blobs(location: str, *, spool: Path, s3: S3Access | None = None) -> Blobs:
    """The store at `location`: `memory:`, `s3://bucket/prefix` or the path of a directory.

    `spool` is a local directory that this process alone uses; only S3 needs it, and `s3`.
    """
    if location == "memory:":
        return MemoryBlobs()
    if location.startswith("s3://"):
        return _s3(location, spool=spool, access=s3)
    if not location or ":" in location.split("/", 1)[0]:
        raise ConfigError(
            f"blobs={location!r} must be a directory, 'memory:' or 's3://bucket/prefix'"
        )
    return DirectoryBlobs(Path(location))


def _s3(location: str, *, spool: Path, access: S3Access | None) -> Blobs:
    bucket, _, prefix = location.removeprefix("s3://").partition("/")
    if len(bucket) < 3:
        raise ConfigError(f"blobs={location!r} must name a bucket of 3 characters or more")
    if access is None:
        raise ConfigError(f"blobs={location!r} needs S3 credentials; none were given")
    try:
        from atoll.blobs.s3 import S3Blobs
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.split(".")[0] != "obstore":
            raise
        raise ConfigError(
            f"blobs={location!r} needs obstore; install it with: pip install 'atoll[s3]'"
        ) from exc
    return S3Blobs(bucket, prefix, access=access, spool=spool)
