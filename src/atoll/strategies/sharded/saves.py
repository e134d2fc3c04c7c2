"""A rank's saves on its own disk: its shard of a step, and that of the rank before it.

    save-STEP-GROUP/own            weights, first and second moments of the rank's part (`holding`)
    save-STEP-GROUP/own.chunks     the hash of every chunk of it
    save-STEP-GROUP/predecessor    the same of the rank before, and its .chunks
    save-STEP-GROUP/complete.json  who saved it; written last, so that without it nothing counts

A save is known by the hash of its chunks' hashes, its *root*: whoever has the root can check any
range of the save, chunk by chunk, wherever it is read from. What a crash left half written is
dropped when the directory is opened.
"""

import hashlib
import json
import os
import re
import shutil
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atoll import files as filesystem
from atoll import open_files
from atoll.errors import BlobChanged, BlobMissing, Exhausted, StoreError
from atoll.protocol.sharded import HeldSave
from atoll.rows import Late

CHUNK_BYTES = 1 << 20
HASH_BYTES = 32
HEAD_BYTES = 8  # the save's size
KEPT = 2  # complete pairs beside the newest one that is known to be consistent
_OWN_NAME = re.compile("save-[0-9]+-[0-9]+")
MAX_META_BYTES = 1 << 20  # with `protocol.sharded.MAX_LATE` late ranks in it
OWN, PREDECESSOR = "own", "predecessor"
_WAY_OUT = (
    "see that the disk has room and works, then start this island again: it goes on from what the "
    "other ranks hold, or from the checkpoint"
)

Reader = Callable[[int, int], Iterable[bytes | memoryview]]  # the bytes [start, stop) of a save


@dataclass(frozen=True)
class Chunks:
    """The hashes of a save's chunks, in order."""

    nbytes: int
    hashes: bytes

    @classmethod
    def of(cls, data: Iterable[bytes | memoryview]) -> "Chunks":
        """Those of a save's bytes, however they come in pieces."""
        nbytes, found = 0, bytearray()
        for chunk in _chunked(data):
            nbytes += len(chunk)
            found += hashlib.sha256(chunk).digest()
        return cls(nbytes, bytes(found))

    @classmethod
    def decoded(cls, data: bytes, *, nbytes: int) -> "Chunks":
        """What `encoded` gave, of a save that must have `nbytes`; BlobChanged for anything else."""
        told = int.from_bytes(data[:HEAD_BYTES], "little")
        if len(data) != encoded_bytes(nbytes) or told != nbytes:
            raise BlobChanged(
                f"the hashes of a save of {nbytes} bytes came as {len(data)} bytes for one of "
                f"{told}; it is not the save that was asked for"
            )
        return cls(nbytes, data[HEAD_BYTES:])

    def encoded(self) -> bytes:
        """As it is kept beside the save and sent to others."""
        return self.nbytes.to_bytes(HEAD_BYTES, "little") + self.hashes

    @property
    def root(self) -> str:
        """What the save is known by."""
        return hashlib.sha256(self.encoded()).hexdigest()

    def check_root(self, root: str) -> None:
        """BlobChanged when these are the hashes of another save."""
        if self.root != root:
            raise BlobChanged(
                f"the hashes that came for save {root[:16]} are those of {self.root[:16]}; its "
                f"holder's disk is damaged, so read it from another"
            )

    def read(self, reader: Reader, start: int, stop: int) -> Iterator[memoryview]:
        """The bytes [start, stop), each from a chunk that was read whole and is right.

        BlobChanged for the first chunk that is not; what came before it stands.
        """
        if start >= stop:
            return
        first, last = start // CHUNK_BYTES, (stop - 1) // CHUNK_BYTES
        end = min((last + 1) * CHUNK_BYTES, self.nbytes)
        chunks = _chunked(reader(first * CHUNK_BYTES, end))
        for number in range(first, last + 1):
            chunk = next(chunks, memoryview(b""))
            self._check(number, chunk)
            base = number * CHUNK_BYTES
            yield chunk[max(0, start - base) : min(len(chunk), stop - base)]

    def _check(self, number: int, chunk: memoryview) -> None:
        wanted = self.hashes[number * HASH_BYTES : (number + 1) * HASH_BYTES]
        if hashlib.sha256(chunk).digest() != wanted:
            raise BlobChanged(
                f"chunk {number} of save {self.root[:16]} came with {len(chunk)} bytes that are "
                f"not the saved ones; its holder's disk is damaged, so read it from another"
            )


