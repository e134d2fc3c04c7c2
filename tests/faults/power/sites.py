"""Where our own code asks the disk to be sure: the call sites of every sync in `src/atoll`.

A site is a call of `os.fsync` or `os.fdatasync`, or of a function that does nothing but wrap one
(`_sync`, `sync_file`, `sync_directory`): then the caller is the site, not the wrapper.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import atoll

SOURCE = Path(atoll.__file__).parent
_SYSTEM = {"fsync", "fdatasync"}
_WRAPPERS = {"_sync", "sync_file", "sync_directory"}


@dataclass(frozen=True)
class Site:
    """One call in our source."""

    path: str  # below src/atoll
    function: str
    line: int
    end_line: int

    @property
    def name(self) -> str:
        """As the recorded program and messages call it."""
        return f"{self.path}:{self.line}"

    @property
    def place(self) -> str:
        """As it is called where lines may move."""
        return f"{self.path} {self.function}"

    def includes(self, told: str | None) -> bool:
        """Whether `path:line`, of a line being executed, lies in this call."""
        path, _, line = (told or "").rpartition(":")
        return path == self.path and self.line <= int(line) <= self.end_line

    def __str__(self) -> str:
        return f"{self.name} in {self.function}"


def enumerate_sites() -> list[Site]:
    """Every site of the source, in order."""
    found = [
        site
        for path in sorted(SOURCE.rglob("*.py"))
        for site in _sites_of(path.relative_to(SOURCE).as_posix(), ast.parse(path.read_text()))
    ]
    assert found, f"no sync below {SOURCE}"
    return found


def caller() -> str:
    """The site that the running sync belongs to, as `path:line` of the line being executed."""
    frame = sys._getframe(2)
    while frame.f_code.co_name in _WRAPPERS and frame.f_back is not None:
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    return f"{path.relative_to(SOURCE).as_posix()}:{frame.f_lineno}"


def _sites_of(path: str, tree: ast.Module) -> Iterator[Site]:
    wrapper_methods = _SYSTEM | (_WRAPPERS - {"_sync"})
    for function in _functions(tree):
        if function.name in _WRAPPERS:
            continue
        for node in _own_nodes(function):
            if not isinstance(node, ast.Call):
                continue
            # `self._sync()` is a method of another kind; the wrapper `_sync` is a plain function.
            called = node.func
            if (isinstance(called, ast.Attribute) and called.attr in wrapper_methods) or (
                isinstance(called, ast.Name) and called.id in _WRAPPERS | _SYSTEM
            ):
                yield Site(path, function.name, node.lineno, node.end_lineno or node.lineno)


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
