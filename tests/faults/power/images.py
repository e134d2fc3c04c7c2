"""Which disks a power cut may leave, drawn by seed, and how one becomes real files."""

import hashlib
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.faults.power.disk import PAGE, SECTOR, Disk, Inode, Names, Naming, walk

# Not durable by design, so of no account when states are told apart: made again or done without.
PASSING = ("spool", "telemetry.sqlite", "lock", "coordinator.lock", "tmp", "repair-")


@dataclass(frozen=True)
class Image:
    """What is on the disks after a power cut: paths with bytes, or None for a directory."""

    files: dict[str, bytes | None]

    def digest(self, machine: str = "") -> str:
        """Equal for images that differ in nothing that has to last, on one machine or all."""
        state = hashlib.sha256()
        for path, content in self.files.items():
            first, *parts = path.split("/")
            if machine in ("", first) and not any(part.startswith(PASSING) for part in parts):
                state.update(f"{path}\0{-1 if content is None else len(content)}\0".encode())
                state.update(content or b"")
        return state.hexdigest()

    def write(self, root: Path, *, only: str = "") -> None:
        """Makes it, or the disk of one machine, real below `root`, in place of what is there."""
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        for path, content in self.files.items():
            if only not in ("", path.partition("/")[0]):
                continue
            if content is None:
                (root / path).mkdir()
            else:
                (root / path).write_bytes(content)
                (root / path).chmod(0o600)  # modes are not in the trace; a key must have this one


# What becomes of one file's unsure bytes, given those that a rule lets through.
Draw = Callable[[Inode], bytes]


def whole(disk: Disk) -> Image:
    """Nothing is lost, as after a kill."""
    return _image(disk.names(), disk.root, _everything)


def nothing(disk: Disk) -> Image:
    """Only what is sure."""
    return _image(disk.names(set()), disk.root, lambda inode: bytes(inode.sure))


def names_only(disk: Disk) -> Image:
    """Every name made it, and sizes; of the unsure bytes none."""
    return _image(disk.names(), disk.root, lambda inode: _pages(inode, lambda _, __: 0, inode.size))


def bytes_only(disk: Disk) -> Image:
    """All bytes made it, no unsure name."""
    return _image(disk.names(set()), disk.root, _everything)


def drawn(disk: Disk, rng: random.Random) -> Image:
    """One of the many: each name, page and size by itself, on all machines or on one."""
    style = rng.choice((_in_order, _by_directory, _any, _any))
    hosts = sorted({inode.host for inode in disk.inodes})
    struck = {rng.choice(hosts)} if hosts and rng.random() < 0.3 else set(hosts)
    return style(disk, rng, struck)


def _any(disk: Disk, rng: random.Random, struck: set[str]) -> Image:
    """Any subset of names; pages of any age."""
    share = rng.choice((0.15, 0.5, 0.85))
    chosen = {n.index for n in disk.unsure_namings() if not _hit(n, struck) or rng.random() < share}
    return _image(disk.names(chosen), disk.root, _aged(rng, share, struck))


def _by_directory(disk: Disk, rng: random.Random, struck: set[str]) -> Image:
    """Of each directory the changes up to some moment; pages of any age."""
    until: dict[Inode, int] = {}
    unsure = disk.unsure_namings()
    for naming in unsure:
        until.setdefault(naming.home, rng.choice(unsure).index)
    chosen = {n.index for n in unsure if not _hit(n, struck) or n.index <= until[n.home]}
    return _image(disk.names(chosen), disk.root, _aged(rng, rng.random(), struck))


