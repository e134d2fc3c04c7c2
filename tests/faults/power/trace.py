"""Reads what strace wrote into events of one directory tree.

Refuses what the disk model does not know: shared writable mappings, cut strings, calls without a
meaning here. Files outside the root are of no interest, except the marks.
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_LINE = re.compile(r"(?P<pid>\d+) +(?P<rest>.*)", re.DOTALL)
_RESUMED = re.compile(r"<\.\.\. \w+ resumed>(?P<rest>.*)", re.DOTALL)
_CALL = re.compile(r"(?P<name>\w+)\((?P<args>.*)\) += (?P<result>-?\d+|0x[0-9a-f]+)", re.DOTALL)
_UNFINISHED = " <unfinished ...>"
_DESCRIPTOR = re.compile(r"(?P<fd>\d+|AT_FDCWD)(<(?P<path>[^>]*)>)?")
_BUFFERS = re.compile(r'iov_base="([^"]*)"')


class UnknownCall(Exception):
    """The trace holds something that the disk model cannot repeat."""


@dataclass(frozen=True)
class Event:
    """One finished call on the tree. `paths` are relative to the root."""

    name: str
    paths: tuple[str, ...] = ()
    fd: int = -1
    number: int = 0  # a size, an offset or another descriptor, as the call has it
    data: bytes = b""
    flags: frozenset[str] = frozenset()
    # Of a sync: how many events had happened when it began; it is sure of no later one.
    began: int = 0
    site: str | None = None  # of a sync that our own code asked for
    mark: dict[str, Any] = field(default_factory=dict)


NO_SYNC = Event("mark")  # in place of a sync that is left out: places in the list stay


def read(trace: Path, root: Path, marks: Path) -> list[Event]:
    """The events of the tree below `root`, in the order in which they finished."""
    return list(_Reader(str(root), str(marks)).events(trace))


@dataclass
class _Call:
    name: str
    args: list[str]
    result: int
    began: int


class _Reader:
    def __init__(self, root: str, marks: str) -> None:
        self._root = root
        self._marks = marks
        self._unfinished: dict[str, tuple[str, int]] = {}
        self._site: dict[str, str] = {}  # by thread: who asks for its next sync
        self._count = 0

    def events(self, trace: Path) -> Iterator[Event]:
        with trace.open(encoding="ascii") as lines:
            for line in lines:
                for event in self._line(line.rstrip("\n")):
                    self._count += 1
                    yield event

    def _line(self, line: str) -> Iterator[Event]:
        found = _LINE.fullmatch(line)
        assert found is not None, line[:200]
        pid, text = found["pid"], found["rest"]
        if text.startswith(("---", "+++")):
            return
        began = self._count
        resumed = _RESUMED.fullmatch(text)
        if resumed is not None:
            start, began = self._unfinished.pop(pid)
            text = start + resumed["rest"]
        elif text.endswith(_UNFINISHED):
            text = text.removesuffix(_UNFINISHED)
            if text.startswith("close("):
                text += ") = 0"  # another thread may get the number before this returns
            self._unfinished[pid] = (text, began)
            if not text.startswith("close("):
                return
        if resumed is not None and text.startswith("close("):
            return  # told when it began
        parsed = _CALL.match(text)
        assert parsed is not None, text[:200]
        result = int(parsed["result"], 0)
        if result < 0:
            return
        call = _Call(parsed["name"], parsed["args"].split(", "), result, began)
        reader = getattr(self, f"_{call.name}", None)
        if reader is None:
            self._refuse_inside(call)
            return
        yield from reader(pid, call)

    # What the arguments say

    def _inside(self, path: str) -> str | None:
        """`path` relative to the root, or None when it is elsewhere."""
        if path == self._root:
            return "."
        prefix = self._root + "/"
        return path[len(prefix) :] if path.startswith(prefix) else None

    def _of(self, descriptor: str) -> tuple[int, str | None]:
        found = _DESCRIPTOR.match(descriptor)
        if found is None or found["path"] is None or found["fd"] == "AT_FDCWD":
            return -1, None
        return int(found["fd"]), self._inside(_text(found["path"]))

    def _at(self, directory: str, name: str) -> str | None:
        found = _DESCRIPTOR.match(directory)
        assert found is not None, directory
        path = os.path.join(_text(found["path"] or ""), _text(_quoted(name)))
        return self._inside(os.path.normpath(path))

    def _plain(self, name: str) -> str | None:
        return self._inside(os.path.normpath(_text(_quoted(name))))

    def _refuse_inside(self, call: _Call) -> None:
        text = ", ".join(call.args)
        if _hex(self._root) in text:
            raise UnknownCall(f"{call.name}({text[:400]}) changes the tree in a way not modelled")

    # The calls

    def _openat(self, _: str, call: _Call) -> Iterator[Event]:
        path = self._at(call.args[0], call.args[1])
        if path is not None:
            yield Event("open", (path,), fd=call.result, flags=_flags(call.args[2]))

    def _close(self, _: str, call: _Call) -> Iterator[Event]:
        fd, path = self._of(call.args[0])
        if path is not None:
            yield Event("close", fd=fd)

    def _dup(self, _: str, call: _Call) -> Iterator[Event]:
        fd, path = self._of(call.args[0])
        if path is not None:
            yield Event("dup", fd=fd, number=call.result)

    _dup2 = _dup3 = _dup

    def _fcntl(self, pid: str, call: _Call) -> Iterator[Event]:
        if call.args[1].startswith("F_DUPFD"):
            yield from self._dup(pid, call)

    def _lseek(self, _: str, call: _Call) -> Iterator[Event]:
        fd, path = self._of(call.args[0])
        if path is not None:
            yield Event("seek", fd=fd, number=call.result)

    def _mmap(self, _: str, call: _Call) -> Iterator[Event]:
        shared = "PROT_WRITE" in call.args[2] and "MAP_SHARED" in call.args[3]
        # SQLite makes its index of a log again after a crash, whatever the file holds.
        if shared and not (self._of(call.args[4])[1] or "").endswith("-shm"):
            self._refuse_inside(call)
        yield from ()

    def _write(self, pid: str, call: _Call) -> Iterator[Event]:
        found = _DESCRIPTOR.match(call.args[0])
        if found is not None and _text(found["path"] or "") == self._marks:
            yield from self._mark(pid, json.loads(_bytes(_quoted(call.args[1]))))
            return
        fd, path = self._of(call.args[0])
        if path is not None:
            yield Event("write", (path,), fd=fd, number=-1, data=_written(call, call.args[1:2]))

    def _pwrite64(self, _: str, call: _Call) -> Iterator[Event]:
        fd, path = self._of(call.args[0])
        if path is not None:
            data = _written(call, call.args[1:2])
            yield Event("write", (path,), fd=fd, number=int(call.args[3]), data=data)

    def _writev(self, _: str, call: _Call) -> Iterator[Event]:
        fd, path = self._of(call.args[0])
        if path is not None:
            pieces = [f'"{piece}"' for piece in _BUFFERS.findall(", ".join(call.args[1:]))]
            yield Event("write", (path,), fd=fd, number=-1, data=_written(call, pieces))

    def _ftruncate(self, _: str, call: _Call) -> Iterator[Event]:
        fd, path = self._of(call.args[0])
        if path is not None:
            yield Event("truncate", (path,), fd=fd, number=int(call.args[1]))

    def _fallocate(self, _: str, call: _Call) -> Iterator[Event]:
        fd, path = self._of(call.args[0])
        if path is not None:
            if call.args[1] != "0":
                self._refuse_inside(call)
            yield Event("allocate", (path,), fd=fd, number=int(call.args[2]) + int(call.args[3]))

    def _fsync(self, pid: str, call: _Call) -> Iterator[Event]:
        site = self._site.pop(pid, None)
        fd, path = self._of(call.args[0])
        if path is not None:
            yield Event("sync", (path,), fd=fd, began=call.began, site=site)

    _fdatasync = _fsync

    def _sync_file_range(self, _: str, __: _Call) -> Iterator[Event]:
        yield from ()  # promises nothing

    def _rename(self, _: str, call: _Call) -> Iterator[Event]:
        yield from self._two("rename", self._plain(call.args[0]), self._plain(call.args[1]))

    def _renameat(self, _: str, call: _Call) -> Iterator[Event]:
        if len(call.args) > 4 and call.args[4] != "0":
            self._refuse_inside(call)
        source, target = self._at(*call.args[0:2]), self._at(*call.args[2:4])
        yield from self._two("rename", source, target)

    _renameat2 = _renameat

    def _link(self, _: str, call: _Call) -> Iterator[Event]:
        yield from self._two("link", self._plain(call.args[0]), self._plain(call.args[1]))

    def _linkat(self, _: str, call: _Call) -> Iterator[Event]:
        yield from self._two("link", self._at(*call.args[0:2]), self._at(*call.args[2:4]))

    def _two(self, name: str, source: str | None, target: str | None) -> Iterator[Event]:
        if (source is None) != (target is None):
            raise UnknownCall(f"{name} of {source!r} to {target!r} crosses the root")
        if source is not None and target is not None:
            yield Event(name, (source, target))

    def _unlink(self, _: str, call: _Call) -> Iterator[Event]:
        yield from self._one("unlink", self._plain(call.args[0]))

    def _unlinkat(self, _: str, call: _Call) -> Iterator[Event]:
        yield from self._one("unlink", self._at(*call.args[0:2]))

    def _rmdir(self, _: str, call: _Call) -> Iterator[Event]:
        yield from self._one("unlink", self._plain(call.args[0]))

    def _mkdir(self, _: str, call: _Call) -> Iterator[Event]:
        yield from self._one("mkdir", self._plain(call.args[0]))

    def _mkdirat(self, _: str, call: _Call) -> Iterator[Event]:
        yield from self._one("mkdir", self._at(*call.args[0:2]))

    def _one(self, name: str, path: str | None) -> Iterator[Event]:
        if path is not None:
            yield Event(name, (path,))

    def _mark(self, pid: str, mark: dict[str, Any]) -> Iterator[Event]:
        if "site" in mark:
            self._site[pid] = mark["site"]
        else:
            yield Event("mark", mark=mark)


def _quoted(text: str) -> str:
    if not (text.startswith('"') and text.endswith('"')):
        raise UnknownCall(f"a string of the trace is cut or not one: {text[:80]}… {text[-20:]}")
    return text[1:-1]


def _bytes(escaped: str) -> bytes:
    return bytes.fromhex(escaped.replace("\\x", ""))


def _text(escaped: str) -> str:
    return os.fsdecode(_bytes(escaped)) if escaped.startswith("\\x") else escaped


def _hex(text: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(text))


def _flags(text: str) -> frozenset[str]:
    return frozenset(text.split("|"))


def _written(call: _Call, pieces: list[str]) -> bytes:
    """What was really written, which may be less than was asked for."""
    return b"".join(_bytes(_quoted(piece)) for piece in pieces)[: call.result]
