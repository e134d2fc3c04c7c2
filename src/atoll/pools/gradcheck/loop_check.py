"""The check of a Loop: its step on gloo processes at each of its numbers of ranks."""

from collections.abc import Sequence
from dataclasses import replace

from atoll.errors import ConfigError
from atoll.pools.gradcheck import compare as comparing
from atoll.pools.gradcheck import loading, loop_counts, loop_mutants, loop_ranks
from atoll.pools.gradcheck.asked import Asked, Sizes
from atoll.pools.gradcheck.crew import Crews
from atoll.pools.gradcheck.defects import Run
from atoll.pools.gradcheck.loading import Place
from atoll.pools.gradcheck.loop_ranks import Left
from atoll.pools.gradcheck.loop_reference import LoopReference
from atoll.pools.gradcheck.outcome import Outcome, Size
from atoll.pools.gradcheck.report import Report
from atoll.pools.loop import TOLERANCES, Loop, check_ranks

RANKS = "ranks"


def check_loop(subject: object, place: Place | None, asked: Asked, crews: Crews) -> Report:
    """One step of the loop in every lane, at every size; mutants where it is right."""
    assert isinstance(subject, Loop), type(subject)
    if asked.ranks == "local":
        raise ConfigError(
            "ranks='local' is asked of a Loop, whose step speaks to torch.distributed; its ranks "
            "are gloo processes, so leave it out"
        )
    if place is None:
        raise ConfigError(
            "a Loop is loaded by its ranks from a file; make it at the top level of one"
        )
    # The file again, under the dtype of the check, as every rank loads it.
    loop: Loop = loading.load_named(place, Loop, dtype=subject.dtype)
    sizes = _sizes(loop, asked.sizes)
    with loading.default_dtype(loop.dtype):
        return _checked(LoopReference(loop), place, sizes, asked, crews)


def _checked(
    reference: LoopReference, place: Place, sizes: Sequence[int], asked: Asked, crews: Crews
) -> Report:
    tolerance = TOLERANCES[reference.loop.dtype]
    asked.progress("reference")
    wanted = reference.outcome()
    left: list[Left] = []
    for ranks in sizes:
        asked.progress(f"{ranks} ranks")
        left.append(loop_ranks.run(reference, place, crews.of(ranks)))
    counts = loop_counts.judged(reference, sizes)
    report = Report(
        str(place.path.name),
        tuple(_run(wanted, one, tolerance) for one in left),
        tolerance=tolerance,
        remarks=counts.remarks,
        no_verdicts=counts.no_verdicts,
    )
    if not asked.mutants:
        return report
    if report.defects:
        remark = "mutants were not tried: they change what a right step leaves"
        return replace(report, remarks=(*report.remarks, remark))
    asked.progress("mutants")
    kills = [
        kill
        for one in left
        for kill in loop_mutants.kills(reference, wanted, one, tolerance=tolerance)
    ]
    return replace(report, kills=tuple(kills))


def _run(wanted: Outcome, left: Left, tolerance: float) -> Run:
    ranks, found = len(left.ranks), loop_ranks.outcome(left)
    return Run(
        Size(str(ranks), {RANKS: ranks}),
        tuple(comparing.compare(wanted, found, tolerance=tolerance)),
        tuple(comparing.compare_logged(wanted, found, tolerance=tolerance)),
        found.differing,
        dict(wanted.counts),
    )


def _sizes(loop: Loop, asked: Sequence[Sizes] | None) -> Sequence[int]:
    if not asked:
        return loop.ranks
    found: list[int] = []
    for sizes in asked:
        ranks = sizes.get(RANKS)
        if set(sizes) != {RANKS} or not isinstance(ranks, int):
            raise ConfigError(f"sizes {dict(sizes)} are asked of a Loop; it has ranks=N alone")
        found.append(ranks)
    check_ranks(found, loop.num_rows)
    return found
