"""The strategies that the invariants ask: made from the manifests as the ledger has them.

Never the coordinator's own: where that one asks wrongly, or something else, it shows.
"""

import json
from typing import Any

from atoll.protocol.manifest import Manifest
from atoll.simulate.faults.durable import View
from atoll.strategies import registry
from atoll.strategies.base import Strategy


class Asked:
    """Manifests and strategies by the round they are in force in; each is read once."""

    def __init__(self) -> None:
        self._manifests: dict[str, Manifest] = {}
        self._strategies: dict[str, Strategy] = {}
        self._settings: dict[str, dict[str, Any]] = {}

    def manifest(self, view: View, round_number: int) -> Manifest:
        """The manifest that a round is under."""
        body = view.manifest_body(round_number)
        if body not in self._manifests:
            self._manifests[body] = Manifest.model_validate_json(body)
        return self._manifests[body]

    def strategy_of(self, view: View, round_number: int) -> Strategy:
        """What answers for a round."""
        body = view.manifest_body(round_number)
        if body not in self._strategies:
            self._strategies[body] = registry.of(self.manifest(view, round_number))
        return self._strategies[body]

    def settings(self, view: View, round_number: int) -> dict[str, Any]:
        """The settings of a round as plain JSON."""
        body = view.manifest_body(round_number)
        if body not in self._settings:
            self._settings[body] = json.loads(body)
        return self._settings[body]
