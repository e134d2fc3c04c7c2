"""Parts of `benchmarks.gather`: size, cost, how time falls with ranks, and memory."""

from dataclasses import asdict, replace
from typing import Any

from atoll.codecs.topk.chunks import CHUNK, chunk_bytes
from atoll.gather import statement as statements
from benchmarks import gather_group as groups
from benchmarks import gather_validate
from benchmarks.gather_bench import Bench, Counted
from benchmarks.gather_world import secret
from benchmarks.report import Bar
from tests.s3_proxy import TokenBucket

Measured = tuple[dict[str, Any], list[Bar]]

CLASS_25M: dict[str, Any] = {"peers": 20, "megabytes": 0.5005}  # 25 M parameters each
CLASS_125M: dict[str, Any] = {"peers": 64, "megabytes": 2.5}
RATE, SHARED_RATE = 1e6, 3e6  # bytes a second
RANK_AIMS = {2: 1.9, 4: 3.5}
SHARED_RANKS, SHARED_AIM = 4, 0.8  # within 20 % of the limit
COST_AIM = 3.0
PROCESSOR_PEERS, PROCESSOR_SECONDS, PROCESSOR_AIM = 20, 5.0, 1.6
BYTES_PER_CHUNK, BYTES_AIM = 82, 1.01
CATCH_UP_PEERS = 16
BUDGETS_MB, MEMORY_PEERS, PEER_AIM_MB = (64, 256), (4, 16, 64), 0.25


