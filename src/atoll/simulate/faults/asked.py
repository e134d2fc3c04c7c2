"""The strategies that the invariants ask: made from the manifests as the ledger has them.

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
class Asked:
    """One manifest version: parsed, what answers for its rounds, and its settings as JSON."""

    manifest: Manifest
    round_strategy: Strategy
    settings: dict[str, Any]


@lru_cache(maxsize=64)
def read(body: str) -> Asked:
    """The manifest with this JSON, which is read once."""
    made = Manifest.model_validate_json(body)
    return Asked(made, registry.of(made), json.loads(body))
