"""The program whose system calls are recorded; it says in the trace what it has promised.

    program.py ROOT MARKS SYNCHRONOUS

Loads everything, prints `ready`, waits for a line, then runs with ROOT as the only place it writes
to. MARKS, outside ROOT, gets one JSON line for everything that somebody was told is safe, and one
before every sync with the line of source that asked for it. SYNCHRONOUS is the ledger's: FULL as in
production, or OFF.

Production code is wrapped from outside and knows nothing of it.
"""

import ctypes
import datetime
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atoll.blobs import owner
from atoll.blobs.directory import DirectoryBlobs
from atoll.coordinator import boot
from atoll.coordinator.service import Coordinator
from atoll.island.state.store import IslandStore
from atoll.launch import state
from atoll.layout import byte_view
from atoll.ledger.sqlite import connect
from atoll.ledger.sqlite import database as sqlite_database
from atoll.proof import export
from atoll.simulate.cluster import Outage
from atoll.simulate.link import MemoryLink
from atoll.versions import recorded, weights_file
from atoll.wire import certificate
from tests.faults.power import damaged, gatherers, machines, ranks, sites
from tests.faults.power.marks import Marks
from tests.faults.power.promises import sha256_of

PR_SET_PTRACER = 0x59616D61
PTRACER_ANY = -1
# The real 4 MiB of log are more than a short run writes: a checkpoint happens only at the end.
CHECKPOINT_BYTES = 60 * 4096


def tell_sites(marks: Marks) -> None:
    """Every sync of ours is announced in the same thread with the place that asked for it."""

    def telling(real: Callable[[int], None]) -> Callable[[int], None]:
        def wrapped(fd: int) -> None:
            marks.write(site=sites.caller())
            real(fd)

        return wrapped

    for name in ("fsync", "fdatasync"):
        setattr(os, name, telling(getattr(os, name)))


def tell_promises(marks: Marks) -> None:
    """What a call's return promises is marked right after it."""

    def after(owner: Any, name: str, promise: Callable[..., dict[str, object]]) -> None:
        real = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            marks.write(**promise(result, *args, **kwargs))
            return result

        setattr(owner, name, wrapped)

    after(
        boot,
        "create_or_check",
        lambda manifest, *_, **__: {"machine": "coordinator", "created": manifest.sha256()},
    )
    after(
        Coordinator,
        "register",
        lambda reply, _, request, **__: {
            "machine": "coordinator",
            "joined": request.worker_id,
            "incarnation": reply.incarnation,
        },
    )
    after(
        MemoryLink,
        "upload",
        lambda receipt, _, identity, frame, **__: {
            "machine": "coordinator",
            "received": identity.worker_id,
            "receipt": receipt,
            "sha256": frame.sha256,
        },
    )
    after(
        IslandStore,
        "set_identity",
        lambda _, store, identity: {
            "machine": store.directory.name,
            "identity": [identity.worker_id, identity.island_key],
        },
    )
    after(IslandStore, "complete", lambda _, store, path, *__: saved(store, path, "saved"))
    after(
        IslandStore,
        "promote",
        lambda _, store, number: saved(store, store.directory / f"checkpoint-{number}", "promoted"),
    )


def saved(store: IslandStore, path: Path, what: str) -> dict[str, object]:
    """The files that another life takes up from `path`, by hash."""
    hashes = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(path.iterdir())
    }
    return {
        "machine": store.directory.name,
        what: int(path.name.rpartition("-")[2]),
        "files": hashes,
    }


def run(root: Path, marks: Marks) -> None:
    """Three rounds with an outage in between, then what an operator does with a run."""
    outage = Outage(version=2, seconds=1.0)
    simulated = machines.run(
        root,
        progress=lambda status: marks.write(
            machine="coordinator", published=status.version, digest=status.digest
        ),
        outage=outage,
    )
    marks.write(machine="coordinator", finished=simulated.digest)
    keep_things(root, marks)
    ranks.save_steps(root, marks)
    marks.write(machine="gatherer", gathered=gatherers.run(root, marks))
    blobs_alone(root, marks)
    ledger_elsewhere(root, marks)
    damaged.repair_twice(root, marks)
    damaged.start_over(root, marks)


