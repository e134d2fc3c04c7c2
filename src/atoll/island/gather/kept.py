"""The newest version that an island has, on its disk: its next life gathers only what follows.

    <state>/gather/published    the version in 8 bytes, its digest in 32, then fp32 as in memory

Nothing is synced, and nothing here is trusted: whoever reads it hashes the weights, and the
coordinator says whether it ever published them. Without the file they are downloaded whole.
"""

import contextlib
import logging
import os
from pathlib import Path

from atoll import files
from atoll.errors import StoreError

log = logging.getLogger(__name__)

NAME = "published"
_VERSION_BYTES, _DIGEST_BYTES = 8, 32
_HEAD_BYTES = _VERSION_BYTES + _DIGEST_BYTES


def keep(directory: Path, version: int, digest: str, weights: memoryview) -> None:
    """Replaces what was kept; a disk that refuses it costs the next life a download, no more."""
    path = directory / NAME
    draft = path.with_suffix(".draft")
    try:
        with files.naming("write", draft):
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            with draft.open("wb", buffering=0) as file:
                _write(file.fileno(), version.to_bytes(_VERSION_BYTES, "big"))
                _write(file.fileno(), bytes.fromhex(digest))
                _write(file.fileno(), weights)
            draft.replace(path)
    except StoreError as error:
        log.warning("version is not kept", extra={"version": version, "reason": str(error)})
        with contextlib.suppress(OSError):
            draft.unlink()


def recall(directory: Path, weights: memoryview) -> tuple[int, str] | None:
    """Fills `weights` with what was kept; its version and digest, which they need not have.

    None where there is nothing, or not as many bytes.
    """
    try:
        with (directory / NAME).open("rb", buffering=0) as file:
            fd = file.fileno()
            if os.fstat(fd).st_size != _HEAD_BYTES + len(weights):
                return None
            head = os.pread(fd, _HEAD_BYTES, 0)
            files.read_into(fd, _HEAD_BYTES, weights, path=directory / NAME)
    except (OSError, StoreError):
        return None
    return int.from_bytes(head[:_VERSION_BYTES], "big"), head[_VERSION_BYTES:].hex()


def _write(fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
