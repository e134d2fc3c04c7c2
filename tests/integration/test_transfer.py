"""The data plane over real gRPC: resumable, counted once, bounded in memory, typed in refusal."""

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from atoll import errors
from atoll.coordinator.planes import transfer
from atoll.errors import (
    Accident,
    AtollError,
    Conflict,
    ContributionError,
    CoordinatorUnreachable,
    Forbidden,
    FrameError,
    FrameTooLarge,
    LeaseLost,
    ManifestMismatch,
    ProtocolError,
    StoreError,
)
from atoll.island.link.base import Download, DownloadProgress
from atoll.wire import frame
from atoll.wire.proto import transfer_pb2
from tests import served
from tests.frames import ranges
from tests.ledgers import alone
from tests.served import SOCKET_SECONDS, BytesFrame, Served, Worker


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served.serving(tmp_path_factory.mktemp("transfer") / "state") as running:
        yield running


@pytest.fixture(scope="module")
def alice(coordinator: Served) -> Worker:
    """The only worker: each contribution of hers closes a round."""
    return coordinator.worker("alice")


def nothing() -> None:
    """What an island has left to do before the commit."""


def parts(opened: Any, *pieces: bytes, commit: bool = True) -> Iterator[transfer_pb2.UploadPart]:
    yield transfer_pb2.UploadPart(open=opened)
    for piece in pieces:
        yield transfer_pb2.UploadPart(data=piece)
    if commit:
        yield transfer_pb2.UploadPart(commit=True)


def upload(worker: Worker, *sent: transfer_pb2.UploadPart) -> str:
    """The receipt of a stream of exactly these parts; typed errors as an island gets them."""
    with served.typed_errors():
        reply = worker.served.stub().Upload(
            iter(sent), metadata=served.metadata(), timeout=SOCKET_SECONDS
        )
    return str(reply.receipt)


def offset_of(worker: Worker, source: BytesFrame) -> int:
    opened = served.upload_open(worker.identity(), source)
    return int(worker.served.stub().Offset(opened, metadata=served.metadata()).offset)


def download(worker: Worker, **changes: Any) -> tuple[transfer_pb2.DownloadOpen, bytes]:
    """The opening and all bytes of a download."""
    request = transfer_pb2.DownloadRequest(
        identity=served.proto_identity(worker.identity()), **changes
    )
    first, *rest = worker.served.stub().Download(request, metadata=served.metadata())
    return first.open, b"".join(part.data for part in rest)


def contributions(coordinator: Served, round_number: int) -> list[str]:
    found = alone(coordinator.ledger).contributions.of_round(round_number)
    return [record.sha256 for record in found]


# Uploads


def test_upload_gives_a_receipt_once_the_contribution_is_recorded(
    coordinator: Served, alice: Worker
) -> None:
    assignment = alice.assignment()
    source = alice.frame(assignment)

    receipt = alice.link.upload(alice.identity(), source, before_commit=nothing)

    assert len(receipt) == 64
    assert assignment.round is not None
    assert contributions(coordinator, assignment.round) == [source.sha256]


CUTS: dict[str, Callable[[BytesFrame], int]] = {
    "first byte": lambda _: 1,
    "inside the preamble": lambda source: len(source.preamble) - 1,
    "end of the preamble": lambda source: len(source.preamble),
    "inside a value": lambda source: len(source.preamble) + 4097,
    "inside the trailer": lambda source: source.nbytes - 1,
    "end": lambda source: source.nbytes,
}


@pytest.mark.parametrize("name", CUTS)
def test_broken_upload_resumes_at_its_offset_and_counts_once(
    coordinator: Served, alice: Worker, name: str
) -> None:
    assignment = alice.assignment()
    source = alice.frame(assignment)
    cut = CUTS[name](source)
    opened = served.upload_open(alice.identity(), source)
    counted = coordinator.coordinator.counters.counted["bytes_received"]

    with pytest.raises(FrameError, match=f"after {cut} bytes; resume there"):
        upload(alice, *parts(opened, source.data[:cut], commit=False))
    known = offset_of(alice, source)
    alice.link.upload(alice.identity(), source, before_commit=nothing)

    assert known == cut
    assert coordinator.coordinator.counters.counted["bytes_received"] - counted == source.nbytes
    assert assignment.round is not None
    assert contributions(coordinator, assignment.round) == [source.sha256]


