"""Who may do what: every route and method, every credential, every identity."""

import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import grpc
import pytest
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts

from atoll.clock import SystemClock
from atoll.coordinator.planes import access, app, transfer
from atoll.coordinator.planes.access import Access, Role
from atoll.errors import (
    AtollError,
    Fenced,
    Forbidden,
    ManifestMismatch,
    StaleGeneration,
    Unauthenticated,
    UnknownWorker,
    WorkerTaken,
)
from atoll.protocol.messages import (
    AssignmentRequest,
    BarrierRequest,
    EvaluationReport,
    HeartbeatRequest,
    LeaveRequest,
    RegisterRequest,
    StatusRequest,
)
from atoll.protocol.samples import SamplesRequest
from atoll.wire.proto import transfer_pb2
from tests import served
from tests.served import TOKENS, Served, Worker
from tests.walks import (
    SAMPLE,
    Answer,
    Send,
    body_type,
    in_memory,
    over_network,
    routes,
    rpc_answer,
    rpc_methods,
    rpc_requests,
)

# What each route asks for. A new route fails the walk until somebody writes its line here.
ROUTES: Mapping[str, Role | None] = {
    "GET /health": None,
    "GET /info": Role.WORKER,
    "GET /status": Role.WORKER,
    "GET /workers": Role.WORKER,
    "GET /training/ready": Role.WORKER,
    "POST /generations/{generation}/barriers/{name}": Role.WORKER,
    "POST /workers/register": Role.WORKER,
    "DELETE /workers/{worker_id}": Role.WORKER,
    "POST /workers/{worker_id}/heartbeat": Role.WORKER,
    "POST /workers/{worker_id}/assignment": Role.WORKER,
    "POST /workers/{worker_id}/evaluation": Role.WORKER,
    "POST /workers/{worker_id}/samples": Role.WORKER,
    "POST /workers/{worker_id}/group": Role.WORKER,
    "POST /workers/{worker_id}/save": Role.WORKER,
    "POST /workers/{worker_id}/part": Role.WORKER,
    "POST /workers/{worker_id}/boundary": Role.WORKER,
    "POST /workers/{worker_id}/missing": Role.WORKER,
    "POST /workers/{worker_id}/announcement": Role.WORKER,
    "POST /windows/{round}": Role.WORKER,
    "GET /metrics": Role.WORKER,
    "GET /work": Role.WORKER,
    "GET /metrics/history": Role.WORKER,
    "GET /control": Role.ADMIN,
    "POST /control": Role.ADMIN,
    "POST /control/kick": Role.ADMIN,
    "POST /control/allow": Role.ADMIN,
    "POST /control/outer-lr": Role.ADMIN,
    "GET /openapi.json": Role.ADMIN,
    "GET /ledger": Role.ADMIN,
}

STRANGERS: Mapping[str, str | None] = {
    "none": None,
    "empty": "",
    "scheme alone": "Bearer",
    "quotes": 'Bearer ""',
    "wrong token": "Bearer wrong-token-of-the-tests",
    "admin token in another scheme": f"Basic {TOKENS[Role.ADMIN]}",
    "admin token without a scheme": TOKENS[Role.ADMIN],
    "hash of the admin token": f"Bearer {access.token_hash(TOKENS[Role.ADMIN])}",
    "admin token cut short": f"Bearer {TOKENS[Role.ADMIN][:-1]}",
    "admin token in capitals": f"Bearer {TOKENS[Role.ADMIN].upper()}",
    "both tokens": f"Bearer {TOKENS[Role.ADMIN]} {TOKENS[Role.WORKER]}",
    "very long": "Bearer " + "x" * 12_000,
}


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    # Two workers open a round; one alone can mutate nothing but itself.
    with served.serving(
        tmp_path_factory.mktemp("security") / "state", membership={"min_workers": 3}
    ) as running:
        yield running


@pytest.fixture(scope="module")
def alice(coordinator: Served) -> Worker:
    return coordinator.worker("alice")


