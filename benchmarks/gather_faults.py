"""Parts of `benchmarks.gather`: slow peers, and a server that is away for ten seconds."""

import time
from dataclasses import asdict
from typing import Any

from benchmarks import gather_group as groups
from benchmarks.gather_bench import Bench, Counted
from benchmarks.gather_world import World
from benchmarks.report import Bar
from tests.s3_proxy import S3Proxy, TokenBucket, sent_bytes

Measured = tuple[dict[str, Any], list[Bar]]

SLOW_CLASS: dict[str, Any] = {"peers": 21, "megabytes": 0.25}
SLOW_EVERY, SLOW_RATE = 3, 1e3  # every third, the first among them; bytes a second
LINK_RATE = 0.7e6  # 14 quick peers take 5 s
SLOW_SECONDS = 10.0  # the deadline, at which the slow ones are skipped
FEW_SLOTS_MB = 8  # a budget with room for one download at a time
SLOW_AIM = 1.2
AWAY_CLASS: dict[str, Any] = {"peers": 20, "megabytes": 0.25}
AWAY_RATE, AWAY_SECONDS, AWAY_FROM = 0.5e6, 10.0, 0.3  # of all bytes


def slow(bench: Bench) -> Measured:
    """The others' time until their last byte, with slow ones before and between them, and alone."""
    found: dict[str, Any] = {}
    bars = []
    for name, budget in (("8 slots", 256), ("1 slot", FEW_SLOTS_MB)):
        world = bench.world(**SLOW_CLASS, seconds=SLOW_SECONDS, budget_mb=budget)
        alone = _others_seconds(
            bench, bench.world(**SLOW_CLASS, without_every=SLOW_EVERY, budget_mb=budget)
        )
        together = _others_seconds(bench, world)
        slots = world.terms().budget(1).slots
        times = together["seconds"] / alone["seconds"]
        found[name] = {"slots": slots, "alone": alone, "together": together, "times": times}
        bars.append(Bar(f"others with a third slow, {name}: times alone", times, SLOW_AIM))
    return found, bars


def _others_seconds(bench: Bench, world: World) -> dict[str, Any]:
    proxy = bench.proxy()
    proxy.limits = {0: TokenBucket(LINK_RATE)}
    slow_ones = [f"/{world.folder}/u{k:03d}/" for k in range(0, world.peers, SLOW_EVERY)]
    proxy.slow = {prefix: TokenBucket(SLOW_RATE) for prefix in slow_ones}
    [[one]] = groups.ran(world, [proxy.port(0)], warm=bench.warm())
    others = [sent for sent in proxy.sent if _is_quick(sent.key, world, slow_ones)]
    reasons = set(one["skipped"].values())
    assert reasons <= {"SLOW"}, one["skipped"]
    return {
        "seconds": max(sent.ended for sent in others) - one["began"],
        "accepted": one["accepted"],
        "skipped": one["skipped"],
    }


def _is_quick(key: str, world: World, slow_ones: list[str]) -> bool:
    is_of_world = f"/{world.folder}/" in key
    return is_of_world and "/frames/" in key and not any(prefix in key for prefix in slow_ones)


def away(bench: Bench) -> Measured:
    """The server is killed once a third has come, and started again on its data."""
    world, nbytes = bench.world(**AWAY_CLASS), bench.object_bytes(**AWAY_CLASS)
    [[calm]] = groups.ran(world, [bench.url])
    proxy = bench.proxy()
    proxy.limits = {rank: TokenBucket(AWAY_RATE / 2) for rank in range(2)}
    needed = world.peers * nbytes
    gone: list[float] = []

    def meanwhile() -> None:
        groups.waited(lambda: _came(proxy) > AWAY_FROM * needed, seconds=60)
        with bench.servers.restarted_s3():
            gone.append(time.monotonic())
            time.sleep(AWAY_SECONDS)
        gone.append(time.monotonic())

    ran = groups.ran(world, [proxy.port(rank) for rank in range(2)], meanwhile=meanwhile)
    counted = Counted.of(proxy, ran, needed)
    is_right = ran[0][0]["digest"] == calm["digest"] and ran[0][0]["accepted"] == world.peers
    found = {**groups.told(ran), "away_seconds": gone[1] - gone[0], "counted": asdict(counted)}
    return found, [
        Bar("S3 away 10 s: the right result (1: yes)", float(is_right), 1, True),
        Bar("S3 away 10 s: bytes that came twice", counted.twice_bytes, 0),
    ]


def _came(proxy: S3Proxy) -> int:
    return sent_bytes(list(proxy.sent))
