"""How fast the control plane answers 1,000 workers, idle and while two of them send 100 MB each.

The coordinator is a real process; every worker has a connection of its own and beats every five
seconds through real HTTP, all from one process; the uploads come from a third. Latency is what a
worker sees.

    python -m benchmarks.control_plane [--json] [--workers 1000] [--seconds 20]
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from atoll.clock import SystemClock
from atoll.island.conversation.asking import question
from atoll.island.conversation.hand_in import header_of
from atoll.island.conversation.intents import Trained
from atoll.island.conversation.session import Session, look
from atoll.island.driver import Driver
from atoll.island.link.network import NetworkLink
from atoll.island.state.store import IslandIdentity, StoredFrame
from atoll.launch import local, memory
from atoll.layout import Fragment, Layout, Span, byte_view
from atoll.models import registry as models
from atoll.protocol.messages import HeartbeatRequest, Identity, InfoRequest
from atoll.wire import body, frame
from benchmarks.report import Bar, report, show
from benchmarks.sync import MODEL, RUN_FILE, TOKENS, processor_seconds

BEAT_SECONDS = 5.0
AIMS_MS = {"idle": 100.0, "uploads": 250.0}  # p99, from the issue


@dataclass(frozen=True)
class Phase:
    """What the workers saw in one phase, in milliseconds, and what it cost."""

    name: str
    beats: int
    errors: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    coordinator_processor: float  # cores
    uploads: int = 0


def run_file(workers: int) -> str:
    text = RUN_FILE.format(codec="fp32", islands=workers, rounds=1, **MODEL)
    return text.replace("heartbeat_interval = 1.0", f"heartbeat_interval = {BEAT_SECONDS}").replace(
        "heartbeat_timeout = 30.0", "heartbeat_timeout = 600.0"
    )


def register(url: str, count: int) -> tuple[list[Identity], float]:
    """So many workers, and how long one took."""
    link = NetworkLink(url, token=TOKENS.worker)
    driver, jitter = Driver(link, SystemClock()), random.Random(0)
    info = driver.run(look(jitter))
    known: dict[str, Any] = {
        "layout_digest": info.model_hash,
        "data_identity": info.data.identity,
    }
    workers = [Session(_island(f"worker-{n:04d}"), info, jitter) for n in range(count)]
    began = time.perf_counter()
    for session in workers:
        driver.run(session.register(**known))
    seconds = (time.perf_counter() - began) / count
    link.close()
    # Every join made a generation; all beat in the last one.
    last = workers[-1].standing.identity().generation
    for session in workers:
        session.standing.told(last)
    return [session.standing.identity() for session in workers], seconds


def _island(name: str) -> IslandIdentity:
    return IslandIdentity(name, random.Random(name).randbytes(32).hex())


# The load: one connection for each worker, requests made by hand to cost little


def beat_all(url: str, identities: list[Identity], seconds: float, results: Any) -> None:
    results.put(asyncio.run(_beat_all(url, identities, seconds)))


async def _beat_all(
    url: str, identities: list[Identity], seconds: float
) -> tuple[list[float], int]:
    host, port = url.removeprefix("http://").split(":")
    draw = random.Random(1)
    stop = time.perf_counter() + seconds
    found = await asyncio.gather(
        *(_beat(host, int(port), who, draw.random() * BEAT_SECONDS, stop) for who in identities)
    )
    return [ms for times, _ in found for ms in times], sum(errors for _, errors in found)


async def _beat(
    host: str, port: int, who: Identity, delay: float, stop: float
) -> tuple[list[float], int]:
    message = HeartbeatRequest(identity=who)
    body = message.model_dump_json().encode()
    head = (
        f"POST {message.target()} HTTP/1.1\r\nhost: {host}\r\n"
        f"authorization: Bearer {TOKENS.worker}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    ).encode()
    reader, writer = await asyncio.open_connection(host, port)
    times: list[float] = []
    errors = 0
    due = time.perf_counter() + delay
    while due < stop:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        began = time.perf_counter()
        writer.write(head + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        [length] = [
            int(line.split(b":")[1])
            for line in answer.lower().split(b"\r\n")
            if line.startswith(b"content-length")
        ]
        await reader.readexactly(length)
        times.append((time.perf_counter() - began) * 1000)
        errors += not answer.startswith(b"HTTP/1.1 200")
        due += BEAT_SECONDS
    writer.close()
    return times, errors


# The uploads


def upload_until(url: str, identities: list[Identity], home: str, stop: Any, results: Any) -> None:
    """Two workers at a time send their 100 MB, one pair after the other, until `stop` is set."""
    torch.set_num_threads(1)
    memory.keep_freed_tiles()
    made = [_frame(url, who, Path(home)) for who in identities]
    done: list[str] = []

    def send(mine: list[tuple[Identity, StoredFrame]]) -> None:
        link = NetworkLink(url, token=TOKENS.worker)
        for who, stored in mine:
            if stop.is_set():
                return
            done.append(link.upload(who, stored, before_commit=lambda: None))

    results.put("ready")
    threads = [threading.Thread(target=send, args=(made[half::2],)) for half in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put(len(done))


@dataclass(frozen=True)
class Initial:
    """The initial weights in one fragment, as far as a header speaks of them."""

    layout: Layout
    digest: str

    def fragment(self, _: int) -> Fragment:
        return Fragment(self.layout, Span(0, self.layout.size))

    def base_digest(self, _: int) -> str:
        return self.digest


def _frame(url: str, who: Identity, home: Path) -> tuple[Identity, StoredFrame]:
    link = NetworkLink(url, token=TOKENS.worker)
    info = link.send(InfoRequest())
    layout = models.layout_of(models.on_meta(info.model.definition))
    given = link.send(question(who, 0, info.model.initial_digest))
    link.close()
    session = Session(IslandIdentity(who.worker_id, who.island_key), info, random.Random(0))
    session.standing.move(who.incarnation, who.generation, 0)
    rows = sum(map(len, given.ranges))
    held = Initial(layout, info.model.initial_digest)
    assert given.round is not None
    trained = Trained(1.0, rows * 64, rows)
    header = header_of(session, held, given, trained, began=given.round)
    path = home / who.worker_id
    with path.open("wb") as file:
        sink = body.begin(header, file)
        tile = torch.full((1 << 20,), 1e-4)
        for start in range(0, layout.size, tile.numel()):
            sink.payload(byte_view(tile[: min(tile.numel(), layout.size - start)]))
        blob_sha256 = sink.finish()
    return who, StoredFrame(path, preamble=frame.preamble(header), sha256=blob_sha256)


# Phases


def measure(
    name: str,
    url: str,
    pid: int,
    identities: list[Identity],
    *,
    seconds: float,
    uploads: Path | None,
) -> Phase:
    context = mp.get_context("spawn")
    results, sending = context.SimpleQueue(), context.SimpleQueue()
    stop = context.Event()
    uploader = None
    if uploads is not None:
        senders = identities[:40]
        arguments = (url, senders, str(uploads), stop, sending)
        uploader = context.Process(target=upload_until, args=arguments)
        uploader.start()
        assert sending.get() == "ready"
    load = context.Process(target=beat_all, args=(url, identities, seconds, results))
    load.start()
    used, began = processor_seconds(pid), time.perf_counter()
    times, errors = results.get()
    spent = (processor_seconds(pid) - used) / (time.perf_counter() - began)
    load.join()
    sent = 0
    if uploader is not None:
        stop.set()
        sent = sending.get()
        uploader.join()
    times.sort()
    return Phase(
        name=name,
        beats=len(times),
        errors=errors,
        p50_ms=times[len(times) // 2],
        p99_ms=times[int(len(times) * 0.99)],
        max_ms=times[-1],
        coordinator_processor=spent,
        uploads=sent,
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--json", action="store_true")
    arguments.add_argument("--workers", type=int, default=1000)
    arguments.add_argument("--seconds", type=float, default=20.0)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="atoll-bench-", dir=".") as made:
        home = Path(made)
        (home / "run.toml").write_text(run_file(given.workers))
        coordinator = local.start_coordinator(home / "run.toml", home / "c", tokens=TOKENS)
        try:
            coordinator.wait_ready()
            identities, seconds = register(coordinator.url, given.workers)
            frames = home / "frames"
            frames.mkdir()
            phases = [
                measure(
                    name,
                    coordinator.url,
                    coordinator.pid,
                    identities,
                    seconds=given.seconds,
                    uploads=frames if name == "uploads" else None,
                )
                for name in AIMS_MS
            ]
        finally:
            coordinator.kill()
    results = {
        "workers": given.workers,
        "beat_seconds": BEAT_SECONDS,
        "registration_ms": seconds * 1000,
        "phases": [asdict(phase) for phase in phases],
    }
    bars = [Bar(f"heartbeat p99, {p.name}, ms", p.p99_ms, AIMS_MS[p.name]) for p in phases]
    show(report(results, bars), as_json=given.json)
    if not given.json:
        sys.stdout.write(json.dumps(results, indent=2) + "\n")
    assert not any(p.errors for p in phases), "a heartbeat was refused"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
