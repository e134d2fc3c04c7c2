"""The run in Prometheus' text format, made from what `/status` shows."""

import resource
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from atoll.protocol.messages import Status, WorkerStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render(found: Status) -> bytes:
    """One scrape."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_StatusCollector(found))
    return generate_latest(registry)


class _StatusCollector(Collector):
    def __init__(self, found: Status) -> None:
        self._found = found

    def collect(self) -> Iterator[Metric]:
        yield from self._run()
        yield from self._workers()
        yield from _process()

    def _run(self) -> Iterator[Metric]:
        found = self._found
        live, waiting = sum(w.live for w in found.workers), len(found.waiting_for)
        is_full = bool(found.storage_full)
        yield _gauge("atoll_version", "Rounds published.", found.version)
        yield _gauge("atoll_live_workers", "Workers heard from.", live)
        yield _gauge("atoll_waiting_for", "Workers the round waits for.", waiting)
        yield _gauge("atoll_storage_full", "Whether the disk has no room.", is_full)
        yield _counter("atoll_tokens", "Tokens accepted.", found.tokens)
        yield _counter("atoll_received_bytes", "Bytes of uploads.", found.bytes_received)
        yield _counter("atoll_sent_bytes", "Bytes of downloads.", found.bytes_sent)
        yield _counter(
            "atoll_stale", "Contributions that came too late.", found.stale_contributions
        )
        refused = CounterMetricFamily("atoll_refusals", "Refused messages.", labels=["code"])
        for code, number in sorted(found.refusals.items()):
            refused.add_metric([code], number)
        yield refused
        for last in found.history[-1:]:
            if last.train_loss is not None:
                yield _gauge("atoll_train_loss", "Newest train loss.", last.train_loss)
            if last.evaluation_loss is not None:
                yield _gauge("atoll_held_out_loss", "Newest held-out loss.", last.evaluation_loss)

    def _workers(self) -> Iterator[Metric]:
        members = [w for w in self._found.workers if w.active]  # a series ends with its worker
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
        for name, (text, value) in figures.items():
            family = GaugeMetricFamily(f"atoll_worker_{name}", text, labels=["worker_id"])
            for worker in members:
                if (figure := value(worker)) is not None:
                    family.add_metric([worker.worker_id], figure)
            yield family


def _process() -> Iterator[Metric]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    yield _counter("atoll_cpu_seconds", "Of the coordinator.", used.ru_utime + used.ru_stime)
    yield _gauge("atoll_peak_memory_bytes", "Of the coordinator.", used.ru_maxrss * 1024)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)
