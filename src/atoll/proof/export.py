"""A version's weights as one safetensors file."""

from pathlib import Path

from torch import Tensor

from atoll.blobs.base import Blobs
from atoll.errors import ConfigError
from atoll.layout import Layout
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import RoundState
from atoll.proof import retention
from atoll.versions import weights, weights_file
from atoll.versions.manifests import Manifests
from atoll.versions.replay import Replay, Version
from atoll.wire import frame


def version_at(ledger: Ledger, blobs: Blobs, *, layout: Layout, version: int | None) -> Version:
    """The weights after `version` (None: the newest), from the nearest snapshot before it."""
    with ledger.reading() as t:
        manifests, rounds = Manifests(t.manifests.all()), t.rounds.all()
        first = retention.replay_start(t, retention.storage_of(t))
        snapshots = t.snapshots.all()
    published = [r.round for r in rounds if r.state is RoundState.PUBLISHED]
    newest = published[-1] if published else 0
    wanted = newest if version is None else version
    if not first <= wanted <= newest:
        raise ConfigError(
            f"round={wanted} is not kept; this run can export rounds {first} to {newest}"
        )
    nearest = next((s for s in reversed(snapshots) if s.version <= wanted), None)
    replay = Replay(ledger, blobs, manifests=manifests, layout=layout)
    found = replay.restore(nearest)
    replay.follow(found, last=wanted)
    return found


def export(
    ledger: Ledger,
    blobs: Blobs,
    path: Path,
    *,
    layout: Layout,
    version: int | None = None,
    published: bool = False,
) -> dict[str, str]:
    """Writes θ (or θ̂ with `published`) as safetensors; returns the metadata written with it."""
    found = version_at(ledger, blobs, layout=layout, version=version)
    with ledger.reading() as t:
        run = t.run.get()
    assert run is not None
    which = "published" if published else "master"
    digest = getattr(found.digests, which).root
    flat = found.state.published if published else found.state.master
    return _write(path, flat, layout, (run.run_id, found.number, which, digest))


def export_blob(blobs: Blobs, sha256: str, path: Path) -> dict[str, str]:
    """Writes one blob of whole weights as safetensors; needs no ledger.

    `sha256` may be the beginning of a name that only one blob has.
    """
    names = [ref.sha256 for ref in blobs.stored() if ref.sha256.startswith(sha256)]
    if len(names) != 1:
        raise ConfigError(
            f"blob={sha256!r} is the beginning of {len(names)} blobs' names; it must be of one"
        )
    with blobs.open(names[0]) as reader:
        header, _ = frame.read_preamble(reader)
    if header.kind != "weights" or header.tensors is None:
        raise ConfigError(
            f"blob {names[0]} holds {header.kind!r}"
            + ("" if header.tensors else " without the table of its tensors")
            + "; only whole weights with that table can be written without a ledger"
        )
    layout = Layout.of((name, shape, dtype) for name, dtype, shape in header.tensors)
    flat = weights.load(blobs, names[0], layout)
    said = (header.run_id, header.round, "blob", header.result_digest)
    return _write(path, flat, layout, said)


def _write(path: Path, flat: Tensor, layout: Layout, said: tuple[object, ...]) -> dict[str, str]:
    """Writes the file with what is `said` about it: run, round, which weights, and their digest."""
    names = ("atoll.run", "atoll.round", "atoll.weights", "atoll.digest")
    metadata = dict(zip(names, map(str, said), strict=True))
    weights_file.write(path, flat, layout, metadata=metadata)
    return metadata
