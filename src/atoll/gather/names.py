"""Where a peer's objects lie in its bucket."""


def frame_key(prefix: str, sha256: str) -> str:
    """The key of a contribution's frame: named by its content, so nobody finds it by counting."""
    return f"{prefix}/frames/{sha256}"


def statement_key(prefix: str, window: int) -> str:
    """The key of a peer's statement for a window."""
    return f"{prefix}/statements/{window:08d}.json"