def http_faults(
    application: FastAPI, send: Send, worker: Worker, strangers: Mapping[str, str | None]
) -> list[str]:
    """Every way in which a route differs from its line in ROUTES; refusals must change nothing."""
    faults = []
    state_hash = worker.served.coordinator.state_hash
    before = state_hash()
    for route in routes(application, worker):
        if route.name not in ROUTES:
            faults.append(f"{route.name}: nobody wrote down which role it needs")
            continue
        role = ROUTES[route.name]
        stranger = Answer(200, None) if role is None else Answer(401, Unauthenticated.code)
        tries = {name: (value, stranger) for name, value in strangers.items()}
        if role is Role.ADMIN:
            worker_token = f"Bearer {TOKENS[Role.WORKER]}"
            tries["worker"] = (worker_token, Answer(403, Forbidden.code))
        for name, (credential, wanted) in tries.items():
            answer = send(route.method, route.path, credential, route.content)
            if answer != wanted:
                faults.append(f"{route.name} with {name}: {answer}")
            if state_hash() != before:
                faults.append(f"{route.name} with {name}: the state changed")
                before = state_hash()
    return faults


# The walks


def test_every_route_refuses_strangers_and_roles_that_are_too_low(
    coordinator: Served, alice: Worker
) -> None:
    client, send = over_network(coordinator)

    with client:
        faults = http_faults(coordinator.server.app, send, alice, STRANGERS)

    assert faults == []
    assert {route.name for route in routes(coordinator.server.app, alice)} == set(ROUTES)


def test_paths_without_a_route_refuse_strangers_like_any_other(
    coordinator: Served, alice: Worker
) -> None:
    client, send = over_network(coordinator)

    with client:
        answers = {
            send("GET", path, None, None)
            for path in ("/", "/docs", "/redoc", "/health/", "/HEALTH", "//health", "/nothing")
        }

    assert answers == {Answer(401, Unauthenticated.code)}


def test_malformed_bodies_of_strangers_are_not_looked_at(
    coordinator: Served, alice: Worker
) -> None:
    client, send = over_network(coordinator)

    with client:
        answer = send("POST", "/workers/register", None, b"{not json")

    assert answer == Answer(401, Unauthenticated.code)


def mutant(coordinator: Served) -> FastAPI:
    return app.create(
        coordinator.coordinator,
        Access({role.value: access.token_hash(token) for role, token in TOKENS.items()}),
        SystemClock(),
    )


FEW = {name: STRANGERS[name] for name in ("none", "wrong token")}


def test_walk_finds_no_fault_in_an_application_without_a_mutation(
    coordinator: Served, alice: Worker
) -> None:
    application = mutant(coordinator)

    assert http_faults(application, in_memory(application), alice, FEW) == []


def test_walk_finds_a_route_that_lets_strangers_in(
    coordinator: Served, alice: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StatusRequest, "route", replace(StatusRequest.route, sender="anyone"))
    application = mutant(coordinator)

    faults = http_faults(application, in_memory(application), alice, FEW)

    assert [fault.split(":")[0] for fault in faults] == [
        "GET /status with none",
        "GET /status with wrong token",
    ]


def test_walk_finds_a_mutating_route_that_lets_strangers_in(
    coordinator: Served, alice: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RegisterRequest, "route", replace(RegisterRequest.route, sender="anyone"))
    application = mutant(coordinator)

    faults = http_faults(application, in_memory(application), alice, {"none": None})

    assert "POST /workers/register with none: the state changed" in faults


