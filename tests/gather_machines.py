"""A gather as it is run: file, peers, a real S3 server behind a proxy, ranks as processes."""

import json
import multiprocessing
import socket
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from atoll.blobs.s3_bucket import S3Bucket
from atoll.clock import SystemClock
from atoll.codecs.topk.codec import TopK
from atoll.gather.keys import SecretKey
from atoll.launch import gather_file, gather_publish
from atoll.layout import Layout
from tests import gather_reference as naive
from tests import gathers, servers
from tests.processes import LIMIT_SECONDS, eventually
from tests.ranks import gather_window
from tests.ranks.gather_window import Fall, Told, access
from tests.s3_proxy import S3Proxy

CLOCK = SystemClock()
# Four tiles, the last one short; an object of two pieces; small tensors that share chunks.
SIZES = (300_000, 5, 450_000, 64, 3_000, 150_001)
NAMES = [f"p{k}" for k in range(len(SIZES))]
LAYOUT = Layout.of((name, (size,), "float32") for name, size in zip(NAMES, SIZES, strict=True))
LR = 0.3
PRIMARIES, RESERVES = ("10", "11", "7", "8", "9"), ("r0", "r1")
WEIGHTS = {uid: 1 + k % 3 for k, uid in enumerate((*PRIMARIES, *RESERVES))}
_SEEDS = {uid: 4 + k for k, uid in enumerate((*PRIMARIES, *RESERVES))}


def displacement(uid: str) -> Tensor:
    seed = _SEEDS[uid]
    return gathers.displacement(seed, scale=2.0 ** (seed % 5 - 8), size=LAYOUT.size)


@cache
def payload(uid: str) -> bytes:
    return TopK().encode(displacement(uid), noise=None, first_group=0).numpy().tobytes()


@cache
def expected(uids: tuple[str, ...]) -> Tensor:
    """What the reference makes of these peers."""
    given = {uid: naive.Peer(payload(uid), WEIGHTS[uid]) for uid in uids}
    start = gathers.start(LAYOUT)
    found = naive.window(given, SIZES, list(start.numpy()), lr=LR)
    return torch.from_numpy(np.array(found.weights, np.float32))


@dataclass
class Machine:
    """One run in a folder of the server's bucket; all states of it see the same objects."""

    home: Path
    url: str
    proxy: S3Proxy
    seconds: float = 20.0
    patience_seconds: float = 0.3
    keys: dict[str, SecretKey] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder = f"gather-{uuid.uuid4().hex[:12]}"
        self.home.mkdir(parents=True, exist_ok=True)
        views = LAYOUT.views(gathers.start(LAYOUT))
        save_file({name: one.clone() for name, one in views.items()}, self.home / "start")
        for number, uid in enumerate((*PRIMARIES, *RESERVES, "group")):
            self.keys[uid] = SecretKey(bytes([number]) * 32)
            self.keys[uid].save(self.home / f"{uid}.key")

    def file(self, state: str) -> Path:
        """The gather file of a group with a state, and an archive, of its own."""

        def listed(kind: str, uids: Sequence[str]) -> str:
            return "".join(
                f'[[{kind}]]\nuid = "{uid}"\nkey = "{self.keys[uid].public.hex}"\n'
                f'bucket = "main"\nprefix = "{self.folder}/{uid}"\n'
                for uid in uids
            )

        weights = "".join(f'"{uid}" = {weight}\n' for uid, weight in WEIGHTS.items())
        path = self.home / f"{state}.toml"
        path.write_text(
            f'run_id = "faults"\nstart = "start"\nstate = "{state}"\nouter_lr = {LR}\n'
            f"seconds = {self.seconds}\npatience_seconds = {self.patience_seconds}\n"
            f'memory_mb = 64\n[buckets]\nmain = "s3://{servers.BUCKET}"\n'
            f'[archive]\nbucket = "main"\nprefix = "{self.folder}/archive-{state}"\n'
            f'key = "{self.keys["group"].public.hex}"\nsecret = "group.key"\n'
            f"{listed('primaries', PRIMARIES)}{listed('reserves', RESERVES)}[weights]\n{weights}"
        )
        return path

    def publish(self, *uids: str) -> None:
        """As `atoll gather publish` does, straight to the server."""
        file = gather_file.load(self.file("peers"))
        for uid in uids:
            path = self.home / "displacement"
            views = LAYOUT.views(displacement(uid))
            save_file({name: one.clone() for name, one in views.items()}, path)
            gather_publish.publish(
                file,
                uid,
                path,
                secret=self.home / f"{uid}.key",
                sample_digest="5" * 64,
                clock=CLOCK,
                s3=access(self.url),
            )

    def bucket(self) -> S3Bucket:
        """The server's bucket, past the proxy; close it."""
        return S3Bucket(servers.BUCKET, access(self.url), CLOCK)

    def start(
        self, size: int, *, state: str, fall: Fall | None = None, timeout_seconds: float = 60.0
    ) -> "Group":
        """Begins the next window of a state with so many ranks."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([gather_window.__name__])
        out = self.home / f"out-{uuid.uuid4().hex[:8]}"
        out.mkdir()
        with socket.create_server(("127.0.0.1", 0)) as unused:
            port = unused.getsockname()[1]
        started = []
        for rank in range(size):
            told = Told(
                rank=rank,
                size=size,
                port=port,
                file=str(self.file(state)),
                out=str(out),
                endpoint=self.proxy.port(rank),
                timeout_seconds=timeout_seconds,
                fall=asdict(fall) if fall is not None and fall.rank == rank else None,
            )
            process = context.Process(
                target=gather_window.process, args=(told.as_json(),), daemon=True
            )
            process.start()
            started.append(process)
        return Group(started, out)

    def run(self, size: int, *, state: str, **options: Any) -> dict[int, dict[str, Any]]:
        """What each rank that did not fall found or met."""
        return self.start(size, state=state, **options).ended()

    def weights(self, state: str, window: int = 1) -> Tensor:
        """What a state's disk has before a window."""
        data = (self.home / state / "weights" / f"{window:08d}.f32").read_bytes()
        return torch.frombuffer(bytearray(data), dtype=torch.float32)


@dataclass
class Group:
    """Ranks that run."""

    processes: list[Any]
    out: Path

    def ended(self) -> dict[int, dict[str, Any]]:
        """Waits for all that did not fall; the others are killed if they are only stopped."""
        try:
            for rank, process in enumerate(self.processes):
                eventually(f"the end of rank {rank}", partial(self._is_over, rank, process))
        finally:
            for process in self.processes:
                process.kill()
                process.join(LIMIT_SECONDS)
        return {
            rank: json.loads(path.read_text())
            for rank in range(len(self.processes))
            if (path := self.out / f"{rank}.json").exists()
        }

    def fell(self, rank: int) -> str:
        """The point at which a rank fell."""
        return (self.out / f"fell-{rank}").read_text()

    def _is_over(self, rank: int, process: Any) -> bool:
        return (self.out / f"fell-{rank}").exists() or not process.is_alive()
