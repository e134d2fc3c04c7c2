"""A sharded run's coordinator never holds the model: its resident memory, in a real process.

One rank, made by hand over the network, fetches the initial weights and uploads its part of a
checkpoint, which is three models long; then `atoll export` streams it into a file. What is compared
is the same process with a model of nothing.
"""

import hashlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from atoll.island.link.network import NetworkLink
from atoll.island.link.rank import Part
from atoll.launch import local, state
from atoll.launch.local import LocalCoordinator
from atoll.protocol.messages import Identity, Info, InfoRequest, RegisterRequest
from atoll.protocol.sharded import GroupReply, GroupRequest, HeldSave, PartReport, SaveReport
from atoll.strategies.sharded.saves import Chunks
from atoll.versions import recorded
from tests.ledgers import alone
from tests.processes import LIMIT_SECONDS, TOKENS

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("coordinator-memory")]

SPARE_BYTES = 32 << 20  # pieces under way, code that is loaded at its first use
PIECE_BYTES = 8 << 20
KEY = "7" * 64
WIDTHS = {"tiny": (8, 1), "large": (512, 10)}  # width and layers
RUN_FILE = """
name = "memory"
strategy = "sharded"
heartbeat_timeout = 600.0
[model]
architecture = "gpt"
vocab = 64
block = 8
layers = {layers}
heads = 1
width = {width}
[data]
kind = "synthetic"
seed = 1
rows = 100
held_out_rows = 4
block = 8
vocab = 64
[inner]
batch = 2
[sharded]
save_every = 1
checkpoint_every = 1
[membership]
min_workers = 1
[evaluate]
every = 0
[stop]
rounds = 5
"""
EXPORT = """
import json, sys
from atoll.cli.app import app

def highest():
    [line] = [one for one in open("/proc/self/status") if one.startswith("VmHWM")]
    return int(line.split()[1]) * 1024

found = []
for directory, path in zip(sys.argv[1::2], sys.argv[2::2]):
    app(["export", directory, "-o", path], standalone_mode=False)
    found.append(highest())
kept = b"x" * (found[-1] - found[0] + (64 << 20))  # the control: what is held is seen
found.append(highest())
print(json.dumps(found))
"""


@dataclass
class Served:
    """A coordinator and the most that it ever held."""

    process: LocalCoordinator
    directory: Path
    at_start: int = 0

    @property
    def highest(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        [line] = [one for one in status.splitlines() if one.startswith("VmHWM")]
        return int(line.split()[1]) * 1024


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Served]]:
    """Two coordinators that have drawn their initial weights."""
    home, served = tmp_path_factory.mktemp("memory"), dict[str, Served]()
    with ExitStack() as held:
        for name, (width, layers) in WIDTHS.items():
            file = home / f"{name}.toml"
            file.write_text(RUN_FILE.format(width=width, layers=layers))
            process = local.start_coordinator(file, home / name, tokens=TOKENS)
            held.callback(process.kill)
            served[name] = Served(process, home / name)
        for one in served.values():
            one.process.wait_ready(timeout_seconds=LIMIT_SECONDS)
            one.at_start = one.highest
        yield served


