"""Which ranks a sub-group has, and the number by which its messages are known."""

import hashlib
from collections.abc import Sequence

from atoll.errors import ConfigError


def check(members: Sequence[Sequence[int]], size: int) -> list[tuple[int, ...]]:
    """The lists; ConfigError for one that is empty, names a rank twice or no rank at all."""
    found = [tuple(one) for one in members]
    for one in found:
        if not one or len(set(one)) < len(one) or min(one) < 0 or max(one) >= size:
            raise ConfigError(
                f"members={list(one)} are no sub-group of size={size} ranks; give at least one "
                f"rank of 0 to {size - 1}, none twice"
            )
    return found


def number(parent: int, call: int, place: int, members: Sequence[Sequence[int]]) -> int:
    """Of the sub-group `members[place]` that a group makes in its so-manieth call.

    A hash and no count: sub-groups of sub-groups are made where others know nothing of them, and
    ranks that were called with different lists exchange nothing.
    """
    told = f"{parent} {call} {place} {[list(one) for one in members]}"
    digest = hashlib.sha256(told.encode()).digest()
    return int.from_bytes(digest[:8], "little") | 1  # never 0, which is the whole group
