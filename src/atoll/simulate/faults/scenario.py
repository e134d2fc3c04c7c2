"""What one seed means: the run's settings, and which faults come how often.

Each seed switches some kinds of faults off and draws the rates of the others: a fault that is
always there hides what only happens without it (swarm testing, Groce et al. 2012).
"""

import random
from dataclasses import dataclass
from typing import Any

from atoll.simulate.faults.rules import Schedule

HEARTBEAT_INTERVAL = 2.0
HEARTBEAT_TIMEOUT = 6.0
BLOCK = 4  # tokens of a row
_SHORT = (7, 23, 40)  # rows of an epoch that ends within a run
_IN_BLOCKS = ("int8", "int4", "sign")
_BY_CHANCE = ("bf16", "int8", "int4")  # codecs that may round so
GATHER = "gather"
BUCKET_KINDS = ("bucket away", "bucket flaky", "object lost", "object swapped", "object cut")
KINDS = (
    "loss",
    "duplicate",
    "slow network",
    "partition",
    "kill worker",
    "stop worker",
    "replace worker",
    "impostor",
    "slow worker",
    "crash coordinator",
    "clock jump",
    "operator",
    "rogue",
    "corrupt weights",
    "outer lr",
)


@dataclass(frozen=True)
class Size:
    """How large a simulated run is, and by which strategy it trains; None leaves it to the seed.

    A strategy from outside has the settings of a synchronous run.
    """

    islands: int | None = None
    rounds: int | None = None
    strategy_name: str | None = None
    mode_name: str | None = None


@dataclass(frozen=True)
class Scenario:
    """One simulated run."""

    seed: int
    islands: int
    rounds: int
    settings: dict[str, Any]  # as in a run file
    schedule: Schedule | None  # that the settings mean; None: only their strategy knows
    data: dict[str, Any]  # identity of the stand-in's dataset
    joiners: tuple[tuple[str, int], ...]  # worker_ids, each with the version it comes after
    kinds: frozenset[str]  # of faults that this seed has
    loss: float  # of a message, each way
    duplicate: float
    delay_seconds: float  # mean, of a message
    step_seconds: float  # mean, of a round's training
    gap_seconds: float  # mean, between two faults
    fault_seconds: float  # faults end here, or earlier when the run is nearly over

    def has(self, kind: str) -> bool:
        return kind in self.kinds


