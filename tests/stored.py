"""What a blob store holds, asked as a test wants to know it."""

from atoll.blobs.base import Blobs


def is_stored(blobs: Blobs, sha256: str) -> bool:
    """Whether a blob of that name is listed."""
    return any(ref.sha256 == sha256 for ref in blobs.stored())
