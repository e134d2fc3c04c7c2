"""Partials of all ranks -> one result: a pure function, computed on every rank alike."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from atoll.codecs.topk.codec import TopK
from atoll.errors import ProtocolError
from atoll.gather.partial import Partial
from atoll.gather.result import Merged
from atoll.gather.settle import settled
from atoll.gather.state_dict import SliceSource, StateDict
from atoll.layout import Layout


def merge(
    partials: Iterable[Partial],
    *,
    primaries: Sequence[str],
    reserves: Collection[str] = (),
    base_version: int = 0,
    seconds: float = 0.0,
) -> Merged:
    """Unions of uids and sums of counts, no means of rates; see `settle` for a uid in two partials.

    ProtocolError unless every primary is reported, and nobody but primaries and reserves is.
    """
    parts = settled(partials)
    accepted = sorted((one for part in parts for one in part.accepted), key=lambda one: one.uid)
    skipped = sorted((one for part in parts for one in part.skipped), key=lambda one: one.uid)
    reported = {one.uid for one in accepted} | {one.uid for one in skipped}
    lost, strangers = set(primaries) - reported, reported - {*primaries, *reserves}
    if lost or strangers:
        raise ProtocolError(
            f"the ranks' results lack {sorted(lost)[:5]} and have {sorted(strangers)[:5]}, whom "
            f"nobody was given; each primary is reported, accepted or skipped"
        )
    return Merged(
        primaries=tuple(sorted(primaries)),
        accepted=tuple(accepted),
        skipped=tuple(skipped),
        global_steps=(base_version,) * len(accepted),
        time=seconds,
        parts=parts,
    )


def readable(
    merged: Merged,
    *,
    layout: Layout,
    codec: TopK,
    source: SliceSource,
    shared: SliceSource | None = None,
) -> Merged:
    """The result with a `state_dict` that is decoded from `source` when it is read.

    `shared` has the payloads of all ranks; without it `source` has.
    """
    return replace(
        merged,
        state_dict=StateDict(layout, codec, merged.uids, source),
        shared_state_dict=StateDict(layout, codec, merged.uids, shared or source),
    )
