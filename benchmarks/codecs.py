"""What each codec costs: bytes, time on one core with and without compiled loops, and error.

Tiles of 1 MiB, as a sync has them, of 16 MiB of values, encoded and decoded into memory that is
there. The best of several passes counts: other work on the machine only adds. The process keeps to
one core.

    python -m benchmarks.codecs [--json] [--passes 7]
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.codecs.base import Codec
from atoll.codecs.bf16.codec import Bf16
from atoll.codecs.fp32.codec import Fp32
from atoll.codecs.int4.codec import Int4
from atoll.codecs.int8.codec import Int8
from atoll.codecs.noise import Noise
from atoll.codecs.sign.codec import Sign
from atoll.codecs.topk.chunks import CHUNK, chunk_bytes
from atoll.codecs.topk.codec import TopK
from atoll.compiled.base import FULL_TILE_ELEMENTS, LARGE_ELEMENTS, compiled
from atoll.layout import ELEMENT_BYTES
from benchmarks.report import Bar, report, show

CODECS: list[Codec] = [
    Fp32(),
    Bf16(),
    Bf16(rounding="stochastic"),
    Int8(),
    Int8(rounding="stochastic"),
    Int4(),
    Int4(rounding="stochastic"),
    Sign(),
    TopK(),
]
TILES = 16
SIZE = TILES * FULL_TILE_ELEMENTS
NOISE = Noise(seed=1, round=1, lane="benchmark")


def drawn() -> dict[str, Tensor]:
    """Values as displacements may be: even, with long tails, and of chunks that differ in size."""
    rng = np.random.default_rng(0)
    gauss = rng.standard_normal(SIZE)
    # Every 4096 values have a size of their own, over five orders of magnitude.
    sizes = 10 ** rng.uniform(-5, 0, SIZE // CHUNK)
    made = {
        "gauss": gauss * 1e-3,
        "laplace": rng.laplace(size=SIZE) * 1e-3,
        "unequal": gauss * sizes.repeat(CHUNK),
    }
    return {name: torch.from_numpy(values.astype(np.float32)) for name, values in made.items()}


def speeds(codec: Codec, values: Tensor, *, passes: int) -> dict[str, float]:
    """GB/s of fp32 represented, each way."""
    payload = torch.empty(codec.encoded_bytes(FULL_TILE_ELEMENTS), dtype=torch.uint8)
    room = torch.empty(FULL_TILE_ELEMENTS)
    tiles = values.split(FULL_TILE_ELEMENTS)

    def encode() -> None:
        for tile in tiles:
            codec.encode(tile, noise=NOISE, first_group=0, out=payload)

    def decode() -> None:
        for _ in tiles:
            codec.decode(payload, FULL_TILE_ELEMENTS, out=room)

    nbytes = values.numel() * ELEMENT_BYTES
    return {
        "encode": nbytes / best_seconds(encode, passes=passes) / 1e9,
        "decode": nbytes / best_seconds(decode, passes=passes) / 1e9,
    }


def best_seconds(work: Callable[[], None], *, passes: int) -> float:
    found = []
    for _ in range(passes + 1):  # the first one warms up
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return min(found)


def error(codec: Codec, values: Tensor) -> dict[str, float]:
    """Squared error as a share of the squares: of all values, and of those that are sent."""
    payload = codec.encode(values, noise=NOISE, first_group=0)
    lost = (values - codec.decode(payload, values.numel())).double().square()
    squares = values.double().square()
    sent = codec.decode(payload, values.numel()) != 0
    return {
        "of_all": float(lost.sum() / squares.sum()),
        "of_sent": float(lost[sent].sum() / squares[sent].sum()),
    }


def measure(*, passes: int) -> dict[str, Any]:
    """By the codec's format: bytes, ratio, speeds, errors."""
    values = drawn()
    found: dict[str, Any] = {}
    for codec in CODECS:
        nbytes = codec.encoded_bytes(SIZE)
        found[codec.format] = {
            "bytes_per_value": nbytes / SIZE,
            "ratio": SIZE * ELEMENT_BYTES / nbytes,
            "plain_gb_per_s": speeds(codec, values["gauss"], passes=passes),
            "error": {name: error(codec, drawn) for name, drawn in values.items()},
        }
    compiled.prepare(LARGE_ELEMENTS)
    compiled.wait()
    assert compiled.ready(FULL_TILE_ELEMENTS), "numba is missing: pip install 'atoll[fast]'"
    for codec in CODECS:
        fast = speeds(codec, values["gauss"], passes=passes)
        found[codec.format]["compiled_gb_per_s"] = fast
    return found


def bars_of(found: dict[str, Any]) -> list[Bar]:
    def at_least(name: str, value: float, aim: float) -> Bar:
        return Bar(name, value, aim, at_least=True)

    fast = {name: result["compiled_gb_per_s"] for name, result in found.items()}
    return [
        at_least("int8, ratio to fp32", found["int8_256"]["ratio"], 3.9),
        at_least("int4, ratio to fp32", found["int4_128"]["ratio"], 7.5),
        Bar("topk, bytes of a chunk of 4096", chunk_bytes(CHUNK), 82),
        at_least("int8, encode (GB/s)", fast["int8_256"]["encode"], 1.0),
        at_least("int8, decode (GB/s)", fast["int8_256"]["decode"], 1.0),
        at_least("int4, encode (GB/s)", fast["int4_128"]["encode"], 1.0),
        at_least("int4, decode (GB/s)", fast["int4_128"]["decode"], 1.0),
        at_least("topk, encode (GB/s)", fast["topk_64"]["encode"], 0.3),
        at_least("topk, decode (GB/s)", fast["topk_64"]["decode"], 0.5),
    ]


def tell(found: dict[str, Any]) -> None:
    """A table for people."""
    line = "{:20} {:>7} {:>15} {:>15}   {}\n"
    head = ("codec", "ratio", "plain GB/s", "compiled GB/s", "squared error of what is sent, %")
    sys.stdout.write(line.format(*head))
    for name, result in found.items():
        both = [
            "{encode:6.2f} {decode:6.2f}".format(**result[f"{way}_gb_per_s"])
            for way in ("plain", "compiled")
        ]
        errors = ", ".join(f"{k} {100 * e['of_sent']:.2g}" for k, e in result["error"].items())
        sys.stdout.write(line.format(name, f"{result['ratio']:.2f}", *both, errors))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--passes", type=int, default=7)
    options = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    found = measure(passes=options.passes)
    if not options.json:
        tell(found)
    show(report(found, bars_of(found)), as_json=options.json)


if __name__ == "__main__":
    main()
