"""What is wrong with the runs of a check, in sentences: one for each term on each tensor.

A sentence takes all sizes together, since only what fits at several of them is a name.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from atoll.pools.gradcheck import naming
from atoll.pools.gradcheck.compare import UNOBSERVED, Kind, Logged, Pair
from atoll.pools.gradcheck.naming import Reading
from atoll.pools.gradcheck.outcome import ALL, Size

NAMED_WITHIN = 1e-9
ROUNDINGS = 10  # of the tolerance: what a residual or a name may be off by in float32

T = TypeVar("T")

What = (
    Literal["scale", "not a scale", "dead", "unobserved", "leak", "not finite", "replicas"] | Kind
)


@dataclass(frozen=True, slots=True)
class Run:
    """One step at one size, compared."""

    size: Size
    pairs: tuple[Pair, ...]
    logged: tuple[Logged, ...] = ()
    differing: tuple[str, ...] = ()
    counts: Mapping[str, int] | None = None  # the reference's
    step: int = 1


@dataclass(frozen=True, slots=True)
class Defect:
    """One thing that is wrong; `name` is the expression that its ratio was named by."""

    what: What
    term: str  # empty where it is of no one term
    tensor: str  # empty where it is of no one tensor
    sentence: str
    name: str | None = None


def defects(runs: Sequence[Run], *, tolerance: float) -> list[Defect]:
    """Of the first step that shows each; `runs` of one step are its sizes."""
    found: dict[tuple[str, str, str], Defect] = {}
    for step in dict.fromkeys(run.step for run in runs):
        at = [run for run in runs if run.step == step]
        for one in _of_step(at, max(NAMED_WITHIN, ROUNDINGS * tolerance)):
            found.setdefault(_subject(one), one)
    return list(found.values())


def _subject(defect: Defect) -> tuple[str, str, str]:
    """What it is about: a pair is told once, however it is wrong in later steps."""
    is_pair = defect.term != "" and defect.tensor != ""
    return ("" if is_pair else defect.what, defect.term, defect.tensor)


def _of_step(runs: Sequence[Run], bound: float) -> Iterator[Defect]:
    pairs = _by_key(runs, lambda run: ((one.term, one.tensor, one) for one in run.pairs))
    wrong = [key for key, at in pairs.items() if any(one.is_wrong for _, one in at)]
    explained = {tensor for term, tensor in wrong if term != ALL}
    for term, tensor in wrong:
        # What one term does alone, all terms together do too, mixed with the rest.
        if term != ALL or tensor not in explained:
            yield _of_pair(term, tensor, pairs[term, tensor], bound)
    logged = _by_key(runs, lambda run: ((one.kind, one.term, one) for one in run.logged))
    for (_, term), numbers in logged.items():
        if any(one.is_wrong for _, one in numbers):
            yield _of_numbers(numbers[0][1].kind, term, numbers, bound)
    for tensor in dict.fromkeys(name for run in runs for name in run.differing):
        labels = [run.size.label for run in runs if tensor in run.differing]
        said = f"{tensor}: replicas differ at {', '.join(labels)}{_step(runs[0])}"
        yield Defect("replicas", "", tensor, said)


def _by_key(
    runs: Sequence[Run], parts: Callable[[Run], Iterable[tuple[str, str, T]]]
) -> dict[tuple[str, str], list[tuple[Run, T]]]:
    found: dict[tuple[str, str], list[tuple[Run, T]]] = {}
    for run in runs:
        for first, second, part in parts(run):
            found.setdefault((first, second), []).append((run, part))
    return found


def _of_pair(term: str, tensor: str, at: Sequence[tuple[Run, Pair]], bound: float) -> Defect:
    about = f"{term} on {tensor}{_step(at[0][0])}"
    if any(one.state == "leak" for _, one in at):
        shown = ", ".join(f"{one.error:.3g} at {run.size.label}" for run, one in at if one.error)
        said = f"{about}: not connected in the reference, yet a gradient of norm {shown}"
        return Defect("leak", term, tensor, said)
    if any(math.isinf(one.error) for _, one in at):
        labels = ", ".join(run.size.label for run, one in at if math.isinf(one.error))
        said = f"{about}: the gradient holds NaN or infinity at {labels}"
        return Defect("not finite", term, tensor, said)
    if all(one.state != "wrong" for _, one in at):
        labels = ", ".join(run.size.label for run, one in at if one.state == "unobserved")
        said = (
            f"{about}: unobserved at {labels}, below {UNOBSERVED:g} of the tensor's whole "
            f"gradient, so no wrong scale would show; raise its coefficient or give rows and "
            f"weights on which it acts"
        )
        return Defect("unobserved", term, tensor, said)
    return _of_ratios(term, tensor, about, [(r, p) for r, p in at if p.ratio is not None], bound)


def _of_ratios(
    term: str, tensor: str, about: str, at: Sequence[tuple[Run, Pair]], bound: float
) -> Defect:
    ratios = [one.ratio or 0.0 for _, one in at]
    shown = f"{about}: ratio {_shown([run for run, _ in at], ratios)}"
    residuals = [one.residual for _, one in at]
    if all(ratio == 0 for ratio in ratios) and max(residuals) == 0:
        return Defect("dead", term, tensor, f"{shown}: no gradient of it arrives", "0")
    if any(left > bound * max(1.0, abs(k)) for left, k in zip(residuals, ratios, strict=True)):
        said = f"not a scale: ranks are weighed unevenly, residual {_range(residuals)}"
        return Defect("not a scale", term, tensor, f"{shown}: {said}")
    reading = _read([run for run, _ in at], ratios, term, bound)
    return Defect("scale", term, tensor, shown + _called(reading), reading.text)


def _of_numbers(kind: Kind, term: str, at: Sequence[tuple[Run, Logged]], bound: float) -> Defect:
    about = f"{kind} of {term} as logged" if term else kind
    about += _step(at[0][0])
    usable = [(run, one.ratio) for run, one in at if one.ratio is not None]
    if len(usable) < len(at) or kind == "count":
        shown = ", ".join(f"{one.found:g} at {run.size.label}" for run, one in at if one.is_wrong)
        said = f"{about}: {shown} instead of {at[0][1].wanted:g}"
        return Defect(kind, term, "", said)
    runs, ratios = [run for run, _ in usable], [ratio for _, ratio in usable]
    reading = _read(runs, ratios, term, bound)
    if kind == "clip norm" and not _is_product(reading):
        squared = _read(runs, [ratio**2 for ratio in ratios], term, bound)
        if _is_product(squared):
            rooted = tuple(f"sqrt({one})" for one in squared.readings)
            reading = Reading(squared.text and rooted[0], rooted)
    said = f"{about}: ratio {_shown(runs, ratios)}{_called(reading)}"
    return Defect(kind, term, "", said, reading.text)


def _read(runs: Sequence[Run], ratios: Sequence[float], own: str, bound: float) -> Reading:
    counts = [run.counts or {} for run in runs]
    sizes = [run.size for run in runs]
    return naming.name(ratios, sizes, counts=counts, own=own, tolerance=bound)


def _is_product(reading: Reading) -> bool:
    """Of sizes, counts and integers; else it is nothing, or just a number."""
    return any("." not in one for one in reading.readings)


def _called(reading: Reading) -> str:
    if reading.text:
        return f" = {reading.text}"
    if reading.readings:
        several = " or ".join(reading.readings)
        return f", which these sizes read as {several}; run another size to tell"
    return "; no product of sizes and counts fits at all of them"


def _shown(runs: Sequence[Run], ratios: Sequence[float]) -> str:
    return ", ".join(
        f"{ratio:.4f} at {run.size.label}" for run, ratio in zip(runs, ratios, strict=True)
    )


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2g}", f"{max(values):.2g}"
    return low if low == high else f"{low} to {high}"


def _step(run: Run) -> str:
    return f" in step {run.step}" if run.step > 1 else ""