def test_walk_finds_an_admin_route_that_lets_workers_in(
    coordinator: Served, alice: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Access.require
    monkeypatch.setattr(
        Access, "require", lambda self, authorization, *_: real(self, authorization)
    )
    application = mutant(coordinator)

    faults = http_faults(application, in_memory(application), alice, {})

    assert {fault.split(":")[0] for fault in faults} == {
        f"{name} with worker" for name, role in ROUTES.items() if role is Role.ADMIN
    }


def test_walk_finds_a_route_that_nobody_wrote_down(coordinator: Served, alice: Worker) -> None:
    application = mutant(coordinator)
    application.add_api_route("/new", lambda: {})

    faults = http_faults(application, in_memory(application), alice, {})

    assert faults == ["GET /new: nobody wrote down which role it needs"]


@pytest.fixture
def attendee(coordinator: Served) -> Iterator[Worker]:
    """A worker whose presence stream may be broken off: it is gone before anybody misses it."""
    made = coordinator.worker(f"attendee-{secrets.token_hex(4)}")
    yield made
    made.link.send(LeaveRequest(identity=made.identity()))


def rpc_faults(coordinator: Served, worker: Worker, attendee: Worker) -> list[str]:
    faults = []
    requests = rpc_requests(worker, attendee)
    channel = coordinator.channel()
    before = coordinator.coordinator.state_hash()
    for method in rpc_methods():
        for name, credential in STRANGERS.items():
            found = rpc_answer(channel, method, credential, requests[method.name])
            if found != (grpc.StatusCode.UNAUTHENTICATED, Unauthenticated.code):
                faults.append(f"{method.name} with {name}: {found}")
            if coordinator.coordinator.state_hash() != before:
                faults.append(f"{method.name} with {name}: the state changed")
    return faults


def test_every_rpc_method_refuses_strangers(
    coordinator: Served, alice: Worker, attendee: Worker
) -> None:
    assert rpc_faults(coordinator, alice, attendee) == []
    assert len(STRANGERS) * len(rpc_methods()) >= 36


def test_every_rpc_method_is_in_the_walk() -> None:
    walked = [f"/{m.containing_service.full_name}/{m.name}" for m in rpc_methods()]

    service = transfer.SERVICE
    assert walked == [f"/{service.full_name}/{method.name}" for method in service.methods]


def test_walk_finds_rpc_methods_that_let_strangers_in(
    coordinator: Served, alice: Worker, attendee: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Access, "require", lambda *_: None)

    faults = rpc_faults(coordinator, alice, attendee)

    assert len(faults) == len(STRANGERS) * len(rpc_methods())


def test_rpc_methods_let_both_roles_in(
    coordinator: Served, alice: Worker, attendee: Worker
) -> None:
    requests = rpc_requests(alice, attendee)
    channel = coordinator.channel()

    codes = {
        rpc_answer(channel, method, f"Bearer {token}", requests[method.name])[0]
        for method in rpc_methods()
        for token in TOKENS.values()
    }

    assert not codes & {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}


def test_unknown_rpc_methods_refuse_strangers_like_any_other(coordinator: Served) -> None:
    call: Any = coordinator.channel().unary_unary("/atoll.v1.Transfer/Nothing")

    with pytest.raises(grpc.RpcError) as refused:
        call(b"", timeout=served.WAIT_SECONDS)

    found: Any = refused.value
    assert found.code() is grpc.StatusCode.UNAUTHENTICATED


GATHER_ROUTES = ["POST /workers/{worker_id}/announcement", "POST /windows/{round}"]
SHARDED_PATHS = ("group", "save", "part", "boundary", "missing")


@pytest.mark.parametrize("role", Role)
def test_messages_of_the_walk_pass_with_a_known_token(coordinator: Served, role: Role) -> None:
    bob = coordinator.worker(f"bob-{role.value}")
    client, send = over_network(coordinator)
    may = [r for r in routes(coordinator.server.app, bob) if ROUTES[r.name] is not Role.ADMIN]
    # These change the membership, after which the other messages are of an old generation.
    last = ["DELETE /workers/{worker_id}", "POST /workers/register"]
    leaving_last = sorted(
        may, key=lambda route: last.index(route.name) if route.name in last else -1
    )

    with client:
        answers = {
            route.name: send(route.method, route.path, f"Bearer {TOKENS[role]}", route.content)
            for route in leaving_last
        }

    # It is let in and looked at, but no round is open in which bob was asked to evaluate.
    assert answers.pop("POST /workers/{worker_id}/evaluation") == Answer(409, "WRONG_ROUND")
    # These are let in and refused by name: the run is of another kind.
    others = [f"POST /workers/{{worker_id}}/{name}" for name in SHARDED_PATHS] + GATHER_ROUTES
    assert [answers.pop(name) for name in others] == [Answer(422, "PROTOCOL")] * len(others)
    passed = {route.name: Answer(200, None) for route in may}
    assert answers.items() <= passed.items()
    assert len(answers) == len(passed) - 1 - len(others)


def test_admin_may_read_the_ledger_and_the_api(coordinator: Served) -> None:
    client, send = over_network(coordinator)

    with client:
        answers = [
            send("GET", path, f"bearer {TOKENS[Role.ADMIN]}", None)
            for path in ("/ledger", "/openapi.json")
        ]

    assert answers == [Answer(200, None)] * 2


def test_refused_strangers_are_counted(coordinator: Served) -> None:
    refusals = coordinator.coordinator.counters.refusals
    before = refusals[Unauthenticated.code]
    stranger = coordinator.link(token="wrong-token")

    with pytest.raises(Unauthenticated):
        stranger.send(StatusRequest())

    assert refusals[Unauthenticated.code] == before + 1


# Secrets at rest


def test_tokens_and_island_keys_are_nowhere_in_the_state_directory(
    coordinator: Served, alice: Worker
) -> None:
    hidden = [*(token.encode() for token in TOKENS.values()), alice.island_key.encode()]
    files = [path for path in coordinator.directory.rglob("*") if path.is_file()]
    contents = {path.name: path.read_bytes() for path in files}

    found = [name for name, data in contents.items() if any(secret in data for secret in hidden)]

    assert found == []
    assert access.token_hash(TOKENS[Role.ADMIN]).encode() in b"".join(contents.values())


# Identities: worker A cannot act as B, an old life is fenced, another run is refused


def mutations(worker: Worker) -> dict[str, Callable[..., object]]:
    """Every message that carries an identity, sent with changes to it."""

    link = worker.link
    found: dict[str, Callable[..., object]] = {
        "heartbeat": lambda **c: link.send(HeartbeatRequest(identity=worker.identity(**c))),
        "assignment": lambda **c: link.send(AssignmentRequest(identity=worker.identity(**c))),
        "evaluation": lambda **c: link.send(
            EvaluationReport(identity=worker.identity(**c), version=0, loss_sum=1.0, tokens=1)
        ),
        "samples": lambda **c: link.send(
            SamplesRequest(identity=worker.identity(**c), life=1, samples=(SAMPLE,))
        ),
        "leave": lambda **c: link.send(LeaveRequest(identity=worker.identity(**c))),
        "barrier": lambda **c: link.send(BarrierRequest(name="b", identity=worker.identity(**c))),
        "offset": lambda **c: rpc(worker, "Offset", c),
        "upload": lambda **c: rpc(worker, "Upload", c),
        "download": lambda **c: rpc(worker, "Download", c),
        "presence": lambda **c: link.attend(worker.identity(**c)),
    }
    return found


def rpc(worker: Worker, name: str, changes: dict[str, Any]) -> None:
    identity = served.proto_identity(worker.identity(**changes))
    opened = transfer_pb2.UploadOpen(identity=identity, sha256="0" * 64)
    stub = worker.served.stub()
    with served.typed_errors():
        if name == "Offset":
            stub.Offset(opened, metadata=served.metadata())
        elif name == "Upload":
            stub.Upload(iter([transfer_pb2.UploadPart(open=opened)]), metadata=served.metadata())
        else:
            request = transfer_pb2.DownloadRequest(identity=identity)
            list(stub.Download(request, metadata=served.metadata()))


MUTATIONS = (
    *("heartbeat", "assignment", "evaluation", "samples", "leave", "barrier"),
    *("offset", "upload", "download", "presence"),
)
IDENTITY_FAULTS: Mapping[str, tuple[dict[str, Any], type[AtollError]]] = {
    "another worker's name": ({"worker_id": "alice"}, Fenced),
    "another island key": ({"island_key": "0" * 64}, Fenced),
    "an earlier incarnation": ({"incarnation": 0}, Fenced),
    "a later incarnation": ({"incarnation": 99}, Fenced),
    "another run": ({"run_id": "another-run"}, ManifestMismatch),
    "another manifest": ({"manifest_sha256": "0" * 64}, ManifestMismatch),
    "a name nobody has": ({"worker_id": "nobody"}, UnknownWorker),
    "an earlier generation": ({"generation": 0}, StaleGeneration),
    "a later generation": ({"generation": 2**40}, StaleGeneration),
}


@pytest.fixture(scope="module")
def mallory(coordinator: Served, alice: Worker) -> Worker:
    return coordinator.worker("mallory")


@pytest.mark.parametrize("message", MUTATIONS)
@pytest.mark.parametrize("fault", IDENTITY_FAULTS)
def test_messages_under_a_wrong_identity_are_refused_and_change_nothing(
    coordinator: Served, mallory: Worker, message: str, fault: str
) -> None:
    changes, error = IDENTITY_FAULTS[fault]
    before = coordinator.coordinator.state_hash()

    with pytest.raises(error):
        mutations(mallory)[message](**changes)

    assert coordinator.coordinator.state_hash() == before


# Tested in `test_pull`: this run refuses them by name, whoever sends them.
OF_GATHER = {"AnnounceRequest", "WindowRequest"}
# Tested in `test_groups_forming`, in the same way.
OF_SHARDED = {"GroupRequest", "SaveReport", "PartReport", "BoundaryRequest", "MissingReport"}


def test_every_message_with_an_identity_is_among_the_tested_ones(
    coordinator: Served, mallory: Worker
) -> None:
    http = {
        kind.__name__
        for context in iter_route_contexts(coordinator.server.app.routes)
        if context.endpoint is not None
        and (kind := body_type(context.endpoint)) is not None
        and "identity" in kind.model_fields
    }
    rpcs = {
        method.name
        for method in rpc_methods()
        if "identity" in str(method.input_type.fields_by_name.keys())
        or method.input_type.name in ("UploadPart", "PartPiece")
    }

    assert http == {
        "HeartbeatRequest",
        "AssignmentRequest",
        "EvaluationReport",
        "LeaveRequest",
        "SamplesRequest",
        "BarrierRequest",
        *OF_SHARDED,
        *OF_GATHER,
    }
    assert rpcs == {method.name for method in rpc_methods()}
    assert rpcs == {"Offset", "Upload", "Download", "Presence", "PartOffset", "SendPart", "Fetch"}
    assert set(mutations(mallory)) == set(MUTATIONS)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"run_id": "another-run"}, ManifestMismatch),
        ({"manifest_sha256": "0" * 64}, ManifestMismatch),
        ({"worker_id": "alice"}, WorkerTaken),
    ],
)
def test_registration_under_a_wrong_identity_is_refused_and_changes_nothing(
    coordinator: Served, mallory: Worker, changes: dict[str, Any], error: type[AtollError]
) -> None:
    before = coordinator.coordinator.state_hash()

    with pytest.raises(error):
        mallory.link.send(mallory.registration(**changes))

    assert coordinator.coordinator.state_hash() == before


def test_path_of_another_worker_is_refused_and_changes_nothing(
    coordinator: Served, alice: Worker, mallory: Worker
) -> None:
    before = coordinator.coordinator.state_hash()
    client, send = over_network(coordinator)
    content = LeaveRequest(identity=mallory.identity()).model_dump_json().encode()

    with client:
        answer = send("DELETE", "/workers/alice", f"Bearer {TOKENS[Role.WORKER]}", content)

    assert answer == Answer(422, "PROTOCOL")
    assert coordinator.coordinator.state_hash() == before


def test_earlier_life_is_fenced_once_the_same_key_registers_again(coordinator: Served) -> None:
    first = coordinator.worker("restarted")
    second = Worker(coordinator, "restarted", island_key=first.island_key)
    second.register()

    with pytest.raises(Fenced):
        first.link.send(HeartbeatRequest(identity=first.identity()))

    second.link.send(HeartbeatRequest(identity=second.identity()))
