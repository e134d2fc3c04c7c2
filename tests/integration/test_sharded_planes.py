"""A sharded run over both planes: groups by HTTP, parts and ranges by gRPC, and the commands."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from safetensors.torch import load_file, save_file

from atoll import config
from atoll.client.http import HttpClient
from atoll.clock import ManualClock, SystemClock
from atoll.coordinator import boot
from atoll.coordinator.planes import access
from atoll.coordinator.planes.access import Access, Role
from atoll.coordinator.planes.server import Listen, Server
from atoll.coordinator.sharded.service import ShardedCoordinator
from atoll.errors import (
    BlobMissing,
    ConfigError,
    FrameError,
    FrameTooLarge,
    ProtocolError,
    StaleGroup,
)
from atoll.layout import byte_view
from atoll.ledger.ledger import Ledger
from atoll.models import init
from atoll.proof import export as exporting
from atoll.protocol.messages import Info, InfoRequest, StatusRequest
from atoll.protocol.sharded import BoundaryRequest, GroupReply, PartReport
from atoll.sums import digest as digests
from atoll.versions import recorded, weights
from atoll.wire import chunks, rpc
from atoll.wire.proto import transfer_pb2
from atoll.wire.transfer_calls import TransferCalls
from tests import clusters, served
from tests.hand_ranks import HandRank, Sea, initial, state_at
from tests.ledgers import alone
from tests.unit.test_from_config import CONFIGS

WAIT_SECONDS = 20.0


@dataclass
class Open:
    """Both planes of a sea, as a rank holds them."""

    client: HttpClient
    calls: TransferCalls
    metadata: tuple[tuple[str, str], ...]


@contextmanager
def serving(sea: Sea) -> Iterator[Open]:
    hashes = {role.value: access.token_hash(token) for role, token in served.TOKENS.items()}
    server = Server(
        sea.coordinator, Access(hashes), SystemClock(), listen=Listen(port=0, stay=True)
    )
    with served.running(server, threading.Event()) as address:
        token = served.TOKENS[Role.WORKER]
        client = HttpClient(f"http://127.0.0.1:{address.port}", token=token)
        channel = grpc.insecure_channel(f"127.0.0.1:{address.transfer_port}")
        try:
            yield Open(client, TransferCalls(channel), (("authorization", f"Bearer {token}"),))
        finally:
            channel.close()
            client.close()


@pytest.fixture
def sea(tmp_path):
    made = Sea(tmp_path / "sea", {"heartbeat_timeout": 600.0})
    yield made
    made.close()


def opened(rank: HandRank, **changes: Any) -> transfer_pb2.PartOpen:
    made = rank.request(1, **changes)
    return transfer_pb2.PartOpen(
        identity=transfer_pb2.Identity(**made.identity.model_dump()),
        group=made.group,
        round=made.round,
        sha256=made.sha256,
        nbytes=made.nbytes,
        offset=made.offset,
    )


def pieces(rank: HandRank, data: bytes, **changes: Any) -> Iterator[Any]:
    yield transfer_pb2.PartPiece(open=opened(rank, **changes))
    for start in range(0, len(data), 700):
        yield chunks.data_part(data[start : start + 700])
    yield transfer_pb2.PartPiece(commit=True)


def fetched(planes: Open, rank: HandRank, sha256: str, offset: int, nbytes: int) -> bytes:
    request = transfer_pb2.FetchRequest(
        identity=transfer_pb2.Identity(**rank.identity.model_dump()),
        sha256=sha256,
        offset=offset,
        nbytes=nbytes,
    )
    with typed():
        return b"".join(map(bytes, planes.calls.fetch(request, metadata=planes.metadata)))


@contextmanager
def typed() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as exc:
        raise rpc.error_of(exc) from exc


def test_ranks_meet_over_http_and_a_checkpoint_goes_in_and_out_over_grpc(sea):
    a, b = sea.ranks("a", "b")
    held: list[GroupReply] = []
    with serving(sea) as planes:

        def wait() -> None:
            held.append(planes.client.send(a.question(wait_seconds=WAIT_SECONDS)))

        waiting = threading.Thread(target=wait)
        waiting.start()
        # Asked again until both wait: then the poll that was held is answered, not at its end.
        measured = planes.client.send(b.question(wait_seconds=WAIT_SECONDS))
        waiting.join(WAIT_SECONDS)
        assert [measured.action, held[0].action] == ["measure", "measure"]
        for rank in (a, b):
            rank.measure()
        for rank in (a, b):
            rank.enter(planes.client.send(rank.question()))
        initial_blob = a.formed.restore
        assert initial_blob is not None
        nbytes = sea.layout.nbytes
        stored = fetched(planes, a, initial_blob.parts[0], initial_blob.offset, nbytes)
        assert stored == bytes(byte_view(initial(sea.layout)))

        for rank in (a, b):
            rank.save(3)
            rank.save(6)
            data = rank.part(6)
            broken = sea.coordinator.begin_part(rank.request(1))
            assert broken is not None
            sea.coordinator.write_part(broken, data[:64])
            with typed():
                offset = planes.calls.part_offset(opened(rank), metadata=planes.metadata).offset
                assert offset == 64
                sent = pieces(rank, data[offset:], offset=offset)
                receipt = planes.calls.send_part(sent, metadata=planes.metadata)
            assert receipt.sha256 == hashlib.sha256(data).hexdigest()
            rank.tell_part(1)
        report = PartReport(
            identity=a.identity,
            group=a.number,
            round=1,
            step=6,
            part=a.root(6),
            blob=a.request(1).sha256,
            loss_sum=1.0,
            tokens=120,
            wait_seconds=WAIT_SECONDS,
        )
        assert planes.client.send(report).committed
        boundary = BoundaryRequest(
            identity=b.identity, group=b.number, round=1, wait_seconds=WAIT_SECONDS
        )
        assert planes.client.send(boundary).action == "go"

        part = a.request(1).sha256
        assert fetched(planes, b, part, 8, 100) == a.part(6)[8:108]
        with pytest.raises(BlobMissing):
            fetched(planes, b, "0" * 64, 0, 1)
        with pytest.raises(ProtocolError, match="a range lies inside"):
            fetched(planes, b, part, 0, 1 << 40)
        shown = planes.client.send(StatusRequest())
        told = planes.client.send(InfoRequest())
    assert (shown.group, shown.ring, shown.checkpoint) == (a.number, ("a", "b"), 6)
    assert isinstance(told, Info)
    assert (told.version, told.manifest().sha256()) == (1, sea.manifest.sha256())


def test_part_is_committed_by_a_commit_that_says_so_and_ends_it(sea):
    a, _ = sea.formed(*sea.ranks("a", "b"))
    for step in (3, 6):
        a.save(step)
    whole = list(pieces(a, a.part(6)))
    no = transfer_pb2.PartPiece(commit=False)
    refused = {
        "says": [*whole[:-1], no],
        "says no": [*whole[:-1], no, whole[-1]],
        "more was sent": [*whole, whole[-1]],
        "more": [*whole, whole[1]],
    }
    with serving(sea) as planes:
        for sent in refused.values():
            with pytest.raises(FrameError, match=r"commits nothing|more was sent"), typed():
                planes.calls.send_part(iter(sent), metadata=planes.metadata)
            assert sea.coordinator.checkpoints.uploads.in_flight() == set()

        with typed():  # the control
            planes.calls.send_part(iter(whole), metadata=planes.metadata)
        assert sea.coordinator.checkpoints.uploads.in_flight() == {a.request(1).sha256}


def test_part_is_refused_before_its_body_over_grpc(sea):
    a, _ = sea.formed(*sea.ranks("a", "b"))
    read: list[int] = []

    def endless(**changes: Any) -> Iterator[Any]:
        yield transfer_pb2.PartPiece(open=opened(a, **changes))
        for count in range(1000):
            read.append(count)
            yield chunks.data_part(bytes(1 << 20))

    with serving(sea) as planes:
        for changes, error in (({"group": 1}, StaleGroup), ({"nbytes": 1 << 40}, FrameTooLarge)):
            with pytest.raises(error), typed():
                planes.calls.send_part(endless(**changes), metadata=planes.metadata)

    assert len(read) < 100
    assert list((sea.home / "blobs" / "tmp").iterdir()) == []


def test_transfers_of_the_other_kind_of_run_are_refused_by_name(sea, tmp_path):
    [a] = sea.ranks("a")
    with serving(sea) as planes, pytest.raises(ProtocolError, match=r"^Offset is not"), typed():
        planes.calls.offset(transfer_pb2.UploadOpen(), metadata=planes.metadata)
    with served.serving(tmp_path / "rounds") as made:
        calls = TransferCalls(made.channel())
        token = (("authorization", f"Bearer {served.TOKENS[Role.WORKER]}"),)
        with pytest.raises(ProtocolError, match=r"^PartOffset is not a message of run"), typed():
            calls.part_offset(opened_alone(a), metadata=token)


def opened_alone(rank: HandRank) -> transfer_pb2.PartOpen:
    return transfer_pb2.PartOpen(identity=transfer_pb2.Identity(**rank.identity.model_dump()))


# From a run file to an exported file, without the whole model


FILE: dict[str, Any] = {
    "name": "run",
    "strategy": "sharded",
    "seed": 3,
    "stop": {"rounds": 2},
    "model": {
        "architecture": "gpt",
        "vocab": 32,
        "block": 8,
        "layers": 2,
        "heads": 1,
        "width": 8,
    },
    "data": {"kind": "synthetic", "seed": 1, "rows": 100_000, "held_out_rows": 4, "block": 8},
}


def created(home: Path, **model: Any) -> tuple[Ledger, Any, ShardedCoordinator]:
    home.mkdir(parents=True, exist_ok=True)
    stores = clusters.stores_in(home)
    file = config.parse({**FILE, "model": {**FILE["model"], **model}})
    boot.create_or_check(stores, file, ManualClock(), new_run_id="run")
    made = boot.open_run(stores, ManualClock())
    assert isinstance(made, ShardedCoordinator)
    return stores.ledger, stores.blobs, made


def test_initial_weights_are_those_of_the_seed_in_the_order_of_units(tmp_path):
    ledger, blobs, made = created(tmp_path)
    layout = made.layout

    run = alone(ledger).run.get()
    assert run is not None
    flat = weights.load(blobs, run.initial_sha256, layout)
    right = layout.zeros()
    for name, value in init.initial(made.manifest.model.definition, layout, seed=3):
        layout.views(right)[name].copy_(value)

    assert torch.equal(flat, right)
    assert made.manifest.model.initial_digest == digests.digest(layout, flat).root == made.digest
    assert layout == recorded.layout_of(made.manifest)
    names = [t.name.split(".")[1] for t in layout.tensors if t.name.startswith("blocks.")]
    assert names == sorted(names)
    assert not layout.tensors[0].name.startswith("blocks.")


def test_initial_weights_may_come_from_a_file_and_are_read_tensor_by_tensor(tmp_path, monkeypatch):
    *_, first = created(tmp_path / "first")
    given = {t.name: torch.randn(t.shape) for t in first.layout.tensors}
    save_file(given, tmp_path / "given.safetensors")
    # The whole buffer is never made.
    monkeypatch.setattr("atoll.layout.Layout.zeros", None)

    ledger, blobs, made = created(
        tmp_path / "second", start_from=str(tmp_path / "given.safetensors")
    )

    run = alone(ledger).run.get()
    assert run is not None
    stored = b"".join(map(bytes, weights.pieces(blobs, run.initial_sha256, made.layout)))
    right = b"".join(bytes(byte_view(given[t.name].view(-1))) for t in made.layout.tensors)
    assert stored == right


def test_model_that_its_library_initialises_whole_needs_a_file(tmp_path):
    model = {"architecture": "transformers", "config": CONFIGS["llama"]}
    stores = clusters.stores_in(tmp_path)

    with pytest.raises(ConfigError, match=r"initialised whole by its library.*model\.start_from"):
        boot.create_or_check(
            stores, config.parse({**FILE, "model": model}), ManualClock(), new_run_id="run"
        )

    assert alone(stores.ledger).run.get() is None
    assert list(stores.blobs.stored()) == []


@pytest.mark.parametrize("version", [None, 0, 1])
def test_export_streams_a_checkpoint_that_any_tool_reads(sea, tmp_path, version, monkeypatch):
    ranks = sea.formed(*sea.ranks("a", "b", "c"))
    for number in (1, 2):
        sea.trained(ranks, number)
        sea.settle()
    step = {None: 12, 0: 0, 1: 6}[version]
    right = state_at(sea.layout, step)[0] if step else initial(sea.layout)
    digest = digests.digest(sea.layout, right).root
    # Nothing of the model's size is made on the way.
    monkeypatch.setattr("atoll.layout.Layout.zeros", None)
    monkeypatch.setattr(weights, "load", None)

    told = exporting.export(
        sea.ledger, sea.blobs, tmp_path / "x.safetensors", layout=sea.layout, version=version
    )

    found = load_file(tmp_path / "x.safetensors")
    assert told["atoll.digest"] == digest
    assert found.keys() == {t.name for t in sea.layout.tensors}
    for name, view in sea.layout.views(right).items():
        assert torch.equal(found[name], view)


def test_export_of_a_round_that_is_not_kept_is_refused(sea, tmp_path):
    with pytest.raises(ConfigError, match=r"round=3 is not kept; this run can export rounds \[0\]"):
        exporting.export(
            sea.ledger, sea.blobs, tmp_path / "x.safetensors", layout=sea.layout, version=3
        )

    assert list(tmp_path.glob("x*")) == []
