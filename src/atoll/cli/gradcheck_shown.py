"""A report of `atoll gradcheck` for people: what is alike stands in one row or one sentence."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from rich.table import Table

from atoll.cli import output
from atoll.pools.gradcheck.compare import Pair
from atoll.pools.gradcheck.defects import Defect
from atoll.pools.gradcheck.report import Kill, KillState, Report

MAX_LINES = 30  # of one file; --json has all
APART = "not connected"
# How a mutant's prediction stands in a cell, and what that means.
CELLS = {"reweighted": "uneven", "another gradient": "other", "replicas differ": "differ"}
MEANINGS = {
    "x ": "x: times the right gradient",
    "uneven": "uneven: ranks weighed unevenly",
    "other": "other: another gradient",
    "differ": "differ: replicas differ",
    "same": "same: the same program at that size",
    "held": "held: a control, right for the rows that arrived",
}
STATES: Mapping[KillState, str] = {
    "killed": "killed as predicted",
    "listed": "the same program there",
    "held": "controls held",
    "survived": "survived",
}

Cells = tuple[str | None, ...]


def show(report: Report) -> None:
    """Ratios, what is wrong, mutants, the verdict."""
    if report.runs:
        output.console.print(ratios(report))
    found = list(lines(report))
    for line in found[:MAX_LINES]:
        output.say(f"  {line}")
    if len(found) > MAX_LINES:
        output.say(f"  and {len(found) - MAX_LINES} more; --json has all")
    if report.kills:
        output.console.print(mutants(report))
        legend = _legend(report.kills)
        if legend:
            output.say(f"  {legend}")
    output.say(verdict(report))


def verdict(report: Report) -> str:
    """The last line."""
    said = f"{report.subject}: {report.verdict}"
    if report.runs:
        said += f", worst error {report.worst_error:.2g} (bound {report.tolerance:g})"
    if report.kills:
        states = Counter(one.state for one in report.kills)
        told = ", ".join(f"{states[one]} {text}" for one, text in STATES.items() if states[one])
        said += f"; mutants by size: {told}"
    return said


def lines(report: Report) -> Iterator[str]:
    """`report.sentences`, with one for all tensors of which the same is said."""
    alike: dict[tuple[str, str], list[Defect]] = {}
    for defect in report.defects:
        said = defect.sentence.removeprefix(_head(defect))
        alike.setdefault((defect.term, said), []).append(defect)
    merged = [_merged(defects) for defects in alike.values()]
    told = {one.sentence for one in report.defects}
    notes = set(report.remarks)
    for sentence in report.sentences:
        if sentence in told:
            yield from merged
            merged = []
        else:
            yield f"note: {sentence}" if sentence in notes else sentence


def _head(defect: Defect) -> str:
    """How a sentence about a tensor begins."""
    if not defect.tensor:
        return ""
    return f"{defect.term} on {defect.tensor}" if defect.term else defect.tensor


def _merged(defects: Sequence[Defect]) -> str:
    first, head = defects[0], _head(defects[0])
    if len(defects) == 1:
        return first.sentence
    return f"{head} and {len(defects) - 1} more{first.sentence.removeprefix(head)}"


def ratios(report: Report) -> Table:
    """A row for each term and the tensors of a module that have the same ratios.

    A cell is that of the step in which it is furthest from 1; the lowest cosine and the largest
    error of the row are at its end.
    """
    sizes = list(dict.fromkeys(run.size.label for run in report.runs))
    found: dict[tuple[str, str], dict[str, list[Pair]]] = {}
    for run in report.runs:
        for pair in run.pairs:
            at = found.setdefault((pair.term, pair.tensor), {})
            at.setdefault(run.size.label, []).append(pair)
    rows: dict[tuple[str, str, Cells], dict[str, list[Pair]]] = {}
    for (term, tensor), at in found.items():
        cells = tuple(_cell(at[size]) if size in at else None for size in sizes)
        pairs = [pair for size in at.values() for pair in size]
        rows.setdefault((term, _module(tensor), cells), {})[tensor] = pairs
    shown = [
        (f"{term} on {_called(module, list(by_tensor))}", *cells, *_worst(by_tensor))
        for (term, module, cells), by_tensor in rows.items()
    ]
    return output.table(report.subject, ["ratio", *sizes, "cosine", "worst error"], shown)


def _module(tensor: str) -> str:
    return re.split(r"[.\[]", tensor, maxsplit=1)[0]


def _called(module: str, tensors: Sequence[str]) -> str:
    return tensors[0] if len(tensors) == 1 else f"{module} ({len(tensors)} tensors)"


def _cell(steps: Sequence[Pair]) -> str:
    known = [pair for pair in steps if pair.ratio is not None]
    if len(known) < len(steps):
        without = next(pair for pair in steps if pair.ratio is None)
        return {"apart": APART, "wrong": "not finite"}.get(without.state, without.state)
    return f"{max((pair.ratio or 0.0 for pair in known), key=lambda ratio: abs(ratio - 1)):.4f}"


def _worst(by_tensor: Mapping[str, Sequence[Pair]]) -> tuple[str | None, str]:
    pairs = [pair for some in by_tensor.values() for pair in some]
    cosines = [pair.cosine for pair in pairs if pair.cosine is not None]
    lowest = f"{min(cosines):.4f}" if cosines else None
    return lowest, f"{max(pair.error for pair in pairs):.1e}"


def mutants(report: Report) -> Table:
    """A row for each mutant, a column for each size: what was predicted, and found."""
    sizes = list(dict.fromkeys(one.size for one in report.kills))
    by_mutant: dict[str, dict[str, Kill]] = {}
    for one in report.kills:
        by_mutant.setdefault(one.mutant, {})[one.size] = one
    # Those of a Loop change what its step left, whatever the term.
    columns = ["changes"] if any(one.changes for one in report.kills) else []
    rows = []
    for name, at in by_mutant.items():
        changed = list(dict.fromkeys(one for kill in at.values() for one in kill.changes))
        cells = [_kill(at[size], changed) if size in at else None for size in sizes]
        rows.append((name, *([_changed(changed)] if columns else []), *cells))
    return output.table("mutants", ["mutant", *columns, *sizes], rows)


def _changed(changes: Sequence[str]) -> str:
    """Terms, and on which parameters: each of these once."""
    by_place: dict[str, list[str]] = {}
    for one in changes:
        term, _, parameters = one.partition(" on ")
        by_place.setdefault(parameters, []).append(term)
    return "; ".join(
        ", ".join(terms) + (f" on {place}" if place else "") for place, terms in by_place.items()
    )


def _kill(kill: Kill, changed: Sequence[str]) -> str:
    if kill.state != "killed":
        return {"listed": "same", "survived": "SURVIVED"}.get(kill.state, kill.state)
    if not kill.changes:
        return kill.predicted
    words = {name: CELLS.get(word, word) for name, word in kill.changes.items()}
    if len(words) < len(changed):
        return ", ".join(f"{name} {word}" for name, word in words.items())
    return ", ".join(dict.fromkeys(words.values()))


def _legend(kills: Sequence[Kill]) -> str:
    """What the words mean that stand in some cell."""
    cells = {
        _kill(kill, list(kill.changes)) for kill in kills if kill.changes or kill.state != "killed"
    }
    return "; ".join(text for word, text in MEANINGS.items() if any(word in one for one in cells))
