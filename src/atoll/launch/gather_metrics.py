"""A window's numbers in Prometheus' text format, as a file that a textfile collector reads."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from atoll import files
from atoll.gather.numbers import Numbers


def write(path: Path, found: Numbers) -> None:
    """Puts the numbers at `path`, readable for all; a reader sees the old file or the new one."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_WindowCollector(found))
    part = files.part_of(path)  # whose name no collector takes for a file of its own
    with files.naming("write", path):
        part.write_bytes(generate_latest(registry))
        part.chmod(0o644)
        files.SYSTEM.rename(part, path)


@dataclass(eq=False)  # registries hash their collectors
class _WindowCollector(Collector):
    found: Numbers

    def collect(self) -> Iterator[Metric]:
        found, quality = self.found, self.found.quality
        gauges: dict[str, tuple[str, float | None]] = {
            "window": ("Newest window applied.", found.window),
            "replayed": ("Whether it was applied from its artifact.", found.is_replayed),
            "seconds": ("That it took.", found.seconds),
            "download_bytes": ("Of its accepted objects, or its body.", found.download_bytes),
            "intended_peers": ("Primaries.", quality.intended),
            "actual_peers": ("Applied.", quality.actual),
            "reserves_used": ("Of those applied.", quality.reserves_used),
            "success_rate": ("Applied / primaries.", quality.success_rate),
            "intended_mean_score": ("Of primaries.", quality.intended_mean_score),
            "actual_mean_score": ("Of those applied.", quality.actual_mean_score),
            "pairs_high_overlap": ("Pairs too much alike.", found.pairs_high_ovlap),
            "mean_overlap": ("Of all pairs.", found.mean_overlap),
            "max_overlap": ("Of all pairs.", found.max_overlap),
            "min_median_norm": ("Over parameters.", found.min_median_norm),
            "max_median_norm": ("Over parameters.", found.max_median_norm),
        }
        for name, (text, value) in gauges.items():
            if value is not None:
                yield GaugeMetricFamily(f"atoll_gather_{name}", text, value=value)
        for name, label, counts in (
            ("skips", "reason", quality.skips),
            ("skips_by_fault", "fault", quality.skips_by_fault),
        ):
            family = GaugeMetricFamily(f"atoll_gather_{name}", "Peers left out.", labels=[label])
            for word, count in counts.items():
                family.add_metric([word], count)
            yield family
