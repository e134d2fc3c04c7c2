"""How long a coordinator with a long history takes from its start to its first answer.

Fills a ledger with 1,000 published rounds over 10,000 units through the ledger's own calls, with a
snapshot at the end as retention leaves it, then starts `atoll serve` on it and asks for `/health`.

    python -m benchmarks.restart [--json] [--rounds 1000] [--starts 3]
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import httpx

from atoll import config
from atoll.clock import SystemClock
from atoll.coordinator import boot
from atoll.coordinator.rounds.dispatch import Dispatch
from atoll.coordinator.stores import Stores
from atoll.launch import local, state
from atoll.launch.state import Addresses
from atoll.ledger import chain
from atoll.ledger.records import (
    ContributionRecord,
    Published,
    RoundPlan,
    SnapshotRecord,
)
from atoll.ledger.tables.transaction import Transaction
from atoll.protocol.manifest import Manifest
from atoll.versions import recorded, weights
from atoll.versions.manifests import Manifests
from atoll.versions.replay import Replay
from benchmarks.report import Bar, report, show
from benchmarks.sync import TOKENS, processor_seconds

ROUNDS = 1000
WORKERS = ("worker-0", "worker-1")
ROWS = 50  # of one worker in a round: five units
AIM_SECONDS = 5.0  # from the issue
RUN_FILE = """
name = "restart"
heartbeat_timeout = 600.0
sync_every = {rows}
[model]
architecture = "gpt"
vocab = 32
block = 16
layers = 1
heads = 2
width = 32
[data]
kind = "synthetic"
seed = 7
rows = 120000
held_out_rows = 8
block = 16
[work]
units = 12000
[inner]
batch = 1
[membership]
min_workers = {workers}
[stop]
rounds = 1000000
[storage]
retain = "snapshots"
"""


def run_file(path: Path) -> Path:
    """A tiny run with rounds of `WORKERS` x `ROWS` rows."""
    path.write_text(RUN_FILE.format(rows=ROWS, workers=len(WORKERS)))
    return path


def fill(directory: Path, file: Path, *, rounds: int, key_sha256: str = "0" * 64) -> None:
    """A state directory with so many published rounds, the next one open.

    Its weights never moved; every worker has `key_sha256` as the hash of its island key.
    """
    clock = SystemClock()
    with state.held(directory, Addresses()) as stores:
        manifest = boot.create_or_check(
            stores, config.load(file), clock, new_run_id="restart-benchmark"
        )
        for worker_id in WORKERS:
            with stores.ledger.writing() as t:
                t.members.register(worker_id, key_sha256, wall=clock.wall())
        _publish(stores, manifest, rounds=rounds)


def _publish(stores: Stores, manifest: Manifest, *, rounds: int) -> None:
    ledger, layout = stores.ledger, recorded.layout_of(manifest)
    known = Manifests.of(ledger)
    initial = Replay(ledger, stores.blobs, manifests=known, layout=layout).restore(None)
    outer, digests = initial.state, initial.digests
    with ledger.reading() as t:
        run = t.run.get()
    assert run is not None
    manifest_sha256 = known.first.sha256
    head = chain.genesis_hash(run, manifest_sha256)
    dispatch = Dispatch(ledger, manifest)
    cursor = 0

    def plan(t: Transaction, number: int) -> RoundPlan:
        nonlocal cursor
        rows = dict.fromkeys(WORKERS, manifest.rows_per_round)
        planned = dispatch.plan(t, number, rows, known.first, cursor=cursor, tokens=0)
        cursor = planned.cursor
        return planned

    with ledger.writing() as t:
        t.rounds.begin([plan(t, 1)])
    for number in range(1, rounds + 1):
        for worker_id in WORKERS:
            with ledger.writing() as t:
                t.contributions.accept(_contribution(number, worker_id))
        with ledger.writing() as t:
            frozen = t.rounds.freeze(number, plan(t, number + 1), ended=())
        with ledger.reading() as t:
            [record] = t.rounds.all(first=number, last=number)
        master, sent = digests.master.root, digests.published.root
        linked = replace(record, prev_hash=head, master_digest=master, published_digest=sent)
        before, head = head, chain.round_hash(linked, frozen)
        published = Published(
            prev_hash=before,
            hash=head,
            master_digest=master,
            published_digest=sent,
            leaves=digests.master.leaves,
            published_leaves=None,
            published_wall=float(number),
        )
        with ledger.writing() as t:
            t.rounds.publish(number, published, opens=[number + 1])

    def stored(flat: object, digest: str) -> str:
        header = weights.weights_header(
            layout,
            run_id=run.run_id,
            manifest_sha256=manifest_sha256,
            version=rounds,
            digest=digest,
        )
        return weights.store(stores.blobs, header, flat, layout=layout)  # type: ignore[arg-type]

    master = stored(outer.master, digests.master.root)
    slots = tuple((name, stored(outer.slots[name], "0" * 64)) for name in sorted(outer.slots))
    with ledger.writing() as t:
        t.snapshots.add(SnapshotRecord(rounds, master, master, slots))


def _contribution(number: int, worker_id: str) -> ContributionRecord:
    return ContributionRecord(
        round=number,
        worker_id=worker_id,
        applied=number,
        first=number,
        fragment=0,
        base="0" * 64,
        incarnation=1,
        sha256=f"{number:064x}",
        nbytes=1,
        weight=ROWS,
        rows=ROWS,
        tokens=ROWS * 16,
        loss_sum=1.0,
        norm=1.0,
        residual=0.0,
        carried=0,
        receipt=f"{number}-{worker_id}",
        accepted_wall=float(number),
    )


def seconds_to_health(file: Path, directory: Path) -> tuple[float, float]:
    """From the start of the process to the first answer of `/health`; ends it afterwards.

    The second number is processor time of it, which a busy machine changes less.
    """
    began = time.perf_counter()
    coordinator = local.start_coordinator(file, directory, tokens=TOKENS)
    try:
        coordinator.wait_ready(timeout_seconds=120.0)
        httpx.get(f"{coordinator.url}/health").raise_for_status()
        return time.perf_counter() - began, processor_seconds(coordinator.pid)
    finally:
        coordinator.terminate()
        coordinator.wait(timeout_seconds=60.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--starts", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="atoll-restart-") as made:
        file = run_file(Path(made) / "run.toml")
        began = time.perf_counter()
        fill(Path(made) / "filled", file, rounds=options.rounds)
        filled = time.perf_counter() - began
        fill(Path(made) / "empty", file, rounds=1)
        starts = {
            name: [seconds_to_health(file, Path(made) / name) for _ in range(options.starts)]
            for name in ("empty", "filled")
        }
    seconds = {name: [round(wall, 3) for wall, _ in found] for name, found in starts.items()}
    processor = {name: [round(busy, 3) for _, busy in found] for name, found in starts.items()}
    results = {
        "rounds": options.rounds,
        "units": options.rounds * len(WORKERS) * ROWS // 10,
        "fill_seconds": round(filled, 2),
        "start_seconds": seconds,
        "start_processor_seconds": processor,
    }
    bars = [
        Bar("start with a long history, slowest (s)", max(seconds["filled"]), AIM_SECONDS),
        Bar("start with a long history, median (s)", statistics.median(seconds["filled"]), 5.0),
    ]
    if not options.json:
        sys.stdout.write(json.dumps(results) + "\n")
    show(report(results, bars), as_json=options.json)


if __name__ == "__main__":
    main()
