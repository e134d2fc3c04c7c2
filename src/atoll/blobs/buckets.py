"""From a bucket's location in a run to the bucket, for as long as it is used."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from atoll.blobs.access import S3Access
from atoll.blobs.bucket import Bucket
from atoll.blobs.directory_bucket import DirectoryBucket
from atoll.blobs.memory_bucket import MemoryBucket
from atoll.blobs.s3_bucket import S3Bucket
from atoll.clock import Clock
from atoll.errors import ConfigError


def check_there(name: str, location: str) -> None:
    """ConfigError for a bucket that is to be a directory and is none.

    For those that only read, or have nothing to put where nobody has put anything: they would make
    a misspelled one and find it empty.
    """
    if _is_directory(location) and not Path(location).is_dir():
        raise ConfigError(
            f"bucket {name!r} is {location!r}, which is no directory; spell it as its peers do, or "
            f"make it where the run begins"
        )


@contextlib.contextmanager
def opened(location: str, *, clock: Clock, s3: S3Access | None = None) -> Iterator[Bucket]:
    """The bucket at `location`: `memory:`, `s3://bucket` or the path of a directory.

    Closed when the block ends. Only S3 needs `s3`; folders in a bucket belong to its peers. A
    directory that is not there is made.
    """
    if location == "memory:":
        yield MemoryBucket(clock)
    elif location.startswith("s3://"):
        name = location.removeprefix("s3://")
        if len(name) < 3 or "/" in name:
            raise ConfigError(
                f"bucket={location!r} must be s3:// and a name of 3 characters or more, without a "
                f"folder: that is each peer's own"
            )
        if s3 is None:
            raise ConfigError(f"bucket={location!r} needs S3 credentials; none were given")
        with S3Bucket(name, s3, clock) as bucket:
            yield bucket
    elif not _is_directory(location):
        raise ConfigError(f"bucket={location!r} must be a directory, 'memory:' or 's3://bucket'")
    else:
        yield DirectoryBucket(Path(location), clock)


def _is_directory(location: str) -> bool:
    """Whether it is spelled like one."""
    return bool(location) and ":" not in location.split("/", 1)[0]
