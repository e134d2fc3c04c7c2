"""Asynchronous DiLoCo: an island hands in when it is done, and waits for nobody.

    (arXiv 2401.09135, Algorithm 3 with c = 0; DyLU, equation 6)
    lease        of an island at the newest version, with all its work in it: H_w steps, named
                 version + 1
    round        the oldest open one takes what comes; staleness = that round - the lease's
    closes       with one contribution once grace_seconds are over, or every live holder is in
    step         one tick for each contribution, by worker_id

The window after the first contribution only lets islands that end at about the same time start
again from the same weights. Deviation from equation 6: at least one step.
"""

import math
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from atoll.codecs.noise import Noise
from atoll.protocol.manifest import Manifest
from atoll.strategies.base import Lease, RoundView
from atoll.strategies.diloco import of_mode
from atoll.strategies.diloco.sync import Sync
from atoll.strategies.outer import NOISE_LANE_DOWNLOAD
from atoll.strategies.ticks import Ticks


@dataclass(frozen=True)
class Asynchronous(Sync):
    """The answers of an asynchronous run; what is not here is as in a synchronous one."""

    lead = 1  # while a round is computed the next one takes what comes
    follows = True

    @classmethod
    def of(cls, manifest: Manifest) -> "Asynchronous":
        """Refuses settings that belong to other modes, by name."""
        of_mode.refuse_others(manifest, "async")
        of_mode.refuse_rounds(manifest, "async")
        return cls(manifest)

    # Who trains what

    def rows(
        self, round_number: int, live: Collection[str], speeds: Mapping[str, float]
    ) -> dict[str, int]:
        return {}  # rows are given to each island when it asks

    def asked(
        self, version: int, open_rounds: Collection[int], folding: Collection[int]
    ) -> int | None:
        """Never before its own work is in the version it starts from: that would count twice.

        While round version + 1 is computed it waits as well, and will be at the newest version.
        """
        return version + 1 if version + 1 in open_rounds and not folding else None

    def piece(self, worker_id: str, speeds: Callable[[], Mapping[str, float]]) -> int:
        steps = self.manifest.sync_every
        known = speeds() if self.manifest.dylu else {}
        if worker_id in known:
            # max(1, .) is ours: a lease of no step would never be handed in.
            steps = max(1, math.floor(known[worker_id] / max(known.values()) * steps))
        return steps * self.manifest.inner.batch

    def abreast(self, holding: int) -> int:
        return 1  # what others do meanwhile is not recorded, so no rate may depend on it

    def needs(self, round_number: int) -> int:
        return round_number - 1

    # Rounds

    def destination(self, made_for: int, open_rounds: Sequence[int]) -> int | None:
        found = next((number for number in open_rounds if number >= made_for), None)
        return None if found is None or self._is_too_stale(found - made_for) else found

    def _is_too_stale(self, staleness: int) -> bool:
        return staleness > self.manifest.max_staleness

    def factor(self, *, staleness: int, tokens: int) -> float:
        made, found = self.manifest, 1.0
        if made.staleness_weighting == "inverse_sqrt":
            found = 1 / math.sqrt(1 + staleness)
        if made.weighting == "tokens":
            found *= tokens / (made.rows_per_round * int(made.data.identity["block"]))
        rounded: float = struct.unpack("<f", struct.pack("<f", found))[0]
        return rounded

    def has_quorum(self, view: RoundView) -> bool:
        return bool(view.accepted)

    def is_due(self, view: RoundView, *, seconds: float) -> bool:
        """With one contribution or more, and `min_workers` live islands or more."""
        settings = self.manifest.membership
        if not view.accepted or len(view.live) < settings.min_workers:
            return False
        return seconds >= settings.grace_seconds or not self.waiting_for(view)

    def is_short(self, view: RoundView) -> bool:
        return False  # whoever is idle asks

    def ended(
        self, leases: Collection[Lease], *, closing: int, live: Collection[str]
    ) -> set[Lease]:
        """Those of the dead, and those whose contribution would be too stale from now on."""
        return {
            (made_for, worker_id)
            for made_for, worker_id in leases
            if worker_id not in live or self._is_too_stale(closing + 1 - made_for)
        }

    # Weights

    def evaluators(
        self, asks: str, planned: Sequence[str], live: Collection[str], *, is_last: bool
    ) -> Sequence[str]:
        """Its first holder, whom nobody else waits for; the last version is evaluated by all."""
        return sorted({asks, *live}) if is_last else [asks]

    def outer(self, round_number: int, ticks_before: int) -> Ticks:
        return Ticks(
            optimizer=self.manifest.outer.build(),
            download=self.manifest.download.build(),
            noise=Noise(self.manifest.seed, round_number, NOISE_LANE_DOWNLOAD),
            step=ticks_before + 1,
        )