def keep_things(root: Path, marks: Marks) -> None:
    """A copy of the ledger, exported weights and a certificate: each is told to an operator."""
    home, kept = root / machines.COORDINATOR, root / machines.OPERATOR
    with state.at_rest(home) as (ledger, blobs):
        ledger.copy_to(str(kept / "copy.sqlite"))
        marks.write(machine="operator", copied=ledger.state_hash())
        manifest = recorded.manifest_of(ledger)
        assert manifest is not None
        layout = recorded.layout_of(manifest)
        export.export(ledger, blobs, kept / "weights.safetensors", layout=layout)
        weights = (kept / "weights.safetensors").read_bytes()
        marks.write(machine="operator", exported=hashlib.sha256(weights).hexdigest())
        streamed = kept / "streamed.safetensors"
        flat = weights_file.read(kept / "weights.safetensors", layout)
        pieces = (byte_view(part) for part in flat.split(1000))
        weights_file.write_pieces(streamed, pieces, layout, metadata={"atoll.weights": "master"})
        marks.write(machine="operator", streamed=sha256_of(streamed))
    now = datetime.datetime.fromtimestamp(machines.WALL, tz=datetime.UTC)
    marks.write(
        machine="coordinator", pinned=certificate.own(home, host="127.0.0.1", now=now).fingerprint
    )


def blobs_alone(root: Path, marks: Marks) -> None:
    """Blobs without a ledger beside them, whose syncs of a shared directory would hide theirs."""
    store = DirectoryBlobs(root / machines.STORE)
    for text in (b"one", b"two", b"one"):
        with_writer = store.writer(expect_bytes=1 << 13)
        with_writer.write(text * 1000)
        marks.write(machine="store", stored=with_writer.commit().sha256)
    store.close()


def ledger_elsewhere(root: Path, marks: Marks) -> None:
    """A state directory that knows its ledger and blobs only by address."""
    far = root / machines.ELSEWHERE.parts[0]
    addresses = state.Addresses(ledger=f"sqlite:///{far / 'far.sqlite'}", blobs=str(far / "blobs"))
    with state.held(root / machines.ELSEWHERE, addresses):
        named = (far / "blobs" / owner.KEY).read_text()
        marks.write(machine="elsewhere", placed=addresses.ledger, owner=named)


def set_ledger(synchronous: str) -> None:
    """The production settings, a checkpoint more often, and perhaps no syncs."""
    setattr(sqlite_database, "CHECKPOINT_BYTES", CHECKPOINT_BYTES)  # noqa: B010  it is final
    pragmas = list(connect._PRAGMAS)
    if synchronous == "OFF":
        pragmas.remove("PRAGMA synchronous = FULL")
        # Right after the lock is chosen, or the change to WAL would still be synced.
        place = pragmas.index("PRAGMA locking_mode = EXCLUSIVE") + 1
        pragmas.insert(place, "PRAGMA synchronous = OFF")
    setattr(connect, "_PRAGMAS", tuple(pragmas))  # noqa: B010  its type has a fixed length


def main() -> None:
    root, path, synchronous = sys.argv[1:]
    # Where a process may trace only its children (Yama), the tracer is our sibling.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PTRACER, PTRACER_ANY, 0, 0, 0)
    set_ledger(synchronous)
    # A copy made inside the kernel does not say in the trace what it wrote.
    setattr(shutil, "_USE_CP_SENDFILE", False)  # noqa: B010  no stub knows it
    with tempfile.TemporaryDirectory() as elsewhere:
        machines.run(Path(elsewhere))  # what is imported at first use is of no interest
        gatherers.run(Path(elsewhere), gatherers.Unmarked())
    print("ready", flush=True)
    sys.stdin.readline()
    marks = Marks(Path(path))
    tell_sites(marks)
    tell_promises(marks)
    run(Path(root), marks)


if __name__ == "__main__":
    main()
