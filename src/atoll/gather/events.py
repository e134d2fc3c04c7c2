"""One log event for each window, with its numbers as fields."""

import logging
from dataclasses import asdict

from atoll.gather.archive import Recorded
from atoll.gather.consume import Done
from atoll.gather.quality import Quality

log = logging.getLogger(__name__)


def replayed(found: Recorded, *, seconds: float) -> None:
    """Says that a window was applied from its artifact; called by one rank."""
    made = found.artifact
    log.info(
        "window replayed",
        extra={
            "window": made.window,
            "seconds": seconds,
            "body_bytes": made.body_bytes,
            "uids": list(made.uids),
            "skipped": len(made.skipped),
            "record_sha256": found.sha256,
            "params_digest": made.digest,
        },
    )


def applied(
    window: int, *, done: Done, quality: Quality, seconds: float, download_bytes: int
) -> None:
    """Says what a window did; called by one rank, once the window is applied on all."""
    found = done.findings
    log.info(
        "window applied",
        extra={
            "window": window,
            "seconds": seconds,
            "download_bytes": download_bytes,
            **asdict(quality),
            "uids": list(done.uids),
            "copies": sorted(done.copies),
            "pairs_checked": found.pairs_checked,
            "pairs_high_ovlap": found.pairs_high_ovlap,
            "ratio_high_ovlap": found.ratio_high_ovlap,
            "mean_overlap": found.mean_overlap,
            "max_overlap": found.max_overlap,
            "uids_over_thresh": dict(found.uids_over_thresh),
            "min_median_norm": float(done.medians.min()) if len(done.medians) else None,
            "max_median_norm": float(done.medians.max()) if len(done.medians) else None,
            "params_digest": done.digest.root,
        },
    )
