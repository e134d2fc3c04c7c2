"""Synchronous DiLoCo: every island hands in every round, and all start the next one alike.

One fragment, one open round. Also what other strategies are made from: each differs from this one
in a few answers.
"""

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import ClassVar

from atoll.codecs.noise import Noise
from atoll.layout import Layout
from atoll.protocol.manifest import Manifest
from atoll.strategies.base import Lease, RoundView
from atoll.strategies.bundle import Bundle
from atoll.strategies.diloco import of_mode
from atoll.strategies.outer import NOISE_LANE_DOWNLOAD, OuterStep
from atoll.wire.header import FrameHeader


@dataclass(frozen=True)
class Sync:
    """The answers of a synchronous run; fulfils `base.Strategy`."""

    manifest: Manifest

    fixed: ClassVar[tuple[str, ...]] = ()
    by_step = False
    dials = False
    follows = False
    gathers = False

    @property
    def lead(self) -> int:
        return 0

    @property
    def rows_each(self) -> int:
        return self.manifest.rows_per_round

    @property
    def in_flight(self) -> int:
        return 0

    @property
    def local_weight(self) -> float:
        return 0.0

    @property
    def keeps_local(self) -> bool:
        return False

    @classmethod
    def of(cls, manifest: Manifest) -> "Sync":
        """Refuses settings that belong to other modes, by name."""
        of_mode.refuse_others(manifest, "sync")
        of_mode.refuse_one_by_one(manifest, "sync")
        return cls(manifest)

    def cut(self, layout: Layout) -> Sequence[Sequence[str]]:
        return [[tensor.name for tensor in layout.tensors]]

    def fragment(self, round_number: int, *, is_last: bool) -> int:
        return 0

    def may_end(self, fragment: int) -> bool:
        return True

    def rows(
        self, round_number: int, live: Collection[str], speeds: Mapping[str, float]
    ) -> dict[str, int]:
        return dict.fromkeys(live, self.manifest.rows_per_round)

    def asked(
        self, version: int, open_rounds: Collection[int], folding: Collection[int]
    ) -> int | None:
        return None  # rows are given with the plan

    def piece(self, worker_id: str, speeds: Callable[[], Mapping[str, float]]) -> int:
        return self.manifest.rows_per_round

    def abreast(self, holding: int) -> int:
        return holding

    def needs(self, round_number: int) -> int:
        return round_number - 1 - self.lead

    def first(self, round_number: int, began: int) -> int:
        return round_number

    def due(self, round_number: int, step: int) -> Sequence[int]:
        return ()

    def destination(self, made_for: int, open_rounds: Sequence[int]) -> int | None:
        return made_for if made_for in open_rounds else None

    def weight(self, *, tokens: int) -> int:
        return 1 if self.manifest.weighting == "equal" else tokens

    def factor(self, *, staleness: int, tokens: int) -> float:
        return 1.0

    def has_quorum(self, view: RoundView) -> bool:
        settings = self.manifest.membership
        needed = settings.quorum or len(view.planned)
        return len(view.accepted) >= max(needed, settings.min_workers)

    def is_due(self, view: RoundView, *, seconds: float) -> bool:
        """Never with fewer than `min_workers` contributions.

        Otherwise when no live planned worker is missing, or after `grace_seconds` with a quorum.
        """
        settings = self.manifest.membership
        if len(view.accepted) < settings.min_workers:
            return False
        has_waited = self.has_quorum(view) and seconds >= settings.grace_seconds
        return has_waited or not self.waiting_for(view)

    def waiting_for(self, view: RoundView) -> Set[str]:
        return (view.planned & view.live) - view.accepted

    def reserves(self, view: RoundView) -> Sequence[str]:
        return ()

    def places(self, view: RoundView) -> int:
        return len(view.planned - view.accepted)

    def is_short(self, view: RoundView) -> bool:
        """Whether `min_workers` is out of reach even if every live planned worker sent."""
        reachable = view.accepted | (view.planned & view.live)
        return len(reachable) < self.manifest.membership.min_workers

    def ended(
        self, leases: Collection[Lease], *, closing: int, live: Collection[str]
    ) -> set[Lease]:
        return {lease for lease in leases if lease[0] == closing}

    def bundle(self, layout: Layout, contributions: int) -> Bundle | None:
        return None

    def bundle_in(self, header: FrameHeader, layout: Layout) -> Bundle | None:
        return None

    def evaluators(
        self, asks: str, planned: Sequence[str], live: Collection[str], *, is_last: bool
    ) -> Sequence[str]:
        return planned

    def outer(self, round_number: int, ticks_before: int) -> OuterStep:
        return OuterStep(
            optimizer=self.manifest.outer.build(),
            download=self.manifest.download.build(),
            noise=Noise(self.manifest.seed, round_number, NOISE_LANE_DOWNLOAD),
            step=round_number,
        )
