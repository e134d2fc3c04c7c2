"""The strategies that the invariants ask: made from the manifests as the ledger has them.

Never the coordinator's own: where that one asks wrongly, or something else, it shows.
"""

import json
from dataclasses import dataclass
from typing import Any

from atoll.protocol.manifest import Manifest
from atoll.simulate.faults.durable import View
from atoll.strategies import registry
from atoll.strategies.base import Strategy


@dataclass(frozen=True)
class _Version:
    """One manifest version: parsed, what answers for its rounds, and its settings as JSON."""

    manifest: Manifest
    strategy: Strategy
    settings: dict[str, Any]


class Asked:
    """Manifests and strategies by the round they are in force in; each is read once."""

    def __init__(self) -> None:
        self._versions: dict[str, _Version] = {}

    def manifest(self, view: View, round_number: int) -> Manifest:
        """The manifest that a round is under."""
        return self._version(view, round_number).manifest

    def strategy_of(self, view: View, round_number: int) -> Strategy:
        """What answers for a round."""
        return self._version(view, round_number).strategy

    def settings(self, view: View, round_number: int) -> dict[str, Any]:
        """The settings of a round as plain JSON."""
        return self._version(view, round_number).settings

    def _version(self, view: View, round_number: int) -> _Version:
        body = view.manifest_body(round_number)
        if body not in self._versions:
            made = Manifest.model_validate_json(body)
            self._versions[body] = _Version(made, registry.of(made), json.loads(body))
        return self._versions[body]
