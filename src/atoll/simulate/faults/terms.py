"""What a round is under, from the manifests as the ledger has them: settings and a strategy to ask.

Never the coordinator's own: where that one asks wrongly, or something else, it shows.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from atoll.protocol.manifest import Manifest
from atoll.strategies import registry
from atoll.strategies.base import Strategy


@dataclass(frozen=True)
class Terms:
    """One manifest version: parsed, what answers for its rounds, and its settings as JSON."""

    manifest: Manifest
    asked: Strategy
    settings: dict[str, Any]


@lru_cache(maxsize=64)
def read(body: str) -> Terms:
    """The manifest with this JSON, which is read once."""
    made = Manifest.model_validate_json(body)
    return Terms(made, registry.of(made), json.loads(body))
