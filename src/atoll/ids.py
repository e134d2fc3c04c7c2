"""Names that cross processes, and the rule each must keep."""

import re
from typing import NewType

from atoll.errors import ConfigError

WorkerId = NewType("WorkerId", str)

WORKER_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}\Z")


def worker_id(text: str) -> WorkerId:
    """`text` as a worker_id, or a ConfigError that states the rule."""
    if not WORKER_ID.match(text):
        raise ConfigError(
            f"worker_id={text!r} must be 1 to 64 characters out of A-Z a-z 0-9 . _ - "
            f"that do not start with . or -; choose another with --worker-id"
        )
    return WorkerId(text)