def test_upload_resumes_after_the_connection_is_cut(
    coordinator: Served, alice: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = alice.frame()
    real = coordinator.coordinator.write_upload
    written = threading.Event()

    def write(*args: Any) -> None:
        real(*args)
        written.set()

    monkeypatch.setattr(coordinator.coordinator, "write_upload", write)
    hold = threading.Event()

    def stalling() -> Iterator[transfer_pb2.UploadPart]:
        yield from parts(
            served.upload_open(alice.identity(), source), source.data[:5000], commit=False
        )
        hold.wait(SOCKET_SECONDS)

    channel = coordinator.channel()
    call: Any = channel.stream_unary(
        "/atoll.v1.Transfer/Upload",
        request_serializer=transfer_pb2.UploadPart.SerializeToString,
        response_deserializer=transfer_pb2.Receipt.FromString,
    )
    future = call.future(stalling(), metadata=served.metadata())
    assert written.wait(SOCKET_SECONDS)

    channel.close()
    hold.set()
    known = offset_of(alice, source)
    receipt = alice.link.upload(alice.identity(), source, before_commit=nothing)

    assert future.exception() is not None
    assert known == 5000
    assert len(receipt) == 64


def test_accepted_contribution_answers_its_first_receipt_without_a_body(
    alice: Worker,
) -> None:
    source = alice.frame()
    first = alice.link.upload(alice.identity(), source, before_commit=nothing)

    again = upload(
        alice, transfer_pb2.UploadPart(open=served.upload_open(alice.identity(), source))
    )

    assert again == first


def test_island_sends_no_byte_of_a_contribution_that_was_accepted(alice: Worker) -> None:
    source = alice.frame()
    first = alice.link.upload(alice.identity(), source, before_commit=nothing)
    sent = alice.link.traffic.sent

    again = alice.link.upload(alice.identity(), source, before_commit=nothing)

    assert again == first
    assert alice.link.traffic.sent == sent


def test_other_bytes_under_the_same_key_are_a_conflict(coordinator: Served, alice: Worker) -> None:
    assignment = alice.assignment()
    first = alice.frame(assignment)
    other = alice.frame(assignment, loss_sum=2.0)
    alice.link.upload(alice.identity(), first, before_commit=nothing)

    with pytest.raises(Conflict):
        alice.link.upload(alice.identity(), other, before_commit=nothing)

    assert assignment.round is not None
    assert contributions(coordinator, assignment.round) == [first.sha256]


def test_island_begins_again_when_what_it_resumes_is_gone(
    coordinator: Served, alice: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = alice.frame()
    monkeypatch.setattr(coordinator.coordinator, "upload_offset", lambda _: 4000)

    receipt = alice.link.upload(alice.identity(), source, before_commit=nothing)

    assert len(receipt) == 64


def test_frame_that_is_bad_is_not_sent_over_and_over(coordinator: Served, alice: Worker) -> None:
    good = alice.frame()
    flipped = good.data[:-1] + bytes([good.data[-1] ^ 1])
    bad = BytesFrame(good.preamble, hashlib.sha256(flipped).hexdigest(), flipped)
    sent = alice.link.traffic.sent

    with pytest.raises(FrameError, match="damaged on the way"):
        alice.link.upload(alice.identity(), bad, before_commit=nothing)

    assert alice.link.traffic.sent - sent <= bad.nbytes


# What an upload refuses, before or while the body comes


class Case:
    """One worker's messages, each good unless it is changed."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.assignment = worker.assignment()
        self.good = worker.frame(self.assignment)

    def opened(self, **changes: Any) -> transfer_pb2.UploadPart:
        """The opening of an upload."""
        opened = served.upload_open(self.worker.identity(), self.good, **changes)
        return transfer_pb2.UploadPart(open=opened)

    def framed(self, **changes: Any) -> transfer_pb2.UploadPart:
        """The opening of an upload whose frame has another header."""
        source = self.worker.frame(self.assignment, **changes)
        return transfer_pb2.UploadPart(open=served.upload_open(self.worker.identity(), source))

    @property
    def data(self) -> transfer_pb2.UploadPart:
        return transfer_pb2.UploadPart(data=self.good.data)


COMMIT = transfer_pb2.UploadPart(commit=True)
NO_COMMIT = transfer_pb2.UploadPart(commit=False)
EMPTY = transfer_pb2.UploadPart()
NO_RUN = "another-run"
NO_SHA = "0" * 64
MANY = ranges(*((2 * row, 2 * row + 1) for row in range(1500)))
Sent = list[transfer_pb2.UploadPart]
REFUSED: dict[str, tuple[type[AtollError], Callable[[Case], Sent]]] = {
    "nothing at all": (FrameError, lambda _: []),
    "data first": (FrameError, lambda c: [c.data]),
    "commit first": (FrameError, lambda _: [COMMIT]),
    "an empty part": (FrameError, lambda c: [c.opened(), EMPTY, c.data, COMMIT]),
    "a second opening": (FrameError, lambda c: [c.opened(), c.opened(), c.data, COMMIT]),
    "commit without data": (FrameError, lambda c: [c.opened(), COMMIT]),
    "more than announced": (FrameTooLarge, lambda c: [c.opened(), c.data, c.data, COMMIT]),
    "a larger size": (FrameTooLarge, lambda c: [c.opened(nbytes=c.good.nbytes + 1)]),
    "an endless size": (FrameTooLarge, lambda c: [c.opened(nbytes=2**63)]),
    "a smaller size": (FrameError, lambda c: [c.opened(nbytes=c.good.nbytes - 1)]),
    "an offset nobody knows": (FrameError, lambda c: [c.opened(offset=77)]),
    "a name that is no hash": (FrameError, lambda c: [c.opened(sha256="x"), c.data, COMMIT]),
    "a name outside ASCII": (FrameError, lambda c: [c.opened(sha256="é" * 64), c.data, COMMIT]),
    "another name": (FrameError, lambda c: [c.opened(sha256=NO_SHA), c.data, COMMIT]),
    "no preamble": (FrameError, lambda c: [c.opened(preamble=b"")]),
    "a huge preamble": (FrameError, lambda c: [c.opened(preamble=b"x" * 100_000)]),
    "half a preamble": (FrameError, lambda c: [c.opened(preamble=c.good.preamble[:-1])]),
    "another body": (FrameError, lambda c: [c.opened(), transfer_pb2.UploadPart(data=b"x" * 300)]),
    "no identity": (ProtocolError, lambda c: [c.opened(identity=transfer_pb2.Identity())]),
    "another run's frame": (ManifestMismatch, lambda c: [c.framed(run_id=NO_RUN)]),
    "another manifest's": (ManifestMismatch, lambda c: [c.framed(manifest_sha256=NO_SHA)]),
    "another worker's frame": (Forbidden, lambda c: [c.framed(worker_id="bob")]),
    "a later life's frame": (Forbidden, lambda c: [c.framed(incarnation=99)]),
    "rows of others": (LeaseLost, lambda c: [c.framed(ranges=ranges((0, 1)), rows=1)]),
    "commit that says no": (FrameError, lambda c: [c.opened(), c.data, NO_COMMIT]),
    "commit that says no, then yes": (
        FrameError,
        lambda c: [c.opened(), c.data, NO_COMMIT, COMMIT],
    ),
    "data behind the commit": (FrameError, lambda c: [c.opened(), c.data, COMMIT, c.data]),
    "a second commit": (FrameError, lambda c: [c.opened(), c.data, COMMIT, COMMIT]),
    "an opening behind the commit": (
        FrameError,
        lambda c: [c.opened(), c.data, COMMIT, c.opened()],
    ),
    "a loss below 0": (ContributionError, lambda c: [c.framed(loss_sum=-1e-9)]),
    "a loss of no model": (ContributionError, lambda c: [c.framed(loss_sum=1.7e308)]),
    "very many rows": (LeaseLost, lambda c: [c.framed(ranges=MANY)]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_upload_is_refused_by_its_code_and_changes_nothing(
    coordinator: Served, alice: Worker, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    error, sent = REFUSED[name]
    messages = sent(Case(alice))
    before = coordinator.coordinator.state_hash()

    with pytest.raises(error) as raised:
        upload(alice, *messages)

    assert type(raised.value) is error
    assert coordinator.coordinator.state_hash() == before
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_name_that_is_no_hash_is_shown_with_what_it_names(alice: Worker) -> None:
    with pytest.raises(FrameError, match=r"^sha256='x' must be 64 .*: the name of the whole frame"):
        upload(alice, *REFUSED["a name that is no hash"][1](Case(alice)))


@pytest.mark.parametrize(
    ("name", "error"), [("no identity", ProtocolError), ("a larger size", FrameTooLarge)]
)
def test_refused_upload_is_counted_once(
    coordinator: Served, alice: Worker, name: str, error: type[AtollError]
) -> None:
    messages = REFUSED[name][1](Case(alice))
    before = coordinator.coordinator.counters.refusals[error.code]

    with pytest.raises(error):
        upload(alice, *messages)

    assert coordinator.coordinator.counters.refusals[error.code] == before + 1


def test_failure_on_the_islands_own_disk_ends_the_upload(alice: Worker) -> None:
    def sync() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        alice.link.upload(alice.identity(), alice.frame(), before_commit=sync)


def test_frame_that_was_cut_on_the_islands_disk_ends_the_upload(alice: Worker) -> None:
    good = alice.frame(loss_sum=3.0)

    class Cut(BytesFrame):
        def read(self, offset: int, nbytes: int) -> bytes:
            return super().read(offset, nbytes)[: max(0, 6000 - offset)]

    cut = Cut(good.preamble, good.sha256, good.data)

    with pytest.raises(StoreError, match="ends at byte 6000"):
        alice.link.upload(alice.identity(), cut, before_commit=nothing)


# Downloads


def test_download_is_a_whole_frame_of_the_current_version(
    coordinator: Served, alice: Worker
) -> None:
    alice.assignment()

    opened, data = download(alice)

    header, _ = frame.parse_preamble(data)
    current = coordinator.coordinator.weights.current
    assert (opened.offset, opened.nbytes, opened.version) == (0, len(data), current.version)
    assert header.result_digest == current.digests.published.root


@pytest.mark.parametrize("cut", [1, 11, 12, 1000, 4097, -33, -1, 0])
def test_download_resumes_at_any_byte_of_the_same_frame(alice: Worker, cut: int) -> None:
    alice.assignment()
    whole, data = download(alice)
    offset = cut % len(data) if cut else len(data)

    opened, rest = download(alice, tag=whole.tag, offset=offset)

    assert (opened.tag, opened.offset) == (whole.tag, offset)
    assert data[:offset] + rest == data


@pytest.mark.parametrize(
    ("tag", "offset"), [("weights-0-another", 7), ("", 7), (None, 10**9), (None, 2**63)]
)
def test_download_begins_again_when_it_cannot_be_resumed(
    alice: Worker, tag: str | None, offset: int
) -> None:
    alice.assignment()
    whole, data = download(alice)

    opened, again = download(alice, tag=whole.tag if tag is None else tag, offset=offset)

    assert opened.offset == 0
    assert again == data


def test_island_resumes_a_broken_download_where_it_was_cut(alice: Worker) -> None:
    alice.assignment()
    _, data = download(alice)
    taken = bytearray()
    progress = DownloadProgress()
    request = transfer_pb2.DownloadRequest(identity=served.proto_identity(alice.identity()))
    call = alice.served.stub().Download(request, metadata=served.metadata())
    opened = next(call).open
    taken += next(call).data[:3001]  # a proxy dies in the middle of a chunk
    call.cancel()
    progress.opened(opened.tag, 0)
    progress.offset = len(taken)

    alice.link.download(Download(alice.identity(), 0, "", progress, taken.extend))

    assert bytes(taken) == data
    assert progress.offset == len(data)


def test_download_of_a_spool_file_that_was_cut_is_refused_and_ends(
    coordinator: Served, alice: Worker
) -> None:
    alice.assignment()
    current = coordinator.coordinator.download(alice.identity(), round_number=0, have_digest="")
    whole = current.path.read_bytes()

    os.truncate(current.path, 5000)
    try:
        with pytest.raises(StoreError, match="ends at byte 5000"):
            alice.link.download(
                Download(alice.identity(), 0, "", DownloadProgress(), lambda _: None)
            )
    finally:
        current.path.write_bytes(whole)


# Bounds and garbage


def call_of(coordinator: Served, method: str, request: bytes, **options: Any) -> grpc.StatusCode:
    """The status of a unary call with these very bytes."""
    call: Any = coordinator.channel().unary_unary(f"/atoll.v1.Transfer/{method}")
    try:
        call(request, timeout=SOCKET_SECONDS, **{"metadata": served.metadata(), **options})
    except grpc.RpcError as error:
        found: Any = error
        code: grpc.StatusCode = found.code()
        return code
    return grpc.StatusCode.OK


def assert_serves(worker: Worker) -> None:
    source = worker.frame()
    assert len(worker.link.upload(worker.identity(), source, before_commit=nothing)) == 64


def test_message_beyond_the_limit_is_refused(coordinator: Served, alice: Worker) -> None:
    big = transfer_pb2.UploadOpen(preamble=b"x" * transfer.MAX_MESSAGE_BYTES)

    code = call_of(coordinator, "Offset", big.SerializeToString())

    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert_serves(alice)


def test_chunk_beyond_the_limit_is_refused(coordinator: Served, alice: Worker) -> None:
    source = alice.frame()
    opened = served.upload_open(alice.identity(), source)

    with pytest.raises(CoordinatorUnreachable, match="RESOURCE_EXHAUSTED"):
        upload(alice, *parts(opened, b"x" * (transfer.MAX_MESSAGE_BYTES + 1)))

    assert_serves(alice)


def test_metadata_bomb_is_refused(coordinator: Served, alice: Worker) -> None:
    metadata = (*served.metadata(), ("bomb", "x" * (1 << 20)))

    code = call_of(coordinator, "Offset", b"", metadata=metadata)

    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert_serves(alice)


@pytest.mark.parametrize("method", ["Offset", "Upload", "Download"])
def test_message_that_is_no_protobuf_is_refused_by_its_code(
    coordinator: Served, alice: Worker, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    streams = method == "Upload"
    channel = coordinator.channel()
    open_call: Any = channel.stream_stream if streams else channel.unary_stream
    call = open_call(f"/atoll.v1.Transfer/{method}")
    noise = b"\xff" * 100

    with pytest.raises(ProtocolError, match="is no message"), served.typed_errors():
        list(call(iter([noise]) if streams else noise, metadata=served.metadata()))

    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


GARBAGE = {
    "zeros": b"\x00" * 200,
    "a TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) * 2,
    "an HTTP/1 request": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "an SSH banner": b"SSH-2.0-OpenSSH_9.6\r\n",
    "a preface and noise": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 300,
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_closes_the_connection_and_the_next_one_is_served(
    coordinator: Served, alice: Worker, name: str
) -> None:
    served.knock(coordinator.address.transfer_port, GARBAGE[name])

    assert_serves(alice)


def test_garbage_and_strangers_write_no_log_lines(
    coordinator: Served, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.WARNING)

    for data in GARBAGE.values():
        served.knock(coordinator.address.transfer_port, data)
    codes = {call_of(coordinator, "Offset", b"\xff", metadata=()) for _ in range(20)}

    assert codes == {grpc.StatusCode.UNAUTHENTICATED}
    assert caplog.records == []
    assert capfd.readouterr().err == ""


# Errors cross the wire

TREE = errors.tree(AtollError)


@pytest.mark.parametrize("cls", TREE, ids=lambda cls: cls.code)
def test_every_error_comes_back_as_the_same_class(
    coordinator: Served, alice: Worker, monkeypatch: pytest.MonkeyPatch, cls: type[AtollError]
) -> None:
    def refuse(_: object) -> None:
        raise cls("name=3 breaks the rule; do that")

    source = alice.frame()
    monkeypatch.setattr(coordinator.coordinator, "upload_offset", refuse)

    with pytest.raises(AtollError) as raised:
        alice.link.upload(alice.identity(), source, before_commit=nothing)

    assert type(raised.value) is cls
    assert str(raised.value) == "name=3 breaks the rule; do that"


@pytest.mark.parametrize(
    ("method", "broken"),
    [("Offset", "upload_offset"), ("Upload", "begin_upload"), ("Download", "download")],
)
def test_unexpected_error_is_logged_and_its_text_stays_here(
    coordinator: Served,
    alice: Worker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
    broken: str,
) -> None:
    source = alice.frame()
    opened = served.upload_open(alice.identity(), source)
    requests: dict[str, Any] = {
        "Offset": opened,
        "Upload": parts(opened, source.data),
        "Download": transfer_pb2.DownloadRequest(identity=opened.identity),
    }

    def break_down(*_: object, **__: object) -> None:
        raise RuntimeError("password of /secret/path")

    monkeypatch.setattr(coordinator.coordinator, broken, break_down)

    call = getattr(coordinator.stub(), method)

    with pytest.raises(grpc.RpcError) as raised:
        list(call(requests[method], metadata=served.metadata()))

    found: Any = raised.value
    assert (found.code(), found.details()) == (grpc.StatusCode.INTERNAL, str(Accident()))
    assert dict(found.trailing_metadata())["atoll-code"] == "INTERNAL"
    [record] = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.exc_info is not None
    assert "password" in str(record.exc_info[1])


def test_island_tries_again_after_an_unexpected_error_of_the_coordinator(
    coordinator: Served, alice: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = alice.frame()

    def break_down(_: object) -> None:
        raise RuntimeError("password")

    monkeypatch.setattr(coordinator.coordinator, "upload_offset", break_down)

    with pytest.raises(CoordinatorUnreachable, match="an error of its own"):
        alice.link.upload(alice.identity(), source, before_commit=nothing)
