"""A loop on a crew: what the ranks of one size are given, and the outcome of what they left."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from atoll.errors import ConfigError
from atoll.pools.gradcheck import loop_rank, tensors
from atoll.pools.gradcheck.crew import Crew
from atoll.pools.gradcheck.loading import Place
from atoll.pools.gradcheck.loop_reference import LoopReference
from atoll.pools.gradcheck.outcome import ALL, Outcome
from atoll.pools.loop import rows_of

ENTRY = f"{loop_rank.__name__}:run"
CLIP_NORM = "clip_norm"


@dataclass(frozen=True, slots=True)
class Told:
    """What one rank says: lane -> tensor -> digest, and what its step logged with all terms."""

    digests: Mapping[str, Mapping[str, str]]
    logged: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Left:
    """What all ranks of one size left: the first one's gradients, and what each says."""

    grads: Mapping[str, Mapping[str, Tensor]]
    ranks: Sequence[Told]


def lanes(reference: LoopReference) -> dict[str, dict[str, float]]:
    """Coefficients by lane: all terms, then each alone with the others at 0."""
    coeffs = reference.loop.coeffs
    alone = {lane: {t: c if t == lane else 0.0 for t, c in coeffs.items()} for lane in coeffs}
    return {ALL: coeffs, **alone}


def run(reference: LoopReference, place: Place, crew: Crew) -> Left:
    """Every lane of the user's step on the crew's ranks."""
    rows = reference.loop.num_rows
    indices = [rows_of(rank, ranks=crew.size, rows=rows) for rank in range(crew.size)]
    by_lane = lanes(reference)
    spec = {
        "path": str(place.path.resolve()),
        "name": place.name,
        "cwd": os.getcwd(),
        "paths": sys.path,
        "dtype": str(reference.loop.dtype).removeprefix("torch."),
        "rows": rows,
        "lanes": by_lane,
        "digests": [tensors.digest(reference.rows(index)) for index in indices],
    }
    with TemporaryDirectory(prefix="atoll-loop-") as name:
        folder = Path(name)
        save_file(reference.weights, folder / loop_rank.WEIGHTS)
        crew.run(ENTRY, spec, folder)
        grads = tensors.load_lanes(folder / loop_rank.GRADS, list(by_lane))
        return Left(grads, [_told(folder, rank) for rank in range(crew.size)])


def outcome(left: Left) -> Outcome:
    """Gradients and logs of the first rank that has them, and where the others' differ."""
    logging = [one.logged for one in left.ranks if one.logged is not None]
    first = logging[0] if logging else {}
    losses = dict(first.get("losses", {}))
    if "loss" in first:
        losses[ALL] = first["loss"]
    counts = {term: _whole(term, one) for term, one in first.get("counts", {}).items()}
    norms = {one[CLIP_NORM] for one in logging if CLIP_NORM in one}
    uneven = ("clip norm",) if len(norms) > 1 else ()
    return Outcome(
        left.grads, losses, counts, first.get(CLIP_NORM), (*differing(left.ranks), *uneven)
    )


def differing(ranks: Sequence[Told]) -> tuple[str, ...]:
    """Tensors that two ranks have different bits of after a step, in any lane."""
    first = ranks[0].digests
    return tuple(
        dict.fromkeys(
            name
            for lane, digests in first.items()
            for name, digest in digests.items()
            if any(one.digests[lane].get(name) != digest for one in ranks[1:])
        )
    )


def _told(folder: Path, rank: int) -> Told:
    found = json.loads(loop_rank.result_of(folder, rank).read_text())
    digests = {lane: said["digests"] for lane, said in found.items()}
    return Told(digests, found[ALL]["logged"])


def _whole(term: str, count: float) -> int:
    if count != int(count):
        raise ConfigError(
            f"@loop.step logged {count} as the count of {term!r}; counts are integers"
        )
    return int(count)
