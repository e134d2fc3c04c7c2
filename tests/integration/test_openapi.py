"""The control plane against its own OpenAPI: no accident, no answer outside the schema.

Generated requests go to a real server; whatever is refused must leave the durable state as it was.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from atoll.coordinator.planes.access import Role
from tests import served
from tests.served import TOKENS, Served

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served.serving(tmp_path_factory.mktemp("openapi") / "state") as running:
        running.worker("generated")
        yield running


def operations(serving: Served) -> list[Any]:
    described: Any = schemathesis.openapi.from_dict(serving.server.app.openapi())
    return [found.ok() for found in described.get_all_operations()]


def check(operation: Any, serving: Served) -> None:
    headers = {"authorization": f"Bearer {TOKENS[Role.ADMIN]}"}

    @settings(
        max_examples=15,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.explicit, Phase.generate),  # shrinking against a server helps nobody in CI
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def keeps_its_contract(case: Any) -> None:
        before = serving.coordinator.state_hash()
        response = case.call(base_url=serving.url, headers=headers)
        case.validate_response(response, checks=CHECKS)
        if response.status_code >= 400:
            assert serving.coordinator.state_hash() == before, "a refused call changed the state"

    keeps_its_contract()


def faults_of(serving: Served) -> dict[str, str]:
    """What each operation does that its description does not allow."""
    faults = {}
    # The one that may stop the server comes last.
    for operation in sorted(operations(serving), key=lambda o: o.label == "POST /control"):
        try:
            check(operation, serving)
        except (Exception, BaseExceptionGroup) as exc:
            faults[operation.label] = str(exc)[:2000]
    serving.coordinator.order("run")
    return faults


def test_every_operation_keeps_its_own_contract(serving: Served) -> None:
    faults = faults_of(serving)

    assert faults == {}, "\n\n".join(f"{name}: {text}" for name, text in faults.items())


def test_operation_that_breaks_is_found(serving: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: an accident behind one route is named by the walk."""
    monkeypatch.setattr(serving.coordinator, "status", lambda: 1 / 0)
    wanted = [o for o in operations(serving) if o.label in ("GET /status", "GET /info")]
    found = []
    for operation in wanted:
        try:
            check(operation, serving)
        except (Exception, BaseExceptionGroup):
            found.append(operation.label)

    assert found == ["GET /status"]


def test_schema_describes_every_route(serving: Served) -> None:
    paths = serving.server.app.openapi()["paths"]

    assert {"/info", "/workers/register", "/control", "/metrics/history", "/ledger"} <= set(paths)
