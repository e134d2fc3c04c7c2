"""What a gather's validation costs: 20 objects of 25 M parameters, with their norms, on one core.

    python -m benchmarks.gather_validate [--json] [--passes 5]

The best pass counts: other work on the machine only adds. Signatures are in it; downloads are not.
"""

import argparse
import hashlib
import time
from typing import Any

import torch

from atoll.codecs.topk.codec import TopK
from atoll.compiled.base import compiled
from atoll.gather import statement as statements
from atoll.gather import validate
from atoll.gather.keys import SecretKey
from atoll.gather.statement import Statement
from atoll.gather.validate import Expected
from atoll.layout import Layout
from atoll.wire.frame import FrameWriter
from atoll.wire.header import Told
from benchmarks.report import Bar, report, show

PEERS, PIECE_BYTES = 20, 256 << 10
SECONDS_AIM = 0.6  # of the 3 s for validating, comparing and applying
KEY = SecretKey(bytes(range(32)))
# 25 M parameters: matrices, and small ones beside them that share chunks.
LAYOUT = Layout.of(
    [
        ("embed", (50_000, 192), "float32"),
        *(
            (f"{block}.{name}", shape, "float32")
            for block in range(31)
            for name, shape in (("matrix", (700, 700)), ("bias", (701,)), ("norm", (13,)))
        ),
        ("head", (187_866,), "float32"),
    ]
)


def made(seed: int) -> tuple[Expected, bytes, bytes]:
    """What is expected, the signed statement and the frame of one peer."""
    uid, digest = f"peer-{seed:02d}", "0" * 64
    told = Told(
        kind="contribution",
        run_id="benchmark",
        manifest_sha256=digest,
        round=1,
        worker_id=uid,
        incarnation=1,
        base_digest=digest,
    )
    values = torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(seed)) * 1e-3
    data = bytearray()
    writer = FrameWriter(told.header(LAYOUT, TopK()), data.extend)
    writer.payload(TopK().encode(values, noise=None, first_group=0).numpy().tobytes())
    writer.finish()
    expected = Expected(
        run_id="benchmark",
        manifest_sha256=digest,
        uid=uid,
        window=1,
        base_digest=digest,
        layout=LAYOUT,
        codec=TopK(),
    )
    statement = Statement(
        run_id="benchmark",
        manifest_sha256=digest,
        uid=uid,
        window=1,
        base_digest=digest,
        sample_digest=digest,
        nbytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
    )
    return expected, statements.signed(statement, KEY), bytes(data)


def validated(expected: Expected, document: bytes, data: bytes) -> None:
    validator = validate.begin(expected, document, KEY.public)
    for start in range(0, len(data), PIECE_BYTES):
        validator.feed(memoryview(data)[start : start + PIECE_BYTES])
    validator.finish()


def measure(*, passes: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    compiled.prepare(LAYOUT.size)
    compiled.wait()
    peers = [made(seed) for seed in range(PEERS)]
    taken = []
    for _ in range(passes):
        begun = time.process_time()
        for peer in peers:
            validated(*peer)
        taken.append(time.process_time() - begun)
    return {
        "parameters": LAYOUT.size,
        "peers": PEERS,
        "object_bytes": len(peers[0][2]),
        "seconds": min(taken),
        "seconds_of_all_passes": taken,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--passes", type=int, default=5)
    asked = parser.parse_args()
    found = measure(passes=asked.passes)
    bars = [Bar("20 x 25 M validated with norms, seconds", found["seconds"], SECONDS_AIM)]
    show(report(found, bars), as_json=asked.json)


if __name__ == "__main__":
    main()
