"""A gather after a power cut: keys, weights that are some window's, objects that are whole."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from atoll.blobs.bucket import Bucket
from atoll.blobs.directory_bucket import DirectoryBucket
from atoll.gather import publish, statement
from atoll.gather.archive import Archive
from atoll.gather.keys import SecretKey
from atoll.launch import gather_residual
from atoll.launch.gather_state import GatherState
from tests.faults.power import gatherers, machines
from tests.faults.power.gatherers import CLOCK
from tests.faults.power.promises import Broken, Mark, same, sha256_of, values

SECONDS = 60.0


class GathererCheck:
    """Knows the digest before every window of the recorded gather."""

    def __init__(self, marks: Sequence[Mark]) -> None:
        self._digests: dict[int, str] = dict(values(marks, "stands"))

    def __call__(self, root: Path, promised: Sequence[Mark]) -> None:
        home = root / machines.GATHERER
        for name in {*values(promised, "key"), *(p.stem for p in home.glob("keys/*.key"))}:
            key = SecretKey.load(home / "keys" / f"{name}.key")
            same(f"the key of {name}", key, gatherers.secret(name))
        left = {uid: (window, sha256) for uid, window, sha256 in values(promised, "left")}
        for uid in gatherers.PEERS:
            kept = gather_residual.read(
                gatherers.residual_of(root, uid),
                owner=f"power/{uid}",
                elements=gatherers.layout().size,
            )
            found_at = (-1, "") if kept is None else (kept.window, kept.sha256)
            if uid in left and found_at != left[uid] and found_at[0] <= left[uid][0]:
                raise Broken(f"the residual of {uid!r} is of {found_at}, it was of {left[uid]}")
        due = max((window for window, _ in values(promised, "stands")), default=None)
        if due is None and not (home / "state" / "gather.json").exists():
            return
        found = GatherState(home / "state", gatherers.layout()).whole()
        same(f"the weights before window {found.window}", found.digest, self._digests[found.window])
        if due is not None and found.window < due:
            raise Broken(f"window {due - 1} was applied, the state waits for {found.window}")


def check_bucket(root: Path, promised: Sequence[Mark]) -> None:
    """What was said to be there is; and nothing names an object that is missing or torn."""
    bucket = DirectoryBucket(root / machines.BUCKET, CLOCK)
    for uid, window, sha256 in values(promised, "stated"):
        same(f"the object of {uid!r}", _stated(bucket, uid, window).sha256, sha256)
    for uid in gatherers.PEERS:
        for key in bucket.keys(f"{uid}/statements"):
            told = _stated(bucket, uid, int(Path(key).stem))
            path = root / machines.BUCKET / publish.frame_key(uid, told.sha256)
            same(f"the frame of {uid!r}", sha256_of(path), told.sha256)
    _check_archive(bucket, promised)


def _stated(bucket: Bucket, uid: str, window: int) -> statement.Statement:
    key = publish.statement_key(uid, window)
    tag = bucket.look(key, deadline=CLOCK.now() + SECONDS)
    if tag is None:
        raise Broken(f"the statement of {uid!r} for window {window} was published and is gone")
    pieces = bucket.pieces(key, tag, 0, tag.nbytes, deadline=CLOCK.now() + SECONDS)
    document = b"".join(bytes(piece) for piece in pieces)
    return statement.read(document, gatherers.secret(uid).public)


def _check_archive(bucket: Bucket, promised: Sequence[Mark]) -> None:
    archive = Archive(
        bucket=bucket,
        prefix="archive",
        key=gatherers.secret("group").public,
        layout=gatherers.layout(),
        clock=CLOCK,
        run_id="power",
        manifest_sha256=gatherers.manifest_sha256(),
    )
    for window, sha256 in values(promised, "recorded"):
        recorded = archive.find(window)
        same(f"the record of window {window}", recorded and recorded.sha256, sha256)
    for window in archive.windows():
        stands = archive.find(window)
        assert stands is not None
        with tempfile.TemporaryDirectory() as directory:
            archive.fetch(stands.artifact, Path(directory) / "body")
