"""A disk and its page cache: what was written, and what a power cut may leave of it.

Bytes of a file are sure once that file was synced; a name is sure once its directory was (a rename:
the directory it leads to). Until then anything may be lost, in any order: names one by one, each
rename whole, bytes by page, the size apart from the bytes. A page on the disk is one that was in
memory at some moment, so a later write to it never comes without the earlier ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from tests.faults.power.trace import Event, UnknownCall

PAGE = 4096
SECTOR = 512


@dataclass(frozen=True)
class Change:
    """A write (`data` at `offset`), or a new size with everything after it gone or zero."""

    index: int  # of the event
    offset: int
    data: bytes | None
    size_after: int

    def touches(self, page: int) -> bool:
        start = page * PAGE
        if self.data is None:
            return self.offset < start + PAGE
        return self.offset < start + PAGE and self.offset + len(self.data) > start

    def apply(self, content: bytearray) -> None:
        if self.data is None:
            _resize(content, self.offset)
        else:
            _resize(content, max(len(content), self.offset + len(self.data)))
            content[self.offset : self.offset + len(self.data)] = self.data


@dataclass(eq=False)
class Inode:
    """A file or directory, whatever its names are."""

    host: str
    is_directory: bool = False
    sure: bytearray = field(default_factory=bytearray)
    unsure: list[Change] = field(default_factory=list)
    size: int = 0

    def settle(self, before: int) -> None:
        """Everything of events before that one is on the disk."""
        while self.unsure and self.unsure[0].index < before:
            self.unsure.pop(0).apply(self.sure)


@dataclass(eq=False)
class Naming:
    """One change of names, which happens whole or not at all."""

    index: int
    home: Inode  # the directory whose sync makes it sure
    sets: tuple[Inode, str, Inode] | None = None
    takes: tuple[Inode, str, Inode] | None = None
    is_sure: bool = False

    def apply(self, names: "Names") -> None:
        if self.takes is not None:
            directory, name, inode = self.takes
            if names.get(directory, {}).get(name) is inode:
                del names[directory][name]
        if self.sets is not None:
            directory, name, inode = self.sets
            names.setdefault(directory, {})[name] = inode


Names = dict[Inode, dict[str, Inode]]


@dataclass
class _Opened:
    inode: Inode
    position: int
    appends: bool


class Disk:
    """The tree as the running program sees it, and what of it is sure."""

    def __init__(self, *existing: str) -> None:
        self.root = Inode(host="", is_directory=True)
        self.namings: list[Naming] = []
        self.inodes: list[Inode] = []
        self._sure: Names = {}  # what the namings that were dropped from the list made
        self._live: Names = {self.root: {}}
        self._opened: dict[int, _Opened] = {}
        self._index = -1
        for path in existing:  # directories that were there, and sure, before the first event
            self._make(path, is_directory=True)
        for naming in self.namings:
            naming.is_sure = True

    def apply(self, event: Event) -> None:
        """The event has happened."""
        self._index += 1
        getattr(self, f"_{event.name}")(event)

    def names(self, chosen: set[int] | None = None) -> Names:
        """The names on the disk when of the unsure ones just the `chosen` (all) made it."""
        names = {directory: dict(entries) for directory, entries in self._sure.items()}
        for naming in self.namings:
            if naming.is_sure or chosen is None or naming.index in chosen:
                naming.apply(names)
        return names

    def unsure_namings(self) -> list[Naming]:
        """Changes of names that a power cut may undo."""
        return [naming for naming in self.namings if not naming.is_sure]

    def unsure_inodes(self) -> list[Inode]:
        """Files with bytes that a power cut may take."""
        return [inode for inode in self.inodes if inode.unsure]

    # Events

    def _mark(self, event: Event) -> None:
        """Changes nothing."""

    def _open(self, event: Event) -> None:
        path = event.paths[0]
        inode = self._find(path)
        if inode is None:
            assert "O_CREAT" in event.flags, path
            inode = self._make(path, is_directory=False)
        elif "O_TRUNC" in event.flags and inode.size:
            self._change(inode, 0, None)
        self._opened[event.fd] = _Opened(inode, 0, appends="O_APPEND" in event.flags)

    def _close(self, event: Event) -> None:
        self._opened.pop(event.fd, None)

    def _dup(self, event: Event) -> None:
        self._opened[event.number] = self._opened[event.fd]

    def _seek(self, event: Event) -> None:
        self._opened[event.fd].position = event.number

    def _write(self, event: Event) -> None:
        opened = self._opened[event.fd]
        offset = event.number
        if offset < 0:
            offset = opened.inode.size if opened.appends else opened.position
            opened.position = offset + len(event.data)
        self._change(opened.inode, offset, event.data)

    def _truncate(self, event: Event) -> None:
        self._change(self._opened[event.fd].inode, event.number, None)

    def _allocate(self, event: Event) -> None:
        inode = self._opened[event.fd].inode
        if event.number > inode.size:
            self._change(inode, event.number, None)

    def _sync(self, event: Event) -> None:
        inode = self._opened[event.fd].inode
        if not inode.is_directory:
            inode.settle(event.began)
            return
        for naming in self.namings:
            if naming.home is inode and naming.index < event.began:
                naming.is_sure = True
        while self.namings and self.namings[0].is_sure:
            self.namings.pop(0).apply(self._sure)

    def _mkdir(self, event: Event) -> None:
        self._make(event.paths[0], is_directory=True)

    def _unlink(self, event: Event) -> None:
        directory, name = self._place(event.paths[0])
        inode = self._live[directory][name]
        self._name(Naming(self._index, directory, takes=(directory, name, inode)))

    def _rename(self, event: Event) -> None:
        source, target = (self._place(path) for path in event.paths)
        inode = self._live[source[0]][source[1]]
        self._name(Naming(self._index, target[0], sets=(*target, inode), takes=(*source, inode)))

    def _link(self, event: Event) -> None:
        source, target = (self._place(path) for path in event.paths)
        inode = self._live[source[0]][source[1]]
        self._name(Naming(self._index, target[0], sets=(*target, inode)))

    # Helpers of the events

    def _change(self, inode: Inode, offset: int, data: bytes | None) -> None:
        inode.size = offset if data is None else max(inode.size, offset + len(data))
        inode.unsure.append(Change(self._index, offset, data, inode.size))

    def _make(self, path: str, *, is_directory: bool) -> Inode:
        directory, name = self._place(path)
        inode = Inode(host=PurePosixPath(path).parts[0], is_directory=is_directory)
        if is_directory:
            self._live[inode] = {}
        else:
            self.inodes.append(inode)
        self._name(Naming(self._index, directory, sets=(directory, name, inode)))
        return inode

    def _name(self, naming: Naming) -> None:
        self.namings.append(naming)
        naming.apply(self._live)

    def _find(self, path: str) -> Inode | None:
        if path == ".":
            return self.root
        found: Inode | None = self.root
        for part in PurePosixPath(path).parts:
            assert found is not None, path
            found = self._live.get(found, {}).get(part)
        return found

    def _place(self, path: str) -> tuple[Inode, str]:
        pure = PurePosixPath(path)
        directory = self._find(str(pure.parent))
        if directory is None or directory not in self._live:
            raise UnknownCall(f"{path!r} lies in no directory of the tree")
        return directory, pure.name


def walk(names: Names, root: Inode, prefix: str = "") -> Iterator[tuple[str, Inode]]:
    """Every path below `root`, parents first."""
    for name, inode in sorted(names.get(root, {}).items()):
        yield prefix + name, inode
        if inode.is_directory:
            yield from walk(names, inode, f"{prefix}{name}/")


def _resize(content: bytearray, size: int) -> None:
    if size < len(content):
        del content[size:]
    else:
        content.extend(bytes(size - len(content)))
