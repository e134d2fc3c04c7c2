"""The buckets of a gather run, as its settings name them, with the credentials of this process."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from atoll.blobs import buckets
from atoll.blobs.access import S3Access
from atoll.blobs.bucket import Bucket
from atoll.clock import Clock
from atoll.errors import ConfigError
from atoll.island.gather import signing
from atoll.island.gather.base import Buckets
from atoll.island.gather.signing import Signing
from atoll.protocol.manifest import BucketSettings, GatherSettings, Manifest
from atoll.traffic import Traffic

FOLDER = "gather"  # of an island's state directory


@contextmanager
def opened(
    settings: GatherSettings, *, clock: Clock, s3: S3Access | None
) -> Iterator[Mapping[str, Bucket]]:
    """The run's buckets by name."""
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(buckets.opened(place.url, clock=clock, s3=_access(place, s3)))
            for name, place in settings.buckets.items()
        }


def _access(place: BucketSettings, s3: S3Access | None) -> S3Access | None:
    """The run says where a server is; the process, with which credentials it is asked."""
    if s3 is None:
        return None
    endpoint, region = place.endpoint or s3.endpoint, place.region or s3.region
    return replace(s3, endpoint=endpoint, region=region)


def check(manifest: Manifest, bucket: str | None) -> None:
    """ConfigError for a bucket that is not the run's, or none where there are several."""
    if manifest.gather.buckets:
        signing.bucket_of(manifest.gather, bucket)
    elif bucket is not None:
        raise ConfigError(
            f"--bucket {bucket!r} in a run whose islands publish into none; only those of a gather "
            f"run do, so leave it out"
        )


@contextmanager
def of_island(
    settings: GatherSettings,
    directory: Path,
    traffic: Traffic,
    clock: Clock,
    s3: S3Access | None,
    *,
    bucket: str | None,
) -> Iterator[Buckets | None]:
    """They as the island with that state directory uses them; None in a run without any."""
    if not settings.buckets:
        yield None
        return
    # Not at the top: in a large run all loops that are imported are compiled.
    from atoll.island.gather.buckets import IslandBuckets

    made = Signing(signing.key_in(directory), signing.bucket_of(settings, bucket))
    with opened(settings, clock=clock, s3=s3) as found:
        yield IslandBuckets(found, made, directory / FOLDER, clock, traffic)
