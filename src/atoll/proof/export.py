"""A version's weights as one safetensors file."""

from pathlib import Path

from atoll.blobs.base import Blobs
from atoll.errors import ConfigError, StateDamaged
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
        first = retention.replay_start(t, retention.storage_of(rounds, manifests))
        snapshots = t.snapshots.all()
    published = [r.round for r in rounds if r.state is RoundState.PUBLISHED]
    newest = published[-1] if published else 0
    wanted = newest if version is None else version
    if not first <= wanted <= newest:
        raise ConfigError(
            f"round={wanted} is not kept; this run can export rounds {first} to {newest}"
        )
    nearest = next((s for s in reversed(snapshots) if s.version <= wanted), None)
    start = 0 if nearest is None else nearest.version
    replay = Replay(ledger, blobs, manifests=manifests, layout=layout)
    found = replay.restore(nearest)
    if start == wanted:
        return found
    for replayed in replay.onward(found):
        difference = replayed.difference()
        if difference is not None:
            raise StateDamaged(
                f"round {replayed.record.round} replays to other bits ({difference}); "
                f"run `atoll audit --replay` and export an earlier round"
            )
        if replayed.record.round == wanted:
            break
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
    metadata = {
        "atoll.run": run.run_id,
        "atoll.round": str(found.number),
        "atoll.weights": which,
        "atoll.digest": getattr(found.digests, which).root,
    }
    flat = found.state.published if published else found.state.master
    weights_file.write(path, flat, layout, metadata=metadata)
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
    metadata = {
        "atoll.run": header.run_id,
        "atoll.round": str(header.round),
        "atoll.weights": "blob",
        "atoll.digest": str(header.result_digest),
    }
    weights_file.write(path, weights.load(blobs, names[0], layout), layout, metadata=metadata)
    return metadata
