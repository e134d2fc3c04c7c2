"""Golden digests: the same bits on every CPU capability, thread count, tile size and process.

Run as a program it prints what one process computes; the tests start it once per capability. It
also computes what the tests of codecs and of compiled loops compare: starting torch and compiling
takes longer than all of it.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import atoll
from atoll.compiled import base
from atoll.layout import GROUP_ELEMENTS, Span
from atoll.optim.base import OuterOptimizer
from atoll.optim.settings import OuterSettings
from atoll.sums.fold import fold_tile
from tests.contract import test_codecs
from tests.integration import test_compiled

Floats = NDArray[np.float32]
ROOT = Path(__file__).parents[2]

# Above 2 * 32,768 elements torch splits a kernel over threads; the odd size leaves a ragged tail.
SIZE = 100_003
TILES = (4_099, 65_536, SIZE)
CODEC_TILES = (GROUP_ELEMENTS, 2 * GROUP_ELEMENTS)  # of the codecs' values: two tiles, one
THREADS = (1, 2)
SMALLEST = (base.FULL_TILE_ELEMENTS, 1)  # tiles for compiled loops: none here, all of them
STEPS = 3
WEIGHTS = (1, 7, 1, 3)
SETTINGS: dict[str, dict[str, float | int]] = {
    "sgd": {"lr": 0.3},
    "nesterov": {"lr": 0.7, "momentum": 0.9},
    "delayed_nesterov": {"lr": 0.7, "momentum": 0.9, "delay": 3},
    "adam": {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8},
}
GOLDEN = {
    "fold": "5ba7360ccce50a07fcc59ac9f316674a234187f2e2d4a1a2bd50ad331c84f12f",
    "sgd": "743e45ed9ee0dbd70a3a8f3d0e95295fd7ac4a7671125642772941dc11c3d514",
    "nesterov": "9824bda848cf5dd8b4a9ad6dbf76b3e7f35693b01e41fe837731ceaa1bc2e87c",
    "delayed_nesterov": "d2e71f73368ff5784004d886068e1e2b8fb7e616d55cefe30aca1763257244e9",
    "adam": "464d6ac03e2319596832a18e717fd3409fb67b4c5b11c8fb592e3e57060e1b0f",
}


def floats(key: int) -> Floats:
    """Random integers times random powers of two: exact, so the same on every machine.

    The raw words of Philox, since NumPy may change the methods that are built on them.
    """
    words = np.random.Philox(key=key).random_raw(SIZE)
    mantissas = (words >> np.uint64(40)).astype(np.float64) - 2**23
    exponents = (words % np.uint64(12)).astype(np.int32) - 32
    return np.ldexp(mantissas, exponents).astype(np.float32)


def deltas(step: int) -> list[Floats]:
    return [floats(1_000 * step + worker) for worker in range(len(WEIGHTS))]


def sha(*arrays: Floats) -> str:
    joined = hashlib.sha256()
    for array in arrays:
        joined.update(array.astype("<f4", copy=False).tobytes())
    return joined.hexdigest()


# --- what Atoll computes ---


def spans(tile: int) -> Iterator[Span]:
    return (Span(start, min(start + tile, SIZE)) for start in range(0, SIZE, tile))


def mean_tile(terms: Sequence[Tensor], span: Span) -> Tensor:
    cut = (term[span.start : span.stop] for term in terms)
    return fold_tile(zip(cut, WEIGHTS, strict=True), unit="tokens").mean()


def folded(rounds: Sequence[Sequence[Tensor]], tile: int) -> list[Tensor]:
    return [mean_tile(rounds[0], span) for span in spans(tile)]


def trained(optimizer: OuterOptimizer, rounds: Sequence[Sequence[Tensor]], tile: int) -> str:
    params = torch.from_numpy(floats(7))
    state = optimizer.init(SIZE)
    for step, terms in enumerate(rounds, start=1):
        for span in spans(tile):
            cut = slice(span.start, span.stop)
            views = {slot: buffer[cut] for slot, buffer in state.items()}
            optimizer.update(params[cut], mean_tile(terms, span), views, step=step)
    return sha(params.numpy(), *(buffer.numpy() for buffer in state.values()))


def fused(rounds: Sequence[Sequence[Tensor]]) -> str:
    """The same fold with `add(alpha=)`, which the CPU may round once or twice."""
    total = torch.zeros(SIZE)
    for delta, weight in zip(rounds[0], WEIGHTS, strict=True):
        total.add_(delta, alpha=weight / 10)
    return sha(total.numpy())


def measure() -> dict[str, object]:
    """Every digest of this process, under each number of threads and tile size."""
    rounds = [[torch.from_numpy(d) for d in deltas(step)] for step in range(1, STEPS + 1)]
    chosen = OuterSettings.model_validate
    optimizers = {
        name: chosen({"optimizer": name, **settings}).build() for name, settings in SETTINGS.items()
    }
    digests: dict[str, list[str]] = {name: [] for name in GOLDEN}
    base.compiled.prepare(base.LARGE_ELEMENTS)
    base.compiled.wait()
    of_others: dict[str, Any] = {
        "codecs": [],
        "loops": test_compiled.digests(),
        "wide": test_compiled.is_wide(),
    }
    for threads, smallest in product(THREADS, SMALLEST):
        torch.set_num_threads(threads)
        base.FULL_TILE_ELEMENTS = smallest
        of_others["codecs"] += [
            dict(line.split() for line in test_codecs.golden_lines(tile)) for tile in CODEC_TILES
        ]
        for tile in TILES:
            digests["fold"].append(sha(*(mean.numpy() for mean in folded(rounds, tile))))
            for name, optimizer in optimizers.items():
                digests[name].append(trained(optimizer, rounds, tile))
    return {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "digests": digests,
        "tiles": [sha(mean.numpy()) for mean in folded(rounds, TILES[0])],
        "fused": fused(rounds),
        "compiled": base.compiled.ready(SMALLEST[0]),
        **of_others,
    }


# --- the same by NumPy, whose float32 operations round as IEEE 754 asks ---


def numpy_mean(terms: Sequence[Floats], weights: Sequence[int]) -> Floats:
    total = terms[0] * np.float32(weights[0])
    for term, weight in zip(terms[1:], weights[1:], strict=True):
        total = total + term * np.float32(weight)
    return total / np.float32(sum(weights))


def zeros() -> Floats:
    return np.zeros(SIZE, np.float32)


def numpy_sgd() -> str:
    p = floats(7)
    for step in range(1, STEPS + 1):
        p = p - np.float32(0.3) * numpy_mean(deltas(step), WEIGHTS)
    return sha(p)


def numpy_nesterov() -> str:
    p, m = floats(7), zeros()
    lr, mu = np.float32(0.7), np.float32(0.9)
    for step in range(1, STEPS + 1):
        g = numpy_mean(deltas(step), WEIGHTS)
        m = mu * m + g
        ahead: Floats = g + mu * m
        p = p - lr * ahead
    return sha(p, m)


def numpy_delayed_nesterov() -> str:
    p, m, b = floats(7), zeros(), zeros()
    lr, mu, n = np.float32(0.7), np.float32(0.9), np.float32(3)
    for step in range(1, STEPS + 1):
        g = numpy_mean(deltas(step), WEIGHTS)
        p, b = p - lr * (g / n), b + g
        if step % 3 == 0:
            m = mu * m + b / n
            p, b = p - lr * (mu * m), zeros()
    return sha(p, m, b)


def numpy_adam() -> str:
    p, m, v = floats(7), zeros(), zeros()
    beta1, beta2 = 0.9, 0.99
    for step in range(1, STEPS + 1):
        g = numpy_mean(deltas(step), WEIGHTS)
        m = np.float32(beta1) * m + np.float32(1 - beta1) * g
        v = np.float32(beta2) * v + np.float32(1 - beta2) * (g * g)
        step_size = np.float32(0.01 / (1 - beta1**step))
        root_correction = np.float32(np.sqrt(1 - beta2**step))
        # A float64 root rounded to float32 is the correctly rounded one (53 >= 2 * 24 + 2).
        root = np.sqrt(v.astype(np.float64)).astype(np.float32)
        p = p - step_size * m / (root / root_correction + np.float32(1e-8))
    return sha(p, m, v)


REFERENCES: dict[str, Callable[[], str]] = {
    "fold": lambda: sha(numpy_mean(deltas(1), WEIGHTS)),
    "sgd": numpy_sgd,
    "nesterov": numpy_nesterov,
    "delayed_nesterov": numpy_delayed_nesterov,
    "adam": numpy_adam,
}


# --- tests ---


def start(capability: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "ATEN_CPU_CAPABILITY": capability,
        # Two processes with two threads each on few cores: waiting threads must not spin.
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONPATH": os.pathsep.join([str(Path(atoll.__file__).parents[1]), str(ROOT)]),
    }
    if capability == "default":  # for the compiled loops: no vectors but what every x86-64 has
        environment |= {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    return subprocess.Popen(
        [sys.executable, __file__], env=environment, stdout=subprocess.PIPE, text=True
    )


def has_avx2() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "avx2" in cpuinfo.read_text().split()


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, object]]:
    """What one process per capability prints; they run side by side."""
    capabilities = ["default", "avx2"] if has_avx2() else ["default"]
    running = {capability: start(capability) for capability in capabilities}
    printed = {name: process.communicate(timeout=120)[0] for name, process in running.items()}
    return {name: json.loads(text) for name, text in printed.items()}


@pytest.fixture(params=["default", "avx2"])
def process(request, measured, skip):
    if request.param not in measured:
        skip("this CPU has no avx2: its golden digests cannot be computed here")
    return measured[request.param], request.param


def test_process_runs_under_the_capability_it_was_asked_for(process):
    result, capability = process

    assert result["capability"] == capability.upper()
    assert result["compiled"]


@pytest.mark.parametrize("name", GOLDEN)
def test_digest_is_the_golden_one_for_every_thread_count_and_tile_size(process, name):
    result, _ = process

    assert result["digests"][name] == [GOLDEN[name]] * (len(THREADS) * len(SMALLEST) * len(TILES))


def test_codecs_give_golden_bits_for_every_thread_count_and_tile_size(process):
    result, _ = process

    times = len(THREADS) * len(SMALLEST) * len(CODEC_TILES)
    assert result["codecs"] == [test_codecs.GOLDEN] * times


def test_loops_give_the_same_bits_for_a_processor_without_vectors(measured, skip):
    if "avx2" not in measured:
        skip("this CPU has no avx2 to differ from")

    assert [measured[name]["wide"] for name in ("default", "avx2")] == [False, True]
    assert measured["default"]["loops"] == measured["avx2"]["loops"]


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_digest_is_that_of_plain_ieee_arithmetic(name):
    assert REFERENCES[name]() == GOLDEN[name]


def test_every_tile_of_the_fold_is_the_same_in_another_process(process):
    result, _ = process

    ours = folded([[torch.from_numpy(delta) for delta in deltas(1)]], TILES[0])

    assert [sha(tile.numpy()) for tile in ours] == result["tiles"]


def test_golden_digest_differs_when_the_terms_come_in_another_order():
    backwards = numpy_mean(deltas(1)[::-1], WEIGHTS[::-1])

    assert sha(backwards) != GOLDEN["fold"]


def test_fused_multiply_add_gives_other_bits_under_another_capability(measured, skip):
    if "avx2" not in measured:
        skip("this CPU has no avx2 to differ from")

    assert measured["default"]["fused"] != measured["avx2"]["fused"]


if __name__ == "__main__":
    print(json.dumps(measure()))
