"""The rule of blob names and where a name stands below a store's root.

Every store checks a name here before it becomes part of a path or key, so no name leads elsewhere.
"""

import re

from atoll.errors import BlobChanged, BlobMissing, StoreError

_NAME = re.compile(r"[0-9a-f]{64}\Z")
_FOLDER = re.compile(r"[0-9a-f]{2}\Z")


def is_name(text: str) -> bool:
    """Whether `text` is a sha256 in lower-case hex."""
    return _NAME.match(text) is not None


def is_folder(text: str) -> bool:
    """Whether `text` is the two-letter folder of some blob."""
    return _FOLDER.match(text) is not None


def folder(sha256: str) -> str:
    """The folder of a blob: the first two letters of its name, which is checked."""
    check(sha256)
    return sha256[:2]


def check(sha256: str) -> None:
    """Raises StoreError unless `sha256` is a blob name."""
    if not is_name(sha256):
        raise StoreError(
            f"blob name {sha256!r} must be 64 lower-case hex digits, the sha256 of its bytes"
        )


def missing(sha256: str, where: str) -> BlobMissing:
    """The error for a blob that is not stored."""
    return BlobMissing(
        f"blob {sha256} is not stored at {where}; restore it from a copy or send it again"
    )


def changed(sha256: str, where: str, *, found: str, nbytes: int) -> BlobChanged:
    """The error for a stored blob whose bytes are no longer those of its name."""
    return BlobChanged(
        f"blob {where} must hash to {sha256}, but its {nbytes} bytes hash to {found}; "
        f"restore it from a copy, or delete it and send it again"
    )
