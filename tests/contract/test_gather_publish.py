"""What a peer publishes is found by others, whatever bucket it stands in."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.blobs import buckets
from atoll.blobs.access import S3Access
from atoll.blobs.bucket import PIECE_BYTES, Bucket
from atoll.clock import SystemClock
from atoll.gather import statement as statements
from atoll.gather.keys import SecretKey
from atoll.gather.publish import frame_key, publish, statement_key
from atoll.gather.statement import Statement
from tests import servers

CLOCK = SystemClock()
KEY = SecretKey(bytes(range(32)))
HOME = f"peers-{os.getpid()}/a"


@pytest.fixture(params=["memory", "directory", pytest.param("s3", marks=pytest.mark.s3)])
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bucket]:
    location, access = "memory:", None
    if request.param == "directory":
        location = str(tmp_path / "bucket")
    elif request.param == "s3":
        location = f"s3://{servers.BUCKET}"
        access = S3Access(
            access_key_id=servers.ACCESS_KEY_ID,
            secret_access_key=servers.SECRET_ACCESS_KEY,
            endpoint=request.getfixturevalue("s3_server").url,
        )
    with buckets.opened(location, clock=CLOCK, s3=access) as opened:
        yield opened


def read(bucket: Bucket, key: str) -> bytes:
    deadline = CLOCK.now() + 30
    tag = bucket.look(key, deadline=deadline)
    assert tag is not None, key
    return b"".join(map(bytes, bucket.pieces(key, tag, 0, tag.nbytes, deadline=deadline)))


def test_windows_are_published_found_and_forgotten(bucket: Bucket, tmp_path: Path) -> None:
    frames = [bytes([window]) * (PIECE_BYTES + window) for window in range(4)]
    stated = [
        Statement(
            run_id="run",
            manifest_sha256="a" * 64,
            uid="a",
            window=window,
            base_digest="b" * 64,
            sample_digest="c" * 64,
            nbytes=len(frame),
            sha256=hashlib.sha256(frame).hexdigest(),
        )
        for window, frame in enumerate(frames)
    ]

    for frame, statement in zip(frames, stated, strict=True):
        path = tmp_path / "frame"
        path.write_bytes(frame)
        for _ in range(2):  # the second time nothing is written
            done = publish(bucket, HOME, path, statement, KEY, keep=2, deadline=CLOCK.now() + 30)
        assert done.frame.nbytes == len(frame)

    for window in (2, 3):
        found = statements.read(read(bucket, statement_key(HOME, window)), KEY.public)
        assert found == stated[window]
        assert read(bucket, frame_key(HOME, found.sha256)) == frames[window]
    assert len(list(bucket.keys(HOME))) == 4
