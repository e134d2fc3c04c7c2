"""The strategy is asked, never guessed: no module outside `strategies/` knows which one it is."""

import ast
import re
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
CHOICE = re.compile(r"(.*\.)?(strategy|mode)")  # also as the end of a dotted name
# Where the names may stand as strings, and what is assigned there: who writes a choice reads none.
MAY_NAME = {
    "protocol/manifest.py": {"FIXED"},
    "strategies/sharded/settings.py": {"FOREIGN"},
    "simulate/faults/scenario.py": {"settings"},
    "simulate/faults/seeds.py": {"given"},
    "simulate/rank_faults.py": {"settings"},
}
NUMBERS = {"lead", "num_fragments"}
SEQUENCES = {"fragments", "parts"}
CLASSES = {"Strategy", "AnyStrategy", "Sync", "Sharded"}
MAKERS = {f"{module}.{name}" for module in ("registry", "strategies") for name in ("of", "any_of")}
LOOKS = {"type", "isinstance", "issubclass", "hasattr", "getattr", "vars", "dir"}
INSIDES = {"name", "__class__", "__dict__"}


def reads_of_the_choice(source: str, *, may_name: frozenset[str] = frozenset()) -> Iterator[str]:
    """Where a module looks at a manifest's `strategy` or `mode`: by attribute, pattern or string.

    The strings may stand in the values of the names `may_name`.
    """
    tree = ast.parse(source)
    named = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and {_last(target) for target in node.targets} & may_name
        for part in ast.walk(node)
    }
    for node in ast.walk(tree):
        if (
            (isinstance(node, ast.Attribute) and node.attr in CHOICES)
            or (isinstance(node, ast.MatchClass) and CHOICES & {*node.kwd_attrs})
            or (_is_choice(node) and id(node) not in named)
        ):
            yield _shown(node)


def _is_choice(node: ast.AST) -> bool:
    """Whether it is a string that names one of them."""
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and CHOICE.fullmatch(node.value) is not None
    )


def guesses(source: str) -> Iterator[str]:
    """Where a module compares a strategy's numbers with a constant, or asks what a strategy is.

    Numbers: `lead`, and how many fragments there are. To use one as a condition is to compare it.
    """
    tree = ast.parse(source)
    seen = Names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            counted = any(map(seen.is_count, sides)) and any(map(seen.is_constant, sides))
            # Whether there is one at all may be asked.
            named = any(map(seen.is_strategy, sides)) and not any(map(_is_none, sides))
            if counted or named:
                yield _shown(node)
        elif isinstance(node, ast.Call) and _last(node.func) in LOOKS:
            if any(seen.is_strategy(a) for a in node.args) or _named(node) & CLASSES:
                yield _shown(node)
        elif isinstance(node, ast.Attribute) and node.attr in INSIDES:
            if seen.is_strategy(node.value):
                yield _shown(node)
        elif isinstance(node, ast.MatchClass) and _named(node.cls) & CLASSES:
            yield _shown(node)
        for condition in _conditions(node):
            if seen.is_count(condition):
                yield _shown(condition)
        if isinstance(node, ast.Match) and seen.is_strategy(node.subject):
            yield _shown(node.subject)


def _conditions(node: ast.AST) -> list[ast.expr]:
    """What `node` takes for true or false, or matches against patterns."""
    match node:
        case ast.If() | ast.While() | ast.IfExp() | ast.Assert():
            return [node.test]
        case ast.comprehension():
            return node.ifs
        case ast.UnaryOp(op=ast.Not()):
            return [node.operand]
        case ast.BoolOp():
            return node.values
        case ast.Call() if _last(node.func) in ("bool", "any", "all"):
            return node.args
        case ast.Match():
            return [node.subject]
        case ast.match_case(guard=ast.expr() as guard):
            return [guard]
    return []


