"""A version's weights as one safetensors file."""

from pathlib import Path

from torch import Tensor

from atoll.blobs.base import Blobs
from atoll.errors import ConfigError
from atoll.layout import Layout
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import RoundState
from atoll.proof import retention
from atoll.strategies import registry
from atoll.versions import parts, weights, weights_file
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
    with ledger.reading() as t:
        run, first = t.run.get(), Manifests(t.manifests.all()).first
    assert run is not None
    if first.any_strategy.by_step:
        return _export_checkpoint(ledger, blobs, path, layout=layout, version=version)
    found = version_at(ledger, blobs, layout=layout, version=version)
    which = "published" if published else "master"
    digest = getattr(found.digests, which).root
    flat = found.state.published if published else found.state.master
    return _write(path, flat, layout, (run.run_id, found.number, which, digest))


def _export_checkpoint(
    ledger: Ledger, blobs: Blobs, path: Path, *, layout: Layout, version: int | None
) -> dict[str, str]:
    """Streams the weights of a sharded run's checkpoint, or its initial ones, into a file."""
    with ledger.reading() as t:
        run, manifests = t.run.get(), Manifests(t.manifests.all())
        kept = {c.round: c for c in retention.kept_checkpoints(t, retention.storage_of(t))}
        digests = {r.round: r.master_digest for r in t.rounds.all()}
    assert run is not None
    wanted = max(kept, default=0) if version is None else version
    if wanted and wanted not in kept:
        raise ConfigError(
            f"round={wanted} is not kept; this run can export rounds {sorted({0, *kept})}"
        )
    if wanted:
        asked = registry.sharded(manifests.of_round(wanted).manifest)
        pieces, digest = parts.weights_of(blobs, kept[wanted].blobs, asked, layout), digests[wanted]
    else:
        pieces = weights.pieces(blobs, run.initial_sha256, layout)
        digest = manifests.first.manifest.model.initial_digest
    metadata = _metadata((run.run_id, wanted, "master", digest))
    weights_file.write_pieces(path, pieces, layout, metadata=metadata)
    return metadata


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
    metadata = _metadata((header.run_id, header.round, "blob", header.result_digest))
    weights_file.write_pieces(
        path, weights.pieces(blobs, names[0], layout), layout, metadata=metadata
    )
    return metadata


def _write(path: Path, flat: Tensor, layout: Layout, said: tuple[object, ...]) -> dict[str, str]:
    """Writes the file with what is `said` about it: run, round, which weights, and their digest."""
    metadata = _metadata(said)
    weights_file.write(path, flat, layout, metadata=metadata)
    return metadata


def _metadata(said: tuple[object, ...]) -> dict[str, str]:
    names = ("atoll.run", "atoll.round", "atoll.weights", "atoll.digest")
    return dict(zip(names, map(str, said), strict=True))