def size(bench: Bench) -> Measured:
    """An object of 25 M parameters with its statement, against 82 bytes a chunk."""
    world = bench.world(**CLASS_25M)
    uid = world.uids[0]
    frame = world.frame(uid, seed=0)
    document = statements.signed(world.statement(uid, frame), secret(uid))
    least = -(-world.layout.size // CHUNK) * BYTES_PER_CHUNK
    assert chunk_bytes(CHUNK) == BYTES_PER_CHUNK
    times = (len(frame) + len(document)) / least
    found = {
        "parameters": world.layout.size,
        "object_bytes": len(frame),
        "statement_bytes": len(document),
        "times_82_bytes_a_chunk": times,
    }
    return found, [Bar("object and statement / 82 bytes a chunk", times, BYTES_AIM)]


def cost(bench: Bench) -> Measured:
    """The processor's time of a whole window at one rank, and of its validation by itself."""
    world = bench.world(**CLASS_25M)
    ran = groups.ran(world, [bench.url], repeats=bench.repeats, warm=bench.warm())
    found = {
        "window": groups.told(ran),
        "validation": gather_validate.measure(passes=bench.repeats),
    }
    name = "20 peers x 25 M fetched, validated, compared, applied: core s"
    return found, [Bar(name, found["window"]["processor_seconds"], COST_AIM)]


def ranks(bench: Bench) -> Measured:
    """Every rank has a link of its own."""
    world, nbytes = bench.world(**CLASS_25M), bench.object_bytes(**CLASS_25M)
    by_size, bars, twice = {}, [], 0
    for count in (1, *RANK_AIMS):
        proxy = bench.proxy()
        proxy.limits = {rank: TokenBucket(RATE) for rank in range(count)}
        endpoints = [proxy.port(rank) for rank in range(count)]
        ran = groups.ran(world, endpoints, repeats=bench.repeats, has_archive=True)
        counted = Counted.of(proxy, ran, world.peers * nbytes)
        by_size[count] = {**groups.told(ran), "counted": asdict(counted)}
        twice += counted.twice_bytes
    for count, aim in RANK_AIMS.items():
        for name in ("gather", "window"):
            times = by_size[1][f"{name}_seconds"] / by_size[count][f"{name}_seconds"]
            by_size[count][f"{name}_times"] = times
        bars.append(
            Bar(f"{count} ranks: times one rank", by_size[count]["gather_times"], aim, True)
        )
    bars.append(Bar("one rank: s (about 10)", by_size[1]["gather_seconds"], 9.0, True))
    bars.append(Bar("bytes that came twice", twice, 0))
    return {"rate": RATE, "ranks": list(by_size.values())}, bars


def shared(bench: Bench) -> Measured:
    """All ranks behind one link."""
    world, nbytes = bench.world(**CLASS_25M), bench.object_bytes(**CLASS_25M)
    proxy, limit = bench.proxy(), TokenBucket(SHARED_RATE)
    proxy.limits = dict.fromkeys(range(SHARED_RANKS), limit)
    endpoints = [proxy.port(rank) for rank in range(SHARED_RANKS)]
    ran = groups.ran(world, endpoints, repeats=bench.repeats)
    told = groups.told(ran)
    share = world.peers * nbytes / told["gather_seconds"] / SHARED_RATE
    counted = Counted.of(proxy, ran, world.peers * nbytes)
    found = {**told, "rate": SHARED_RATE, "share_of_limit": share, "counted": asdict(counted)}
    return found, [
        Bar(f"shared limit, {SHARED_RANKS} ranks: share reached", share, SHARED_AIM, True),
        Bar("shared limit: bytes that came twice", counted.twice_bytes, 0),
    ]


def processor(bench: Bench) -> Measured:
    """Nothing but the processor limits: no proxy, no archive, one thread a rank."""
    bench.world(**CLASS_125M)
    world = bench.world(**CLASS_125M, asked=PROCESSOR_PEERS)
    told = {}
    for count in (1, 2):
        ran = groups.ran(world, [bench.url] * count, repeats=bench.repeats, warm=bench.warm())
        told[count] = groups.told(ran)
    times = told[1]["window_seconds"] / told[2]["window_seconds"]
    found = {"one": told[1], "two": told[2], "times": times}
    return found, [
        Bar("processor-bound, one rank: s", told[1]["window_seconds"], PROCESSOR_SECONDS, True),
        Bar("processor-bound, 2 ranks: times one rank", times, PROCESSOR_AIM, True),
    ]


def memory(bench: Bench) -> Measured:
    """Fetch and update together, each window in a process of its own."""
    peaks: dict[tuple[int, int], float] = {}
    for budget in BUDGETS_MB:
        for peers in MEMORY_PEERS:
            world = bench.world(**CLASS_125M, asked=peers, budget_mb=budget)
            [[one]] = groups.ran(world, [bench.url], warm=bench.warm(), measures_memory=True)
            assert one["accepted"] == peers, one
            peaks[budget, peers] = one["peak_mb"]
    bars = [Bar(f"{p} peers, budget {b}: peak MB", peak, b) for (b, p), peak in peaks.items()]
    for budget in BUDGETS_MB:
        grown = (peaks[budget, 64] - peaks[budget, 16]) / 48
        bars.append(Bar(f"budget {budget}: MB per peer, 16 to 64", grown, PEER_AIM_MB))
    listed = [{"budget_mb": b, "peers": p, "peak_mb": peak} for (b, p), peak in peaks.items()]
    return {"windows": listed}, bars


def catch_up(bench: Bench) -> Measured:
    """The memory of a late joiner of two windows, the second fetched while the first is applied."""
    world, warm = bench.world(**CLASS_125M, asked=CATCH_UP_PEERS), bench.warm()
    [[recorded]] = groups.ran(world, [bench.url], part="recorded", archive="late", warm=warm)
    assert recorded["accepted"] == CATCH_UP_PEERS, recorded
    listed, bars = [], []
    for budget in BUDGETS_MB:
        [[one]] = groups.ran(
            replace(world, budget_mb=budget),
            [bench.url],
            part="catch-up",
            archive="late",
            warm=warm,
            measures_memory=True,
        )
        assert (one["applied"], one["digest"]) == (2, recorded["digest"]), one
        listed.append({"budget_mb": budget, "peers": CATCH_UP_PEERS, **one})
        bars.append(Bar(f"catch-up, budget {budget}: peak MB", one["peak_mb"], budget))
    return {"catch_ups": listed}, bars
