"""A peer's step of a gather: a displacement, with error feedback or not, encoded and published."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll import files
from atoll.blobs import buckets
from atoll.blobs.access import S3Access
from atoll.blobs.bucket import Bucket
from atoll.clock import Clock
from atoll.codecs import feedback
from atoll.codecs.topk.codec import TopK
from atoll.codecs.topk.settings import TopKSettings
from atoll.errors import ConfigError, NotFinite
from atoll.gather import publish as publishing
from atoll.gather.emit import sha256_of
from atoll.gather.keys import SecretKey
from atoll.gather.peers import Peer
from atoll.gather.replica import Replica
from atoll.gather.statement import Statement
from atoll.launch import gather_residual
from atoll.launch.gather_file import GatherFile
from atoll.launch.gather_residual import Kept
from atoll.launch.gather_state import GatherState
from atoll.layout import byte_view
from atoll.optim.base import MAX_NORM
from atoll.versions import weights_file
from atoll.wire.frame import FrameWriter
from atoll.wire.header import Told


def publish(
    file: GatherFile,
    uid: str,
    displacement: Path,
    *,
    secret: Path,
    sample_digest: str,
    clock: Clock,
    s3: S3Access | None,
    residual: Path | None = None,
) -> dict[str, Any]:
    """Publishes a peer's displacement for the window that its own state waits for.

    With `residual` what the codec drops is kept in that file and added to the next window's.
    """
    peer, key = _peer(file, uid), SecretKey.load(secret)
    if key.public != peer.key:
        raise ConfigError(
            f"{str(secret)!r} is the key {key.public.hex}, the run lists {peer.key.hex} for "
            f"{uid!r}; sign with that one"
        )
    state = GatherState(file.state, file.layout)
    state.begin(file.start)
    base = state.whole()
    flat = weights_file.read(displacement, file.layout)
    deadline = clock.now() + file.table.seconds
    with buckets.opened(file.location(peer.bucket), clock=clock, s3=s3) as bucket:
        sending = _Sending(file, peer, base, bucket, deadline)
        frame, kept = sending.framed(flat, residual)
        stated = sending.statement(frame, sample_digest)
        if residual is not None and kept is not None:
            sending.keep(replace(kept, sha256=stated.sha256), residual)
        done = publishing.publish(
            bucket, peer.prefix, frame, stated, key, keep=file.table.keep, deadline=deadline
        )
    frame.unlink()
    return {**stated.plain(), "removed": list(done.removed)}


class _Sending:
    """One window of one peer."""

    def __init__(
        self, file: GatherFile, peer: Peer, base: Replica, bucket: Bucket, deadline: float
    ) -> None:
        self._file, self._peer, self._base = file, peer, base
        self._bucket, self._deadline = bucket, deadline

    def framed(self, flat: Tensor, residual: Path | None) -> tuple[Path, Kept | None]:
        """The frame in a file, and the residuals before and after it."""
        if residual is None:
            return self._written(TopK().encode(flat, noise=None, first_group=0)), None
        kept = gather_residual.read(residual, owner=self._owner, elements=flat.numel())
        stated = None if kept is None else self._stated(kept.window)
        found = gather_residual.taken_in(kept, window=self._base.window, stated=stated)
        before = torch.zeros_like(flat, dtype=torch.bfloat16) if found is None else found
        after = before.clone()
        decay = TopKSettings().decay
        payload = feedback.encode_with_feedback(
            TopK(), flat, after, noise=None, first_group=0, decay=decay
        )
        norm = feedback.residual_norm(after)
        if not norm <= MAX_NORM:  # nor NaN; every group would skip it
            raise NotFinite(
                f"the residual of window {self._base.window} would have the norm {norm:.6g}, above "
                f"{MAX_NORM:.6g}; nothing was published, check the peer's loss and learning rate"
            )
        frame = self._written(payload, residual=norm)
        window = self._base.window
        return frame, Kept(owner=self._owner, window=window, sha256="", before=before, after=after)

    def keep(self, kept: Kept, path: Path) -> None:
        """Writes the residuals, unless another frame was stated for the window."""
        gather_residual.check_unstated(
            self._stated(kept.window), window=kept.window, sha256=kept.sha256
        )
        kept.write(path)

    def statement(self, frame: Path, sample_digest: str) -> Statement:
        return Statement(
            run_id=self._file.table.run_id,
            manifest_sha256=self._file.manifest_sha256,
            uid=self._peer.uid,
            window=self._base.window,
            base_digest=self._base.digest,
            sample_digest=sample_digest,
            nbytes=frame.stat().st_size,
            sha256=sha256_of(frame),
        )

    def _written(self, payload: Tensor, *, residual: float = 0.0) -> Path:
        path = self._file.state / "frame"
        header = Told(
            kind="contribution",
            run_id=self._file.table.run_id,
            manifest_sha256=self._file.manifest_sha256,
            round=self._base.window,
            worker_id=self._peer.uid,
            incarnation=1,
            base_digest=self._base.digest,
            weight=1,
        ).header(self._file.layout, TopK())
        with files.naming("write", path), path.open("wb") as out:
            told = replace(header, residual=residual)
            writer = FrameWriter(told, lambda piece: out.write(piece) and None)
            writer.payload(byte_view(payload))
            writer.finish()
        return path

    def _stated(self, window: int) -> Statement | None:
        return publishing.stated(self._bucket, self._peer.prefix, window, deadline=self._deadline)

    @property
    def _owner(self) -> str:
        return f"{self._file.table.run_id}/{self._peer.uid}"


def _peer(file: GatherFile, uid: str) -> Peer:
    peer = next((one for one in file.peers().all if one.uid == uid), None)
    if peer is None:
        raise ConfigError(f"uid {uid!r} is no peer of the run; list it in the gather file")
    return peer