def draw(seed: int, size: Size | None = None) -> Scenario:
    """The scenario of `seed`; a given size does not change what else is drawn."""
    rng = random.Random(f"scenario {seed}")
    wanted = size or Size()
    islands, rounds = rng.choice((2, 3, 3, 4, 4, 5)), rng.choice((4, 5, 6, 8))
    islands, rounds = wanted.islands or islands, wanted.rounds or rounds
    min_workers = rng.randint(1, max(1, min(3, islands - 1)))
    quorum = rng.choice((0, 0, min_workers, min(islands, min_workers + 1)))
    lossy = rng.choice(("fp32", "fp32", "bf16", "int8"))
    settings: dict[str, Any] = {
        "sync_every": rng.choice((1, 2)),
        "seed": seed % 2**31,
        "weighting": rng.choice(("equal", "tokens")),
        "upload": _codec(rng.choice(("fp32", "fp32", "bf16", "int8"))),
        "download": _codec(lossy),
        "heartbeat_interval": HEARTBEAT_INTERVAL,
        "heartbeat_timeout": HEARTBEAT_TIMEOUT,
        "inner": {"batch": rng.choice((2, 3))},
        "outer": {"optimizer": rng.choice(("nesterov", "nesterov", "nesterov", "adam", "sgd"))},
        "membership": {
            "min_workers": min_workers,
            "quorum": quorum,
            "grace_seconds": rng.choice((0.0, 1.0, 3.0)),
        },
        "stop": {"rounds": rounds},
        "work": _work(random.Random(f"work {seed}")),
        "storage": {
            "snapshot_every": rng.choice((1, 2, 3, 100)),
            "retain": rng.choice(("all", "snapshots")),
            "keep_snapshots": rng.choice((1, 2)),
        },
    }
    _add_islands(settings, random.Random(f"islands {seed}"))
    _add_codecs(settings, random.Random(f"codecs {seed}"))
    schedule = None
    kinds_of_strategy: tuple[str, ...] = ()
    if wanted.strategy_name == GATHER:
        settings = {"strategy": GATHER, **settings}
        kinds_of_strategy = BUCKET_KINDS
        schedule = _add_gather(settings, random.Random(f"gather {seed}"), islands)
    elif wanted.strategy_name is not None:
        settings = {"strategy": wanted.strategy_name, **settings}
    else:
        schedule = _mode(settings, random.Random(f"mode {seed}"), wanted.mode_name)
    kinds = frozenset(kind for kind in KINDS if rng.random() < 0.6)
    others = random.Random(f"kinds {seed}")
    kinds |= {kind for kind in kinds_of_strategy if others.random() < 0.6}
    made = Scenario(
        seed=seed,
        islands=islands,
        rounds=rounds,
        settings=settings,
        schedule=schedule,
        data=_data(random.Random(f"data {seed}")),
        joiners=_joiners(random.Random(f"joiners {seed}"), rounds),
        kinds=kinds,
        loss=rng.choice((0.02, 0.05, 0.15)) if "loss" in kinds else 0.0,
        duplicate=rng.choice((0.02, 0.05, 0.15)) if "duplicate" in kinds else 0.0,
        delay_seconds=0.4 if "slow network" in kinds else 0.02,
        step_seconds=rng.choice((1.0, 3.0)),
        gap_seconds=rng.choice((1.5, 3.0, 6.0)),
        fault_seconds=rng.choice((30.0, 50.0, 70.0)),
    )
    if made.has("slow network") and made.step_seconds == 3.0 and settings["work"]["lease_seconds"]:
        # A shorter lease ends before a healthy island's contribution is in, again and again.
        settings["work"]["lease_seconds"] = 15.0
    return made


def _mode(settings: dict[str, Any], rng: random.Random, wanted: str | None) -> Schedule:
    """The mode and its settings, of a generator of its own: what else a seed draws stays."""
    drawn = rng.choice(("sync", "sync", "streaming", "streaming", "async"))
    mode = wanted or drawn
    settings.update(mode=mode)
    if mode == "async":
        return _add_async(settings, rng)
    if mode == "streaming":
        return _add_streaming(settings, rng)
    return Schedule(steps=settings["sync_every"])


def _add_streaming(settings: dict[str, Any], rng: random.Random) -> Schedule:
    """Fragments that travel beside the training, several at a time."""
    fragments, steps = rng.choice((1, 2, 2, 3, 3)), rng.choice((1, 2, 3))
    settings |= {
        "num_fragments": fragments,
        "fragment_pattern": "sequential",
        "sync_every": fragments * steps,
        "delay_steps": rng.randrange(fragments * steps),
        "local_weight": rng.choice((0.0, 0.0, 0.25, 0.5)),
    }
    delay, own = settings["delay_steps"], settings["local_weight"]
    return Schedule(steps=steps, turns=fragments, delay=delay, own=own)


def _add_async(settings: dict[str, Any], rng: random.Random) -> Schedule:
    """Contributions as they come: windows, bounds of staleness, steps by speed."""
    outer = {"optimizer": rng.choice(("delayed_nesterov", "delayed_nesterov", "nesterov", "sgd"))}
    delay = rng.choice((1, 2, 3, 4))
    settings |= {
        "sync_every": rng.choice((1, 2, 3)),
        "max_staleness": rng.choice((0, 1, 2, 8)),
        "staleness_weighting": rng.choice(("equal", "inverse_sqrt")),
        "dylu": rng.choice((False, True)),
        "outer": outer | ({"delay": delay} if outer["optimizer"] == "delayed_nesterov" else {}),
    }
    settings["membership"] |= {"quorum": 0, "grace_seconds": rng.choice((0.0, 0.5, 2.0, 5.0))}
    steps, bound = settings["sync_every"], settings["max_staleness"]
    return Schedule(steps=steps, bound=bound, collecting=1)


