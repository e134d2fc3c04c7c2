"""The numbers of one window, for logs and for whoever watches; they decide nothing."""

from dataclasses import dataclass
from typing import Self

from atoll.gather.archive import Recorded
from atoll.gather.consume import Consumed
from atoll.gather.quality import Quality, quality


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """What a window came to. None: there is nothing to say, as of the overlap of a replayed one."""

    window: int
    is_replayed: bool
    seconds: float
    download_bytes: int  # of objects; where it was replayed, of its body
    quality: Quality
    pairs_high_ovlap: int | None = None
    mean_overlap: float | None = None
    max_overlap: float | None = None
    min_median_norm: float | None = None
    max_median_norm: float | None = None

    @classmethod
    def of_applied(
        cls,
        window: int,
        *,
        done: Consumed,
        quality: Quality,
        seconds: float,
        download_bytes: int,
    ) -> Self:
        """Of a window that was gathered."""
        found, has_norms = done.findings, len(done.medians) > 0
        return cls(
            window=window,
            is_replayed=False,
            seconds=seconds,
            download_bytes=download_bytes,
            quality=quality,
            pairs_high_ovlap=found.pairs_high_ovlap,
            mean_overlap=found.mean_overlap,
            max_overlap=found.max_overlap,
            min_median_norm=float(done.medians.min()) if has_norms else None,
            max_median_norm=float(done.medians.max()) if has_norms else None,
        )

    @classmethod
    def of_replayed(cls, found: Recorded, *, seconds: float) -> Self:
        """Of a window that was applied from its artifact."""
        made = found.artifact
        reserves = set(made.uids) - set(made.primaries)
        return cls(
            window=made.window,
            is_replayed=True,
            seconds=seconds,
            download_bytes=made.body_bytes,
            quality=quality(made.merged(), primaries=made.primaries, reserves=reserves),
        )
