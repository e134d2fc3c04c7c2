"""The run in Prometheus' text format, made from what `/status` shows."""

import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from atoll.protocol.messages import GatherStatus, Status, WorkerStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render(found: Status) -> bytes:
    """One scrape."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_StatusCollector(found))
    return generate_latest(registry)


@dataclass(eq=False)  # registries hash their collectors
class _StatusCollector(Collector):
    found: Status

    def collect(self) -> Iterator[Metric]:
        yield from _run(self.found)
        if self.found.gather is not None:
            yield from _gather(self.found.gather)
        yield from _workers(self.found)


def _run(found: Status) -> Iterator[Metric]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    gauges: dict[str, tuple[str, float | None]] = {
        "version": ("Rounds published.", found.version),
        "live_workers": ("Workers heard from.", sum(w.live for w in found.workers)),
        "waiting_for": ("Workers the round waits for.", len(found.waiting_for)),
        "storage_full": ("Whether the disk has no room.", bool(found.storage_full)),
        "peak_memory_bytes": ("Of the coordinator.", used.ru_maxrss * 1024),
    }
    if found.checkpoint or found.group:
        gauges["group_ranks"] = ("Ranks of the group that trains.", len(found.ring))
        gauges["consistent_step"] = ("Newest step that all ranks saved.", found.consistent)
        gauges["checkpoint_step"] = ("Step of the newest checkpoint.", found.checkpoint)
    for last in found.history[-1:]:
        gauges["train_loss"] = ("Newest train loss.", last.train_loss)
        gauges["held_out_loss"] = ("Newest held-out loss.", last.evaluation_loss)
    for name, (text, value) in gauges.items():
        if value is not None:
            yield GaugeMetricFamily(f"atoll_{name}", text, value=value)
    counters = {
        "tokens": ("Tokens accepted.", found.tokens),
        "received_bytes": ("Bytes of uploads.", found.bytes_received),
        "sent_bytes": ("Bytes of downloads.", found.bytes_sent),
        "stale": ("Contributions that came too late.", found.stale_contributions),
        "cpu_seconds": ("Of the coordinator.", used.ru_utime + used.ru_stime),
    }
    for name, (text, count) in counters.items():
        yield CounterMetricFamily(f"atoll_{name}", text, value=count)
    refused = CounterMetricFamily("atoll_refusals", "Refused messages.", labels=["code"])
    for code, number in sorted(found.refusals.items()):
        refused.add_metric([code], number)
    yield refused


def _gather(found: GatherStatus) -> Iterator[Metric]:
    counters = {
        "accepted": ("Contributions pulled and accepted.", found.accepted),
        "reserves_used": ("Of these, by reserves.", found.reserves_used),
        "pulled_bytes": ("Bytes from buckets.", found.pulled_bytes),
    }
    for name, (text, count) in counters.items():
        yield CounterMetricFamily(f"atoll_gather_{name}", text, value=count)
    skipped = CounterMetricFamily(
        "atoll_gather_skipped", "Contributions that rounds did without.", labels=["reason"]
    )
    for reason, number in sorted(found.all_skips.items()):
        skipped.add_metric([reason], number)
    yield skipped
    if found.overlap is not None:
        text = "Highest share of places that two contributions to the newest version both send."
        yield GaugeMetricFamily("atoll_gather_overlap", text, value=found.overlap)


def _workers(found: Status) -> Iterator[Metric]:
    members = [w for w in found.workers if w.active]  # a series ends with its worker
    figures: dict[str, tuple[str, Callable[[WorkerStatus], float | None]]] = {
        "live": ("Whether the worker is heard from.", lambda w: float(w.live)),
        "silence_seconds": ("Since the worker was heard.", lambda w: w.seconds_since_heard),
        "round": ("Round in training.", lambda w: w.telemetry.round),
        "step": ("Inner step of that round.", lambda w: w.telemetry.step),
        "tokens_per_second": ("While training.", lambda w: w.telemetry.tokens_per_second),
        "sent_bytes": ("Sent by this process.", lambda w: w.telemetry.bytes_sent),
        "received_bytes": ("Received by this process.", lambda w: w.telemetry.bytes_received),
        "loss": ("Newest.", lambda w: w.telemetry.loss),
    }
    if found.checkpoint or found.group:
        figures |= {
            "gather_seconds": ("Waited for weights.", lambda w: w.telemetry.gather_seconds),
            "compute_seconds": ("Computed.", lambda w: w.telemetry.compute_seconds),
            "reduce_seconds": ("Waited for sums.", lambda w: w.telemetry.reduce_seconds),
            "step_seconds": ("Updated its part.", lambda w: w.telemetry.step_seconds),
            "rank_sent_bytes": ("Sent to ranks.", lambda w: w.telemetry.rank_bytes_sent),
            "rank_received_bytes": ("From ranks.", lambda w: w.telemetry.rank_bytes_received),
            "rolled_back_steps": ("Made for nothing.", lambda w: w.telemetry.rolled_back_steps),
            "late_steps": ("Computed too late.", lambda w: w.telemetry.late_steps),
        }
    for name, (text, value) in figures.items():
        family = GaugeMetricFamily(f"atoll_worker_{name}", text, labels=["worker_id"])
        for worker in members:
            if (figure := value(worker)) is not None:
                family.add_metric([worker.worker_id], figure)
        yield family
