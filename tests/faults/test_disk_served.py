"""What the network sees of a disk that is full or fails: codes, reads and heartbeats, the end."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from atoll.coordinator.planes.access import Role
from atoll.errors import StorageFull
from atoll.island.link.base import Download, DownloadProgress
from atoll.protocol.messages import HeartbeatRequest, Ready, ReadyRequest, Status, StatusRequest
from tests import mounts, processes, served, strace
from tests.mounts import SmallDisk
from tests.processes import Cluster, eventually
from tests.served import BytesFrame, Served, Worker

DISK_BYTES = 4 << 20


def no_wait() -> None:
    """Nothing has to be done before a commit here."""


@dataclass(frozen=True)
class FullDisk:
    """A coordinator on a disk without room, a worker in an open round, and its contribution."""

    disk: SmallDisk
    coordinator: Served
    worker: Worker
    frame: BytesFrame

    def upload(self) -> str:
        link = self.worker.link
        return link.upload(self.worker.identity(), self.frame, before_commit=no_wait)

    def download(self) -> int:
        """Bytes of the present weights."""
        got = bytearray()
        identity = self.worker.identity()
        self.worker.link.download(Download(identity, 0, "0" * 64, DownloadProgress(), got.extend))
        return len(got)

    def health(self) -> httpx.Response:
        return httpx.get(f"{self.coordinator.url}/health", trust_env=False)

    def status(self) -> Status:
        return self.worker.link.send(StatusRequest())

    def ready(self) -> Ready:
        return self.worker.link.send(ReadyRequest(min_workers=1))


@pytest.fixture
def full(tmp_path: Path, skip) -> Iterator[FullDisk]:
    """With one upload refused, by which the coordinator knows."""
    with (
        mounts.small_disk(tmp_path / "disk", skip, nbytes=DISK_BYTES) as disk,
        served.serving(disk.path / "state") as coordinator,
    ):
        worker = coordinator.worker("a")
        made = FullDisk(disk, coordinator, worker, worker.frame())
        made.download()  # its frame is on the disk from now on
        disk.fill()
        with pytest.raises(StorageFull, match="no room"):
            made.upload()
        yield made


def test_upload_without_room_is_refused_by_the_table(full: FullDisk) -> None:
    """gRPC's RESOURCE_EXHAUSTED and HTTP's 507, each with the code that islands repeat."""
    with pytest.raises(StorageFull) as caught:
        full.upload()

    assert caught.value.retry
    assert full.status().refusals["STORAGE_FULL"] >= 2


def test_registration_without_room_is_refused_with_507(full: FullDisk) -> None:
    late = Worker(full.coordinator, "b")

    answer = httpx.post(
        f"{full.coordinator.url}/workers/register",
        json=late.registration().model_dump(mode="json"),
        headers={"authorization": f"Bearer {served.TOKENS[Role.WORKER]}"},
        trust_env=False,
    )

    assert answer.status_code == 507
    assert answer.json()["code"] == "STORAGE_FULL"
    assert answer.json()["retry"] is True


def test_reads_and_heartbeats_go_on_without_room(full: FullDisk) -> None:
    reply = full.worker.link.send(HeartbeatRequest(identity=full.worker.identity()))

    assert reply.generation == full.worker.identity().generation
    assert full.download() > full.coordinator.coordinator.layout.size * 4
    assert full.worker.assignment().round == 1


def test_coordinator_without_room_says_so(full: FullDisk) -> None:
    health = full.health()

    assert health.status_code == 507
    assert health.json()["code"] == "STORAGE_FULL"
    assert "no room" in full.status().storage_full
    assert "'/" not in full.status().storage_full  # where it lies no worker learns
    assert not full.ready().ready


def test_coordinator_goes_on_when_there_is_room(full: FullDisk) -> None:
    full.disk.free()

    eventually("room", lambda: not full.status().storage_full)
    receipt = full.upload()

    eventually("the round", lambda: full.status().version == 1)
    assert full.health().status_code == 200
    assert full.ready().ready
    assert full.upload() == receipt


def test_failed_sync_ends_a_serving_coordinator(tmp_path: Path, skip) -> None:
    """Exit code 74 and a sentence, one sync of that file and no other; its next life completes."""
    strace.require(skip)
    with Cluster(tmp_path, processes.BF16) as cluster:
        coordinator, next_life = cluster.serve(), cluster.prepare_coordinator("none@0")
        wal = cluster.directory / "ledger.sqlite-wal"
        trace = tmp_path / "trace"
        with strace.attached(
            coordinator.pid,
            trace,
            calls=["fsync", "fdatasync"],
            inject="error=EIO:when=1",
            follow=True,
            paths=[wal, cluster.directory / "ledger.sqlite"],
        ):
            cluster.join_all()
            code = coordinator.wait(timeout_seconds=processes.LIMIT_SECONDS)
        said = coordinator.log_tail()
        finished = cluster.finish(cluster.take_over(next_life))

    assert code == 74
    assert "DISK_FAILED" in said
    assert len(strace.calls(trace)) == 1, trace.read_text()
    assert strace.was_injected(trace)
    assert len(finished.records.rounds) == processes.ROUNDS
    assert processes.audit(finished.directory)["clean"]