class Names:
    """What the names of a module stand for: a constant, a strategy, one of a strategy's numbers."""

    def __init__(self, tree: ast.Module) -> None:
        self._constants: set[str] = set()
        self._strategies: set[str] = set()
        self._counts: set[str] = set()
        for node in ast.walk(tree):
            for target, value in _bound(node):
                if self.is_strategy(value):
                    self._strategies.add(target)
                elif self.is_count(value):
                    self._counts.add(target)
        for node in tree.body:
            for target, value in _bound(node):
                if self.is_constant(value):
                    self._constants.add(target)

    def is_constant(self, node: ast.expr) -> bool:
        match node:
            case ast.Constant():
                return True
            case ast.UnaryOp():
                return self.is_constant(node.operand)
            case ast.BinOp():
                return self.is_constant(node.left) and self.is_constant(node.right)
            case ast.Tuple() | ast.List() | ast.Set():
                return all(map(self.is_constant, node.elts))
            case ast.Dict():
                return all(key is not None and self.is_constant(key) for key in node.keys)
            case ast.Call(func=ast.Name(id="range" | "set" | "frozenset" | "tuple" | "list")):
                return all(map(self.is_constant, node.args))
            case ast.Name() | ast.Attribute():
                return _last(node) in self._constants or _last(node).isupper()
        return False

    def is_count(self, node: ast.expr) -> bool:
        """Whether it is one of a strategy's numbers, alone or with constants."""
        match node:
            case ast.NamedExpr():
                return self.is_count(node.value)
            case ast.BinOp():
                return self._is_count_of([node.left, node.right])
            case ast.Call(func=ast.Name(id="len")):
                return any(self._is_sequence(a) for a in node.args)
            case ast.Call(func=ast.Name(id="int" | "bool" | "abs" | "min" | "max" | "str")):
                return self._is_count_of(node.args)
            case ast.Subscript(slice=ast.Slice()):
                return self._is_sequence(node.value)
            case ast.Name() | ast.Attribute():
                return _last(node) in NUMBERS or _last(node) in self._counts
        return False

    def _is_count_of(self, parts: list[ast.expr]) -> bool:
        rest = [part for part in parts if not self.is_count(part)]
        return len(rest) < len(parts) and all(map(self.is_constant, rest))

    def _is_sequence(self, node: ast.expr) -> bool:
        cut = isinstance(node, ast.Call) and _last(node.func) == "cut"
        return _last(node) in SEQUENCES or cut

    def is_strategy(self, node: ast.expr) -> bool:
        if isinstance(node, ast.NamedExpr):
            return self.is_strategy(node.value)
        if isinstance(node, ast.Call):
            made = ast.unparse(node.func)
            return made.endswith("strategy_of") or made in MAKERS
        name = _last(node)
        return name.endswith("strategy") or name == "asked" or name in self._strategies


def _bound(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """The names that `node` gives a value, with the value."""
    match node:
        case ast.Assign():
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    yield from zip(map(_last, target.elts), node.value.elts, strict=False)
                else:
                    yield _last(target), node.value
        case ast.AnnAssign(value=ast.expr() as value) | ast.NamedExpr(value=value):
            yield _last(node.target), value


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _named(node: ast.AST) -> set[str]:
    return {_last(part) for part in ast.walk(node)}


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _shown(node: ast.AST) -> str:
    return f"line {getattr(node, 'lineno', '?')}: {ast.unparse(node)}"


@pytest.mark.parametrize("path", READERS, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_the_registry_reads_strategy_and_mode(path):
    may_name = frozenset(MAY_NAME.get(str(path.relative_to(PACKAGE)), ()))

    assert list(reads_of_the_choice(path.read_text(), may_name=may_name)) == []


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
        "x = attrgetter('mode')(manifest)",
        "x = attrgetter('manifest.strategy')(recorded)",
        "x = settings.setdefault('mode', 'sync')",
        "x = [v for k, v in settings.items() if k == 'strategy']",
        "FIXED = ('strategy',)",
        "match manifest:\n    case Manifest(mode='sync'): pass",
        "match settings:\n    case {'mode': 'sync'}: pass",
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
        "x = not s.lead",
        "x = s.lead and 1",
        "x = s.lead in (0, 1)",
        "x = s.lead in {0: 'sync'}",
        "x = s.lead in range(1)",
        "x = s.lead + 1 == 1",
        "x = min(s.lead, 1) == 1",
        "x = bool(s.lead)",
        "assert s.lead",
        "while s.lead: pass",
        "x = 1 if s.lead else 2",
        "x = [n for n in rounds if s.lead]",
        "x = [n for n in rounds if not len(fragments.parts)]",
        "match s.lead:\n    case 0: pass",
        "match number:\n    case 1 if s.lead: pass",
        "NONE = 0\nx = s.lead == NONE",
        "from atoll.somewhere import NONE\nx = s.lead == NONE",
        "none = 0\nx = s.lead == none",
        "def f():\n    ahead = s.lead\n    return ahead == 0",
        "if (ahead := s.lead) > 0: pass",
        "if parts[1:]: pass",
        "x = bool(self._fragments.parts[1:])",
        "x = len(strategy.cut(layout)) > 1",
        "x = type(s.strategy_of(1))",
        "x = type(registry.of(manifest))",
        "x = isinstance(strategies.any_of(manifest), Other)",
        "x = type(adopted.asked)",
        "x = isinstance(self.run_strategy, Other)",
        "x = hasattr(strategy, 'merge')",
        "x = getattr(recorded.round_strategy, 'merge', None)",
        "x = rounds.strategy_of(1).__class__",
        "def f():\n    found = rounds.strategy_of(1)\n    return type(found)",
        "x = strategy == other",
        "x = self._strategy is KNOWN",
        "match strategy:\n    case Sync(): pass",
        "match found:\n    case Sync(): pass",
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
        "if strategy is None: pass",
        "x = {**kept} if version >= current.version - self._strategy.lead else {}",
        "if strategy.dials: pass",
        "if rounds.strategy_of(number).is_short(view): pass",
        "x = len(found) == len(self.fragments.parts)",
    ],
)
def test_asking_is_no_guess(line):
    assert list(guesses(line)) == []
    assert list(reads_of_the_choice(line)) == []
