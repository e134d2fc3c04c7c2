"""Where our own code asks the disk to be sure: the call sites of every sync in `src/atoll`.

A site is a call of `os.fsync` or `os.fdatasync`, or of a function that does nothing but wrap one
(`sync`, `sync_file`, `sync_directory`): then the caller is the site, not the wrapper. A function of
several syncs (`write_whole`) gives its caller one site for each of them, its steps.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import atoll

SOURCE = Path(atoll.__file__).parent
_SYSTEM = {"fsync", "fdatasync"}
_WRAPPERS = {"sync", "sync_file", "sync_directory"}
_STEPPED = {"put_in_place", "write_whole"}  # the second calls the first
_MODULES = {"files", "filesystem", "os"}  # `run.sync()` of something else is no site


@dataclass(frozen=True)
class Site:
    """One call in our source."""

    path: str  # below src/atoll
    function: str
    line: int
    end_line: int
    step: str = ""  # which sync of a function of several, as its `path:line`

    @property
    def name(self) -> str:
        """As messages call it."""
        return f"{self.path}:{self.line}" + (f" at {self.step}" if self.step else "")

    @property
    def place(self) -> str:
        """As it is called where lines may move."""
        return f"{self.path} {self.function}"

    def includes(self, told: str | None) -> bool:
        """Whether what `caller` told of a running sync lies in this call."""
        if told is None:
            return False
        place, _, step = told.partition(" ")
        path, _, line = place.rpartition(":")
        return (path, step) == (self.path, self.step) and self.line <= int(line) <= self.end_line

    def __str__(self) -> str:
        return f"{self.name} in {self.function}"


def enumerate_sites() -> list[Site]:
    """Every site of the source, in order."""
    trees = {
        path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text())
        for path in sorted(SOURCE.rglob("*.py"))
    }
    calls = [
        site for path, tree in trees.items() for site in _calls_of(path, tree, _WRAPPERS | _SYSTEM)
    ]
    steps = [site.name for site in calls if site.function in _STEPPED]
    assert steps, f"none of {_STEPPED} syncs anything"
    stepped = [
        replace(site, step=step)
        for path, tree in trees.items()
        for site in _calls_of(path, tree, _STEPPED)
        for step in steps
    ]
    return [site for site in calls if site.function not in _STEPPED] + stepped


def caller() -> str:
    """The site that the running sync belongs to, as `path:line` of the line being executed.

    Of a step `path:line` of the caller, and after a space that of the step itself.
    """
    frame, step = sys._getframe(2), ""  # noqa: SLF001  its only name; inspect is slow
    while (name := frame.f_code.co_name) in _WRAPPERS | _STEPPED:
        assert frame.f_back is not None
        if name in _STEPPED and not step:
            step = f" {_place(frame)}"
        frame = frame.f_back
    return _place(frame) + step


def _place(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename).relative_to(SOURCE)
    return f"{path.as_posix()}:{frame.f_lineno}"


def _calls_of(path: str, tree: ast.Module, names: set[str]) -> Iterator[Site]:
    """The calls of these functions, except by one another."""
    for function in _functions(tree):
        if function.name in names:
            continue
        for node in _own_nodes(function):
            if isinstance(node, ast.Call) and _called(node.func) in names:
                yield Site(path, function.name, node.lineno, node.end_lineno or node.lineno)


def _called(function: ast.expr) -> str | None:
    """The name of what is called, where it may be one of ours."""
    if isinstance(function, ast.Name):
        return function.id
    if isinstance(function, ast.Attribute):
        module = function.value.id if isinstance(function.value, ast.Name) else None
        return None if function.attr == "sync" and module not in _MODULES else function.attr
    return None


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a function without those of functions inside it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from _own_nodes(child)
