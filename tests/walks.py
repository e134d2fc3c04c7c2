"""Every route and method of a coordinator, each with a message that it would take."""

import asyncio
import inspect
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from google.protobuf import message_factory
from pydantic import BaseModel

from atoll.protocol.control import AllowRequest, ControlRequest, KickRequest, OuterRateRequest
from atoll.protocol.gather import AnnounceRequest, WindowRequest
from atoll.protocol.messages import (
    AssignmentRequest,
    BarrierRequest,
    ErrorReply,
    EvaluationReport,
    HeartbeatRequest,
    LeaveRequest,
    RegisterRequest,
)
from atoll.protocol.samples import Sample, SamplesRequest
from atoll.protocol.sharded import (
    BoundaryRequest,
    GroupRequest,
    HeldSave,
    MissingReport,
    PartReport,
    SaveReport,
)
from atoll.wire.proto import transfer_pb2
from tests import served
from tests.served import Served, Worker

HASH = "0" * 64
SAVE = HeldSave(step=1, group=1, rank=0, own=HASH, predecessor=HASH)
SAMPLE = Sample(sequence=1, wall=1.0, round=1, step=1)


@dataclass(frozen=True)
class Answer:
    """What came back from either plane: 0 or the code of a refusal."""

    status: object
    code: str | None


Send = Callable[[str, str, str | None, bytes | None], Answer]


def bodies(worker: Worker) -> dict[type[BaseModel], BaseModel]:
    """A good message of every kind, which would change something if it were let in."""
    identity = worker.identity()
    of_round: dict[str, Any] = {"group": 1, "round": 1}
    newcomer = Worker(worker.served, f"newcomer-{secrets.token_hex(8)}")
    return {
        RegisterRequest: newcomer.registration(),
        HeartbeatRequest: HeartbeatRequest(identity=identity),
        AssignmentRequest: AssignmentRequest(identity=identity),
        EvaluationReport: EvaluationReport(identity=identity, version=0, loss_sum=1.0, tokens=1),
        LeaveRequest: LeaveRequest(identity=identity),
        SamplesRequest: SamplesRequest(identity=identity, life=1, samples=(SAMPLE,)),
        # These change nothing, for the tests after a mutant that lets them in.
        ControlRequest: ControlRequest(action="run"),
        KickRequest: KickRequest(worker_id="nobody"),
        OuterRateRequest: OuterRateRequest(lr=1.0),
        BarrierRequest: BarrierRequest(name="walk", identity=identity),
        AllowRequest: AllowRequest(worker_id="nobody"),
        # Of another kind of run than the walk's.
        GroupRequest: GroupRequest(identity=identity),
        SaveReport: SaveReport(identity=identity, save=SAVE),
        PartReport: PartReport(
            identity=identity, **of_round, step=1, part=HASH, blob=HASH, loss_sum=1.0, tokens=1
        ),
        BoundaryRequest: BoundaryRequest(identity=identity, **of_round),
        MissingReport: MissingReport(identity=identity, group=1, step=1, missing=("nobody",)),
        AnnounceRequest: AnnounceRequest.of(
            identity, preamble=b"frame", sha256=HASH, nbytes=1, statement=b"{}"
        ),
        WindowRequest: WindowRequest(identity=identity, round=1),
    }


def body_type(endpoint: Callable[..., object]) -> type[BaseModel] | None:
    given = [parameter.annotation for parameter in inspect.signature(endpoint).parameters.values()]
    found = [kind for kind in given if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return found[0] if found else None


@dataclass(frozen=True)
class Route:
    """One method of one path, with a message it would take."""

    name: str
    method: str
    path: str
    content: bytes | None


def routes(application: FastAPI, worker: Worker) -> list[Route]:
    messages = bodies(worker)
    found = []
    for context in iter_route_contexts(application.routes):
        assert context.endpoint is not None
        assert context.path is not None
        kind = body_type(context.endpoint)
        content = None if kind is None else messages[kind].model_dump_json().encode()
        for method in sorted(context.methods or {"?"}):
            path = context.path.format(
                worker_id=worker.name,
                generation=worker.served.coordinator.generation,
                name="walk",
                round=1,
            )
            found.append(Route(f"{method} {context.path}", method, path, content))
    return found


def over_network(coordinator: Served) -> tuple[httpx.Client, Send]:
    client = httpx.Client(base_url=coordinator.url, trust_env=False, verify=False)

    def send(method: str, path: str, credential: str | None, content: bytes | None) -> Answer:
        headers = {"content-type": "application/json"}
        if credential is not None:
            headers["authorization"] = credential
        reply = client.request(method, path, headers=headers, content=content)
        return answer_of(reply)

    return client, send


def in_memory(application: FastAPI) -> Send:
    async def once(
        method: str, path: str, credential: str | None, content: bytes | None
    ) -> httpx.Response:
        headers = {"content-type": "application/json"}
        if credential is not None:
            headers["authorization"] = credential
        transport = httpx.ASGITransport(app=application)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, headers=headers, content=content)

    def send(method: str, path: str, credential: str | None, content: bytes | None) -> Answer:
        return answer_of(asyncio.run(once(method, path, credential, content)))

    return send


def answer_of(reply: httpx.Response) -> Answer:
    if reply.status_code == 200:
        return Answer(200, None)
    return Answer(reply.status_code, ErrorReply.model_validate_json(reply.content).code)


def rpc_answer(
    channel: grpc.Channel, method: Any, credential: str | None, request: Any
) -> tuple[grpc.StatusCode, str | None]:
    """The status and the code of one call, of whatever shape."""
    shape: Any = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }[(method.client_streaming, method.server_streaming)]
    reply_type = message_factory.GetMessageClass(method.output_type)
    call = shape(
        f"/{method.containing_service.full_name}/{method.name}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=reply_type.FromString,
    )
    metadata = () if credential is None else (("authorization", credential),)
    sent = iter([request]) if method.client_streaming else request
    try:
        reply = call(sent, metadata=metadata, timeout=served.WAIT_SECONDS)
        if method.server_streaming:
            next(reply)
            reply.cancel()
    except grpc.RpcError as error:
        found: Any = error
        trailers = dict(found.trailing_metadata() or ())
        return found.code(), trailers.get("atoll-code")
    return grpc.StatusCode.OK, None


def rpc_methods() -> list[Any]:
    service = transfer_pb2.DESCRIPTOR.services_by_name["Transfer"]
    return list(service.methods)


def rpc_requests(worker: Worker, attendee: Worker) -> dict[str, Any]:
    """A good message of every method: it would be answered if it were let in."""
    present = served.proto_identity(attendee.identity())
    identity = served.proto_identity(worker.identity())
    opened = transfer_pb2.UploadOpen(identity=identity, sha256="0" * 64)
    return {
        "Offset": opened,
        "Upload": transfer_pb2.UploadPart(open=opened),
        "Download": transfer_pb2.DownloadRequest(identity=identity),
        "Presence": transfer_pb2.PresenceOpen(identity=present),
        "PartOffset": transfer_pb2.PartOpen(identity=present),
        "SendPart": transfer_pb2.PartPiece(open=transfer_pb2.PartOpen(identity=present)),
        "Fetch": transfer_pb2.FetchRequest(identity=present),
    }