def encoded_bytes(nbytes: int) -> int:
    """How long the encoded hashes of a save of `nbytes` are."""
    return HEAD_BYTES + HASH_BYTES * -(-nbytes // CHUNK_BYTES)


def _chunked(data: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    """The same bytes in chunks; a piece that is a chunk already is not copied."""
    rest = bytearray()
    for piece in data:
        view = memoryview(piece)
        while len(view) > 0:
            if not rest and len(view) >= CHUNK_BYTES:
                yield view[:CHUNK_BYTES]
                view = view[CHUNK_BYTES:]
                continue
            take = min(CHUNK_BYTES - len(rest), len(view))
            rest += view[:take]
            view = view[take:]
            if len(rest) == CHUNK_BYTES:
                yield memoryview(rest)
                rest = bytearray()
    if rest:
        yield memoryview(rest)


class OpenShard:
    """A shard that stays readable when its pair is dropped.

    Closed with `close`, or when nobody can read it any more: an upload that is given up before it
    begins has nobody to close it, and the disk would keep the dropped shard.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with filesystem.naming("open", path):
            self._fd = filesystem.SYSTEM.open(path)
        self._closed = weakref.finalize(self, os.close, self._fd)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Exactly `nbytes` from `offset`."""
        buffer = bytearray(nbytes)
        filesystem.read_into(self._fd, offset, memoryview(buffer), path=self._path)
        return bytes(buffer)

    def close(self) -> None:
        """Nobody reads it any more; harmless when repeated."""
        self._closed()


@dataclass(frozen=True)
class Notes:
    """What a save remembers of its round so far, for those who go on from it."""

    loss_sum: float = 0.0  # of all ranks and steps of the round
    tokens: int = 0  # that it is summed over
    late: tuple[Late, ...] = ()  # whose rows are in none of its steps, by step and rank


NO_NOTES = Notes()


@dataclass(frozen=True)
class StoredShard:
    """One shard of a save on this disk."""

    path: Path

    @property
    def nbytes(self) -> int:
        with filesystem.naming("look at", self.path):
            return self.path.stat().st_size

    def read(self, start: int, stop: int) -> Iterator[bytes]:
        """The bytes [start, stop), a chunk at a time; BlobMissing once it was dropped."""
        try:
            fd = filesystem.SYSTEM.open(self.path)
        except FileNotFoundError as exc:
            raise BlobMissing(f"the save {str(self.path)!r} was dropped; a newer one is") from exc
        with os.fdopen(fd, "rb"):
            while start < stop:
                buffer = bytearray(min(CHUNK_BYTES, stop - start))
                filesystem.read_into(fd, start, memoryview(buffer), path=self.path)
                yield bytes(buffer)
                start += len(buffer)

    def opened(self) -> OpenShard:
        """For somebody who reads it over a long time."""
        return OpenShard(self.path)

    @property
    def chunks_path(self) -> Path:
        """Where the hashes of its chunks are."""
        return self.path.with_name(self.path.name + ".chunks")

    def chunks(self) -> Chunks:
        """The hashes of its chunks, as they were written beside it."""
        with filesystem.naming("read", self.chunks_path), self.chunks_path.open("rb") as file:
            data = file.read(encoded_bytes(self.nbytes) + 1)
        return Chunks.decoded(data, nbytes=self.nbytes)


class Draft:
    """A pair that is being written; it counts for nothing before `complete`."""

    def __init__(self, directory: Path, meta: dict[str, Any]) -> None:
        self.directory = directory
        self._meta = meta
        self._roots: dict[str, str] = {}

    @property
    def step(self) -> int:
        return int(self._meta["step"])

    @property
    def own(self) -> StoredShard:
        return StoredShard(self.directory / OWN)

    def write_own(self, data: Iterable[bytes | memoryview]) -> None:
        """Hands the rank's own shard to the disk, without waiting for it."""
        _write(self.directory / OWN, data)

    def finish_own(self) -> Chunks:
        """Makes the own shard durable; the hashes of what was written."""
        shard = self.own
        chunks = Chunks.of(shard.read(0, shard.nbytes))
        self._finish(OWN, chunks)
        return chunks

    def write_predecessor(self, chunks: Chunks, reader: Reader) -> None:
        """Takes the shard of the rank before, every chunk checked, and makes it durable."""
        _write(self.directory / PREDECESSOR, chunks.read(reader, 0, chunks.nbytes))
        self._finish(PREDECESSOR, chunks)

    def _finish(self, name: str, chunks: Chunks) -> None:
        shard = StoredShard(self.directory / name)
        _write(shard.chunks_path, [chunks.encoded()])
        filesystem.sync(shard.path, way_out=_WAY_OUT)
        filesystem.sync(shard.chunks_path, way_out=_WAY_OUT)
        self._roots[name] = chunks.root

    def complete(self) -> HeldSave:
        """From now on the pair counts; the bytes it vouches for are on the disk before."""
        meta = {**self._meta, **self._roots}
        held, _ = _read_meta(meta)
        path = self.directory / "complete.json"
        # With its own name the directory's sync makes those of the shards sure. Where a power cut
        # keeps it and loses one of them, the pair is not whole, and nobody was told of it yet.
        filesystem.write_whole(path, json.dumps(meta).encode(), way_out=_WAY_OUT)
        filesystem.sync(self.directory.parent, way_out=_WAY_OUT)
        return held

    def drop(self) -> None:
        """Forgets what was written."""
        shutil.rmtree(self.directory, ignore_errors=True)


class Saves:
    """The pairs of one island, in a directory of their own. Thread-safe.

    One draft at a time: the thread that trains begins it and another completes it.
    """

    def __init__(self, directory: Path, *, run_id: str) -> None:
        self._directory = directory
        self._run_id = run_id
        self._lock = threading.Lock()
        filesystem.make_directories(directory.absolute())
        self._held: dict[tuple[int, int], HeldSave] = {}  # by step and group
        for path in directory.iterdir():
            held = self._known(path)
            if held is None and _OWN_NAME.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
            elif held is not None:
                self._held[held.step, held.group] = held

    def _known(self, path: Path) -> HeldSave | None:
        """The complete pair of this run in `path`; None: nothing that counts."""
        try:
            with open_files.scarce("read", path):
                meta = _loaded(path)
            held, _ = _read_meta(meta)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        is_ours = meta["run_id"] == self._run_id and path.name == _name(held)
        return held if is_ours and _is_whole(path, held) else None

    def begin(self, step: int, *, group: int, rank: int, notes: Notes = NO_NOTES) -> Draft:
        """An empty pair to be written."""
        path = self._directory / f"save-{step}-{group}"
        with self._lock:
            self._held.pop((step, group), None)
        shutil.rmtree(path, ignore_errors=True)  # of a try that was given up
        with filesystem.naming("make", path, way_out=_WAY_OUT):
            path.mkdir(mode=0o700)
        about = {"step": step, "group": group, "rank": rank, "run_id": self._run_id}
        return Draft(path, {**about, **asdict(notes)})

    def complete(self, draft: Draft) -> HeldSave:
        """Makes the draft count, beside the complete pair before it."""
        held = draft.complete()
        with self._lock:
            self._held[held.step, held.group] = held
        return held

    @property
    def held(self) -> tuple[HeldSave, ...]:
        """The complete pairs, newest first."""
        with self._lock:
            return tuple(self._held[key] for key in sorted(self._held, reverse=True))

    def find(self, root: str) -> StoredShard:
        """The shard that is known by `root`; BlobMissing when it is not here."""
        for held in self.held:
            for name, known in ((OWN, held.own), (PREDECESSOR, held.predecessor)):
                if known == root:
                    return StoredShard(self._directory / _name(held) / name)
        raise BlobMissing(f"save {root[:16]} is not on this rank's disk; it may be dropped already")

    def notes(self, step: int, roots: Sequence[str]) -> Notes | None:
        """What is remembered of the round with a save of `step` of these shards; None: not here.

        Shards that do not train are the same at every step, so a root alone does not tell.
        """
        for held in self.held:
            if held.step == step and {held.own, held.predecessor} <= set(roots):
                with suppress(OSError):
                    return _read_meta(_loaded(self._directory / _name(held)))[1]
        return None

    def discard(self, root: str) -> None:
        """Drops the pair with this shard, whose bytes turned out to be wrong."""
        self._drop(lambda held: root in (held.own, held.predecessor))

    def keep(self, *, consistent: int, group: int, also: Collection[int] = ()) -> None:
        """Drops what no group will go back to: all before the consistent step of this group.

        Of later ones only the newest stay, and those of the steps in `also`: others are not known
        to be whole anywhere. What a later group has saved is not touched.
        """
        later = [h for h in self.held if h.step > consistent and h.group == group][:KEPT]
        kept = {h.step for h in later} | {consistent, *also}
        self._drop(lambda held: held.group <= group and held.step not in kept)

    def went_back_to(self, step: int, *, group: int) -> None:
        """Drops what was saved of later steps: they will be made again, with other bits.

        Of `step` itself the pair stays that all went back to, which `group` saved (0: all stay):
        each group that dies at the end of a round has saved it anew, and nobody needs them all.
        """
        self._drop(
            lambda held: (
                held.step > step or (held.step == step and group != 0 and held.group != group)
            )
        )

    def _drop(self, is_over: Callable[[HeldSave], bool]) -> None:
        with self._lock:
            over = [key for key, held in self._held.items() if is_over(held)]
            for key in over:
                del self._held[key]
        for step, group in over:
            path = self._directory / f"save-{step}-{group}"
            # First what vouches for the rest: a crash in between leaves nothing that counts.
            with filesystem.naming("remove", path, way_out=_WAY_OUT):
                filesystem.SYSTEM.remove(path / "complete.json")
            shutil.rmtree(path, ignore_errors=True)


def _name(held: HeldSave) -> str:
    """Of the directory of a pair."""
    return f"save-{held.step}-{held.group}"


def _loaded(path: Path) -> dict[str, Any]:
    with (path / "complete.json").open("rb") as file:
        return dict(json.loads(file.read(MAX_META_BYTES)))


def _read_meta(meta: dict[str, Any]) -> tuple[HeldSave, Notes]:
    """What a complete pair says of itself; ValueError, KeyError or TypeError for anything else."""
    held = HeldSave.model_validate({name: meta[name] for name in HeldSave.model_fields})
    late = tuple((int(step), int(rank), int(size)) for step, rank, size in meta["late"])
    return held, Notes(float(meta["loss_sum"]), int(meta["tokens"]), late)


def _is_whole(path: Path, held: HeldSave) -> bool:
    """Whether both shards are there with their hashes; a removal that was cut off leaves less."""
    try:
        own, predecessor = (StoredShard(path / name).chunks() for name in (OWN, PREDECESSOR))
    except Exhausted:
        raise  # says nothing about what is stored
    except StoreError:
        return False
    return (own.root, predecessor.root) == (held.own, held.predecessor)


def _write(path: Path, data: Iterable[bytes | memoryview]) -> None:
    with filesystem.naming("write", path, way_out=_WAY_OUT):
        filesystem.SYSTEM.remove(path)
        with os.fdopen(filesystem.SYSTEM.create(path), "wb") as file:
            for piece in data:
                file.write(piece)