def _add_gather(settings: dict[str, Any], rng: random.Random, islands: int) -> Schedule:
    """Contributions by pull, from one server or two; of some runs not all islands are primaries."""
    least = settings["membership"]["min_workers"]
    decay = rng.choice((1.0, 0.95, 0.5))
    settings |= {
        "upload": {"codec": "topk", "error_feedback": rng.random() < 0.8, "decay": decay},
        "download": {"codec": "fp32"},
        "outer": {"optimizer": "sgd", "lr": rng.choice((0.5, 1.0))},
        "gather": {
            "primaries": rng.choice((0, 0, least, rng.randint(least, islands))),
            "primary_seconds": rng.choice((0.0, 0.0, 3.0, 8.0)),
            "pull_seconds": rng.choice((1.0, 4.0)),
            "keep": rng.choice((1, 2, 8)),
            "buckets": {name: {"url": "memory:"} for name in rng.choice((("a",), ("a", "b")))},
        },
    }
    return Schedule(steps=settings["sync_every"])


def _codec(name: str) -> dict[str, Any]:
    """Small blocks, so that the stand-in's few weights have several."""
    return {"codec": name, "block": 32} if name in _IN_BLOCKS else {"codec": name}


def _add_islands(settings: dict[str, Any], rng: random.Random) -> None:
    """What islands do beside training: evaluation, error feedback, rounding by chance."""
    settings["evaluate"] = {"every": rng.choice((0, 0, 1, 2))}
    upload = settings["upload"]
    feeds, rounding = rng.choice((True, True, False)), rng.choice(("nearest", "stochastic"))
    if upload["codec"] != "fp32":
        upload["error_feedback"] = feeds
    if upload["codec"] == "bf16":
        upload["rounding"] = rounding


def _joiners(rng: random.Random, rounds: int) -> tuple[tuple[str, int], ...]:
    """Some come before, some behind the others in worker_id order."""
    names = ("guest-0", "late-1")[: rng.choice((0, 0, 1, 1, 2))]
    return tuple((name, rng.randint(0, max(0, rounds - 3))) for name in names)


def _add_codecs(settings: dict[str, Any], rng: random.Random) -> None:
    """Codecs of fewer bits in place of some, of a generator of their own, as the mode is."""
    for way in ("upload", "download"):
        is_replaced = rng.random() < 0.6
        made = _codec(rng.choice(("bf16", "int8", "int4", "int4", "sign", "topk", "topk")))
        rounding = rng.choice(("nearest", "stochastic"))
        feedback = {"error_feedback": rng.random() < 0.8, "decay": rng.choice((1.0, 0.95, 0.5))}
        if made["codec"] in _BY_CHANCE:
            made["rounding"] = rounding
        if is_replaced:
            settings[way] = made | (feedback if way == "upload" else {})


def _work(rng: random.Random) -> dict[str, Any]:
    return {
        "units": rng.choice((1, 3, 8, 1024)),
        "policy": rng.choice(("exactly_once", "exactly_once", "at_most_once")),
        "lease_seconds": rng.choice((0.0, 0.0, 8.0, 15.0)),
        "stream_unit_rows": rng.choice((1, 5, 4096)),
    }


def _data(rng: random.Random) -> dict[str, Any]:
    """One dataset of many rows, of so few that epochs end, one without an end, or several."""
    kind = rng.choice(("long", "short", "short", "stream", "mixture"))
    if kind == "mixture":
        weights = rng.choice(((1, 1), (3, 1)))
        parts = [_dataset(f"part {i}", rng.choice(_SHORT)) for i in range(len(weights))]
        named = zip("ab", weights, parts, strict=True)
        return {
            "kind": "mixture",
            "block": BLOCK,
            "held_out_rows": 4,
            "datasets": [{"name": n, "weight": w, "identity": of} for n, w, of in named],
        }
    rows = {"long": 4096, "stream": 0}.get(kind, rng.choice(_SHORT))
    return _dataset("stand-in", rows)


def _dataset(kind: str, rows: int) -> dict[str, Any]:
    return {"kind": kind, "rows": rows, "block": BLOCK, "held_out_rows": 4}
