"""One link, several threads: what breaks for one of them does not break the others."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from atoll.errors import CoordinatorUnreachable
from atoll.protocol.messages import Identity, InfoRequest
from atoll.wire.proto import transfer_pb2, transfer_pb2_grpc
from tests import served
from tests.clusters import Frame


class _BreakingPresence(transfer_pb2_grpc.TransferServicer):
    """A data plane that breaks presence streams off and takes uploads once it may."""

    def __init__(self) -> None:
        self.uploading = threading.Event()
        self.may_answer = threading.Event()

    def Presence(
        self, _: transfer_pb2.PresenceOpen, context: grpc.ServicerContext
    ) -> Iterator[transfer_pb2.PresenceState]:
        if not self.may_answer.is_set():
            context.abort(grpc.StatusCode.UNAVAILABLE, "reset")
        yield transfer_pb2.PresenceState()

    def Offset(
        self, _: transfer_pb2.UploadOpen, context: grpc.ServicerContext
    ) -> transfer_pb2.UploadOffset:
        return transfer_pb2.UploadOffset(offset=0)

    def Upload(
        self, parts: Iterator[transfer_pb2.UploadPart], context: grpc.ServicerContext
    ) -> transfer_pb2.Receipt:
        next(parts)
        self.uploading.set()
        assert self.may_answer.wait(served.WAIT_SECONDS)
        for _ in parts:
            pass
        return transfer_pb2.Receipt(receipt="in")


@pytest.fixture
def plane() -> Iterator[tuple[_BreakingPresence, int]]:
    service = _BreakingPresence()
    server = grpc.server(ThreadPoolExecutor(4))
    transfer_pb2_grpc.add_TransferServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield service, port
    service.may_answer.set()
    server.stop(None).wait()


def test_an_upload_goes_on_while_the_presence_stream_is_dialled_again(
    tmp_path: Path, plane: tuple[_BreakingPresence, int]
) -> None:
    service, port = plane
    with served.serving(tmp_path) as coordinator, ThreadPoolExecutor(1) as pool:
        coordinator.coordinator.transfer_port = port
        link = coordinator.link()
        info = link.send(InfoRequest())
        identity = Identity(
            run_id=info.run_id,
            manifest_sha256=info.manifest_sha256,
            worker_id="a",
            incarnation=1,
            island_key="0" * 64,
            generation=1,
        )
        frame = Frame(b"x" * (3 << 20), 64)
        upload = pool.submit(lambda: link.upload(identity, frame, before_commit=lambda: None))
        assert service.uploading.wait(served.WAIT_SECONDS)
        for _ in range(3):
            with pytest.raises(CoordinatorUnreachable):
                link.attend(identity)
        service.may_answer.set()
        assert upload.result(served.WAIT_SECONDS) == "in"