def _in_order(disk: Disk, rng: random.Random, struck: set[str]) -> Image:
    """Everything up to some moment, the write at that moment torn at a sector."""
    moments = [n.index for n in disk.unsure_namings()]
    moments += [change.index for inode in disk.unsure_inodes() for change in inode.unsure]
    last = rng.choice(sorted(moments)) if moments else 0
    chosen = {n.index for n in disk.unsure_namings() if not _hit(n, struck) or n.index <= last}

    def draw(inode: Inode) -> bytes:
        if inode.host not in struck:
            return _everything(inode)
        content = bytearray(inode.sure)
        for change in inode.unsure:
            if change.index < last:
                change.apply(content)
            elif change.index == last and change.data is not None:
                end = change.offset + rng.randrange(len(change.data) + 1)
                cut = max(end // SECTOR * SECTOR - change.offset, 0)
                torn = change.data[:cut]
                content.extend(bytes(max(change.offset + cut - len(content), 0)))
                content[change.offset : change.offset + cut] = torn
        return bytes(content)

    return _image(disk.names(chosen), disk.root, draw)


def _aged(rng: random.Random, share: float, struck: set[str]) -> Draw:
    def age(_: int, changes: int) -> int:
        """How many of a page's changes it has seen."""
        if rng.random() < share:
            return changes
        return rng.randrange(changes + 1)

    def draw(inode: Inode) -> bytes:
        if inode.host not in struck:
            return _everything(inode)
        if not inode.unsure:
            return bytes(inode.sure)
        sizes = [len(inode.sure), *(change.size_after for change in inode.unsure)]
        size = sizes[-1] if rng.random() < share else rng.choice(sizes)
        content = _pages(inode, age, size)
        if rng.random() < 0.25:
            content = _torn(inode, content, rng)
        return content

    return draw


def _pages(inode: Inode, age: Callable[[int, int], int], size: int) -> bytes:
    """A file of `size` bytes, each page as old as `age(page, changes)` says."""
    content = bytearray(size)
    for page in range((size + PAGE - 1) // PAGE):
        start = page * PAGE
        changes = [change for change in inode.unsure if change.touches(page)]
        held = bytearray(PAGE)
        before = inode.sure[start : start + PAGE]
        held[: len(before)] = before
        for change in changes[: age(page, len(changes)) if changes else 0]:
            if change.data is None:
                cut = max(change.offset - start, 0)
                held[cut:] = bytes(PAGE - cut)
            else:
                low = max(change.offset, start)
                high = min(change.offset + len(change.data), start + PAGE)
                held[low - start : high - start] = change.data[
                    low - change.offset : high - change.offset
                ]
        content[start : start + PAGE] = held[: min(PAGE, size - start)]
    return bytes(content)


def _torn(inode: Inode, content: bytes, rng: random.Random) -> bytes:
    """One page that was cut off at a sector: its end is as it was before."""
    pages = (len(content) + PAGE - 1) // PAGE
    if not pages:
        return content
    page = rng.randrange(pages)
    edge = page * PAGE + rng.randrange(1, PAGE // SECTOR) * SECTOR
    end = min((page + 1) * PAGE, len(content))
    if edge >= end:
        return content
    old = bytes(inode.sure[edge:end]).ljust(end - edge, b"\0")
    return content[:edge] + old + content[end:]


def _everything(inode: Inode) -> bytes:
    content = bytearray(inode.sure)
    for change in inode.unsure:
        change.apply(content)
    return bytes(content)


def _hit(naming: Naming, struck: set[str]) -> bool:
    changed = naming.sets or naming.takes
    assert changed is not None
    return changed[2].host in struck


def _image(names: Names, root: Inode, draw: Draw) -> Image:
    content: dict[Inode, bytes] = {}
    files: dict[str, bytes | None] = {}
    for path, inode in walk(names, root):
        if inode.is_directory:
            files[path] = None
        else:
            if inode not in content:  # two names of one file show the same bytes
                content[inode] = draw(inode)
            files[path] = content[inode]
    return Image(files)


Make = Callable[[Disk], Image]


def kinds(*, seed: str, count: int) -> list[tuple[str, Make]]:
    """The fixed images of a power cut and `count` drawn ones, each with its name."""
    fixed: list[Make] = [nothing, names_only, bytes_only, whole]
    found = [(make.__name__, make) for make in fixed]
    for number in range(count):
        found.append((f"drawn {number}", partial(_drawn_by, seed=f"{seed}/{number}")))
    return found


def _drawn_by(disk: Disk, *, seed: str) -> Image:
    return drawn(disk, random.Random(seed))
