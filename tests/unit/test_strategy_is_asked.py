"""The strategy is asked, never guessed: no module outside `strategies/` knows which one it is."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import atoll

PACKAGE = Path(atoll.__file__).parent
REGISTRY = PACKAGE / "strategies" / "registry.py"
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if "proto" not in p.parts)
# By its import contract the ledger knows no manifest: what it calls `mode` is a transaction's.
READERS = [p for p in MODULES if PACKAGE / "ledger" not in p.parents and p != REGISTRY]
OUTSIDE = [p for p in MODULES if PACKAGE / "strategies" not in p.parents]
CHOICES = {"strategy", "mode"}
COUNTS = {"lead", "num_fragments", "fragments", "parts"}
STRATEGIES = {"Strategy", "Sync"}


def reads_of_the_choice(source: str) -> Iterator[str]:
    """Where a module looks at a manifest's `strategy` or `mode`, by attribute or by key."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in CHOICES:
            yield f"line {node.lineno}: {ast.unparse(node)}"
        keys: list[ast.expr] = []
        if isinstance(node, ast.Subscript):
            keys = [node.slice]
        elif isinstance(node, ast.Call) and _called(node) in ("get", "getattr", "pop"):
            keys = list(node.args)
        for key in keys:
            if isinstance(key, ast.Constant) and key.value in CHOICES:
                yield f"line {key.lineno}: {ast.unparse(node)}"


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def guesses(source: str) -> Iterator[str]:
    """Where a module compares a strategy's numbers with a constant, or asks for its class or name.

    Numbers: `lead`, and how many fragments there are.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(_is_count(s) for s in sides) and any(_is_constant(s) for s in sides):
                yield f"line {node.lineno}: {ast.unparse(node)}"
        if isinstance(node, (ast.If, ast.While, ast.IfExp)) and _is_count(node.test):
            yield f"line {node.lineno}: {ast.unparse(node.test)}"
        if isinstance(node, ast.Call) and _called(node) in ("isinstance", "issubclass", "type"):
            named = {
                getattr(n, "id", getattr(n, "attr", "")) for a in node.args for n in ast.walk(a)
            }
            if named & STRATEGIES or any(name.endswith("strategy") for name in named):
                yield f"line {node.lineno}: {ast.unparse(node)}"
        if (
            isinstance(node, ast.Attribute)
            and node.attr in ("name", "__class__")
            and _last(node.value).endswith("strategy")
        ):
            yield f"line {node.lineno}: {ast.unparse(node)}"


def _is_count(node: ast.expr) -> bool:
    if isinstance(node, ast.Call) and _called(node) == "len" and node.args:
        node = node.args[0]
        return _last(node) in COUNTS - {"lead"}
    return _last(node) in {"lead", "num_fragments"}


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _is_constant(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) or (
        isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant)
    )


@pytest.mark.parametrize("path", READERS, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_the_registry_reads_strategy_and_mode(path):
    assert list(reads_of_the_choice(path.read_text())) == []


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nobody_outside_guesses_what_a_strategy_is(path):
    assert list(guesses(path.read_text())) == []


def test_registry_is_found_reading_them():
    assert len(list(reads_of_the_choice(REGISTRY.read_text()))) >= 2


@pytest.mark.parametrize(
    "line",
    [
        "if manifest.strategy == 'sharded': pass",
        "x = self.manifest.mode",
        "x = recorded.manifest.strategy",
        "x = settings['mode']",
        "x = table.get('strategy', 'diloco')",
        "x = getattr(manifest, 'mode')",
    ],
)
def test_reading_the_choice_is_found(line):
    assert list(reads_of_the_choice(line))


@pytest.mark.parametrize(
    "line",
    [
        "if strategy.lead == 0: pass",
        "if 1 < self.strategy.lead: pass",
        "if self._strategy.lead: pass",
        "x = len(fragments) > 1",
        "x = len(self._fragments.parts) == 1",
        "x = manifest.num_fragments != 1",
        "x = isinstance(self._strategy, Sync)",
        "x = type(strategy)",
        "x = recorded.round_strategy.name",
    ],
)
def test_guessing_is_found(line):
    assert list(guesses(line))


@pytest.mark.parametrize(
    "line",
    [
        "x = recorded.round_strategy.lead + 1",
        "range(first, first + 1 + self.run_strategy.lead)",
        "if number <= newest + strategy.lead: pass",
        "self._strategy = manifests.run_strategy",
    ],
)
def test_asking_is_no_guess(line):
    assert list(guesses(line)) == []
    assert list(reads_of_the_choice(line)) == []
