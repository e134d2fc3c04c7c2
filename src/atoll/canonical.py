"""Canonical JSON: one byte string for one value, so that a hash names it."""

import hashlib
import json


def dumps(value: object) -> str:
    """Sorted keys, no blanks, ASCII only; NaN and infinity are refused by the encoder."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )


def sha256(value: object) -> str:
    """sha256 (hex) of the canonical JSON of `value`."""
    return hashlib.sha256(dumps(value).encode()).hexdigest()