class Alone:
    """The only rank of a run; it only speaks."""

    def __init__(self, url: str) -> None:
        self.link = NetworkLink(url, token=TOKENS.worker)
        info = self.link.send(InfoRequest())
        assert isinstance(info, Info)
        self._listens = socket.create_server(("127.0.0.1", 0))
        reply = self.link.send(
            RegisterRequest(
                run_id=info.run_id,
                manifest_sha256=info.manifest_sha256,
                worker_id="alone",
                island_key=KEY,
                ip_address="127.0.0.1",
                port=self._listens.getsockname()[1],
                layout_digest=info.model_hash,
                data_identity=info.data.identity,
            )
        )
        self.identity = Identity(
            run_id=info.run_id,
            manifest_sha256=info.manifest_sha256,
            worker_id="alone",
            island_key=KEY,
            incarnation=reply.incarnation,
            generation=reply.generation,
        )
        layout = recorded.layout_of(info.manifest())
        self.model_bytes = layout.nbytes
        self.tokens = info.inner.batch * int(info.data.identity["block"])

    def group(self) -> GroupReply:
        measured = 0
        while True:
            reply = self.link.send(
                GroupRequest(identity=self.identity, measured=measured, wait_seconds=5.0)
            )
            if reply.action == "train":
                return reply
            measured = reply.group if reply.action == "measure" else measured

    def restored(self, group: GroupReply) -> int:
        """How many bytes of the initial weights came."""
        assert group.restore is not None
        came = 0
        for start in range(0, self.model_bytes, PIECE_BYTES):
            nbytes = min(PIECE_BYTES, self.model_bytes - start)
            offset = group.restore.offset + start
            blob = group.restore.parts[0]
            came += len(self.link.fetch(self.identity, blob, offset=offset, nbytes=nbytes))
        return came

    def checkpoint(self, group: GroupReply) -> None:
        """Saves zeros as step 1 and hands them in; returns when they are recorded."""
        nbytes = 3 * self.model_bytes
        chunks = Chunks.of(bytes(min(PIECE_BYTES, nbytes - at)) for at in self._pieces(nbytes))
        digest = hashlib.sha256()
        for at in self._pieces(nbytes):
            digest.update(bytes(min(PIECE_BYTES, nbytes - at)))
        held = HeldSave(step=1, group=group.group, rank=0, own=chunks.root, predecessor=chunks.root)
        self.link.send(SaveReport(identity=self.identity, save=held))
        part = Part(
            group=group.group,
            round=1,
            root=chunks.root,
            sha256=digest.hexdigest(),
            nbytes=nbytes,
            read=lambda _, count: bytes(count),
            close=lambda: None,
        )
        self.link.upload_part(self.identity, part)
        report = PartReport(
            identity=self.identity,
            group=group.group,
            round=1,
            step=1,
            part=chunks.root,
            blob=part.sha256,
            loss_sum=1.0,
            tokens=self.tokens,
            wait_seconds=20.0,
        )
        while not self.link.send(report).committed:
            pass

    def close(self) -> None:
        self.link.close()
        self._listens.close()

    @staticmethod
    def _pieces(nbytes: int) -> range:
        return range(0, nbytes, PIECE_BYTES)


def live(served: Served) -> int:
    """A group of one, its restore and its first checkpoint; the model's bytes."""
    rank = Alone(served.process.url)
    try:
        group = rank.group()
        assert rank.restored(group) == rank.model_bytes
        rank.checkpoint(group)
        return rank.model_bytes
    finally:
        rank.close()


def test_coordinator_and_export_never_hold_the_model(pair: dict[str, Served]) -> None:
    tiny, large = pair["tiny"], pair["large"]
    started = large.at_start - tiny.at_start

    live(tiny)
    model_bytes = live(large)
    grown = large.highest - tiny.highest
    for served in (tiny, large):
        served.process.terminate()
        served.process.wait(timeout_seconds=LIMIT_SECONDS)
    files = [word for s in (tiny, large) for word in (s.directory, s.directory / "x.safetensors")]
    done = subprocess.run(
        [sys.executable, "-c", EXPORT, *map(str, files)],
        check=True,
        capture_output=True,
        text=True,
    )
    *exported, control = json.loads(done.stdout.splitlines()[-1])
    print(f"start {started:,}, checkpoint {grown:,}, export {exported[1] - exported[0]:,}")

    assert model_bytes > 100_000_000
    assert max(started, grown, exported[1] - exported[0]) < SPARE_BYTES
    assert control - exported[1] > SPARE_BYTES
    with state.at_rest(large.directory) as (ledger, _):
        [recorded_one] = alone(ledger).checkpoints.all()
        assert recorded_one.step == 1
    assert (large.directory / "x.safetensors").stat().st_size > model_bytes
