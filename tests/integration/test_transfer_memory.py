"""A large model on its way: neither side ever holds a whole payload."""

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.compiled.base import compiled
from atoll.island.link.base import Download, DownloadProgress
from atoll.island.state.store import StoredFrame
from atoll.wire import body, chunks, frame
from tests import served
from tests.served import Served, Worker

PYTHON_BYTES = 16 << 20  # what may be allocated at the peak of any transfer, on both sides together


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model of 31 MB; a second worker keeps the round open."""
    model = {"architecture": "gpt", "vocab": 256, "block": 8, "layers": 1, "heads": 1, "width": 800}
    with served.serving(
        tmp_path_factory.mktemp("large") / "state", model=model, membership={"min_workers": 2}
    ) as running:
        running.worker("idle")
        compiled.wait()  # what loading numba takes is not a transfer's
        yield running


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def peak_above(before: int) -> int:
    return tracemalloc.get_traced_memory()[1] - before


def stored_frame(worker: Worker, path: Path) -> StoredFrame:
    """A good contribution, written to a file piece by piece."""
    header = worker.header(worker.assignment())
    piece = bytes(1 << 20)
    with path.open("wb") as file:
        writer = body.begin(header, file)
        for start in range(0, header.payload_bytes, len(piece)):
            writer.payload(piece[: header.payload_bytes - start])
        sha256 = writer.finish()
    return StoredFrame(path, preamble=frame.preamble(header), sha256=sha256)


def test_large_upload_never_holds_a_whole_payload(
    large: Served, tmp_path: Path, traced: None
) -> None:
    carol = large.worker("carol")
    source = stored_frame(carol, tmp_path / "frame")
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]

    try:
        carol.link.upload(carol.identity(), source, before_commit=lambda: None)
    finally:
        source.close()

    assert source.nbytes > 30_000_000
    assert peak_above(before) < PYTHON_BYTES


def test_large_download_never_holds_a_whole_payload(large: Served, traced: None) -> None:
    dave = large.worker("dave")
    progress = DownloadProgress()
    largest = []
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]

    dave.link.download(
        Download(dave.identity(), 0, "", progress, lambda data: largest.append(len(data)))
    )

    assert progress.offset > 30_000_000
    assert max(largest) == chunks.CHUNK_BYTES
    assert peak_above(before) < PYTHON_BYTES
