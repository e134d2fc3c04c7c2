"""How tokens become roles: in constant time, and never an empty one."""

import ast
from pathlib import Path

import pytest

from atoll.coordinator.planes import access
from atoll.coordinator.planes.access import Access
from atoll.errors import (
    Unauthenticated,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["coordinator/planes/access.py", "coordinator/members/workers.py"])
def test_secrets_are_compared_in_constant_time_only(name: str) -> None:
    tree = ast.parse((ROOT / "src" / "atoll" / name).read_text())
    compared = {
        ast.unparse(side)
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.NotEq)
        for side in (node.left, *node.comparators)
    }
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}

    assert "hmac.compare_digest" in calls
    assert not {text for text in compared if "token" in text or "hash" in text or "key" in text}


@pytest.mark.parametrize("value", [None, "", " ", "Bearer", "Bearer ", "bearer", "Basic x", "ü"])
def test_authorization_without_a_token_has_no_role(value: str | None) -> None:
    nobody_has_the_empty_token = Access({"admin": access.token_hash("")})

    with pytest.raises(Unauthenticated):
        nobody_has_the_empty_token.require(value)


def test_unknown_token_is_compared_with_every_known_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    roles = Access({"admin": access.token_hash("a" * 20), "worker": access.token_hash("w" * 20)})

    def compare(known: bytes, _: bytes) -> bool:
        compared.append(known)
        return False

    monkeypatch.setattr("atoll.coordinator.planes.access.hmac.compare_digest", compare)

    with pytest.raises(Unauthenticated):
        roles.require("Bearer something")

    assert len(compared) == 2
