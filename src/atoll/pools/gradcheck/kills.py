"""Whether a mutant was seen, and seen as predicted: the whole table, its ones too."""

from collections.abc import Mapping

import torch
from torch import Tensor

from atoll.pools.gradcheck.mutants.base import (
    ONE,
    Differs,
    Facts,
    Gradient,
    Mutant,
    Prediction,
    Ratio,
    Structural,
    Table,
)
from atoll.pools.gradcheck.outcome import ALL, Outcome
from atoll.pools.gradcheck.report import Kill

SAME = 1e-12  # a predicted gradient that close to the reference's is the reference's
MET = 1e-9  # how close a table must be to the predicted one
SEEN = 1e-6  # what a structural mutant's error must be above, on one tensor or loss at least


def judged(mutant: Mutant, facts: Facts, reference: Outcome, found: Outcome, *, size: str) -> Kill:
    """One mutant at one size, by what its last step left."""
    table = _whole(facts, mutant.table(facts), reference)
    misses = [said for pair, told in table.items() if (said := _miss(pair, told, reference, found))]
    misses += _replicas(table, found)
    misses += _structural(table, reference, found)
    is_same = all(told == ONE for told in table.values())
    if misses:
        state = "survived"
    elif mutant.is_control:
        state = "held"
    else:
        state = "listed" if is_same else "killed"
    changes = _changes(facts, table)
    said = ", ".join(f"{term} {word}" for term, word in changes.items())
    return Kill(
        mutant=mutant.name,
        size=size,
        predicted=said or "the same program",
        found="; ".join(misses[:3]) if misses else "as predicted",
        state=state,  # type: ignore[arg-type] # one of the four
        changes=changes,
    )


def is_same(mutant: Mutant, facts: Facts, reference: Outcome) -> bool:
    """Whether a mutant is, by its own table, the right program at these sizes."""
    return all(told == ONE for told in _whole(facts, mutant.table(facts), reference).values())


def _whole(facts: Facts, table: Table, reference: Outcome) -> dict[tuple[str, str], Prediction]:
    """All pairs that are connected; a prediction that changes nothing is a one."""
    found: dict[tuple[str, str], Prediction] = {}
    for pair in facts.ways:
        if pair[1] not in reference.grads[pair[0]]:
            continue  # asked for, and not used
        told = table.get(pair, ONE)
        if isinstance(told, Gradient) and _apart(told.value, _of(reference, pair)) <= SAME:
            told = ONE
        found[pair] = told
    return found


def _miss(
    pair: tuple[str, str], told: Prediction, reference: Outcome, found: Outcome
) -> str | None:
    """In what a pair is not as predicted."""
    wanted, got = _of(reference, pair), _of(found, pair)
    if isinstance(told, Structural | Differs):
        return None  # judged over all of their pairs
    predicted = told.value if isinstance(told, Gradient) else told.value * wanted
    apart = float((got - predicted).norm() / wanted.norm())
    if apart <= MET * max(1.0, float(predicted.norm() / wanted.norm())):
        return None
    ratio = float((got * wanted).sum() / (wanted * wanted).sum())
    wish = f"{told.value:g}" if isinstance(told, Ratio) else "its share"
    return f"{pair[0]} on {pair[1]}: {wish} predicted, ratio {ratio:.6g}, {apart:.2g} apart"


def _replicas(table: Mapping[tuple[str, str], Prediction], found: Outcome) -> list[str]:
    """Replicas differ where that was predicted, and nowhere else."""
    wanted = {tensor for (_, tensor), told in table.items() if isinstance(told, Differs)}
    differing = set(found.differing)
    said = [f"{name}: replicas differ" for name in sorted(differing - wanted)]
    if wanted and not differing & wanted:
        said.append("replicas were to differ and do not")
    return said


def _structural(
    table: Mapping[tuple[str, str], Prediction], reference: Outcome, found: Outcome
) -> list[str]:
    errors = [
        _apart(_of(found, pair), _of(reference, pair))
        for pair, told in table.items()
        if isinstance(told, Structural)
    ]
    # A term that is linear in a value has the same gradient at another one, and logs another loss.
    terms = {pair[0] for pair, told in table.items() if isinstance(told, Structural)}
    errors += [
        abs(found.losses[term] - reference.losses[term]) / abs(reference.losses[term])
        for term in terms
        if term in found.losses and reference.losses[term] != 0
    ]
    if not terms or max(errors) > SEEN:
        return []
    return [f"largest error {max(errors):.2g}, predicted above {SEEN:g}"]


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def _of(outcome: Outcome, pair: tuple[str, str]) -> Tensor:
    term, tensor = pair
    found = outcome.grads[term].get(tensor)
    return torch.zeros_like(outcome.grads[ALL][tensor]) if found is None else found


def _changes(facts: Facts, table: Mapping[tuple[str, str], Prediction]) -> dict[str, str]:
    """What is predicted where it is not one, by term; by its parameters too where they differ."""
    found: dict[str, dict[str, dict[str, None]]] = {}
    for (term, tensor), told in table.items():
        words = found.setdefault(term, {}).setdefault(facts.modules[tensor][0], {})
        if told != ONE:
            words[_word(told)] = None
    said: dict[str, str] = {}
    for term, by_parameters in found.items():
        texts = {name: " or ".join(some) for name, some in by_parameters.items()}
        if len(set(texts.values())) == 1:
            texts = {"": next(iter(texts.values()))}
        said |= {
            f"{term} on {name}" if name else term: text for name, text in texts.items() if text
        }
    return said


def _word(told: Prediction) -> str:
    if isinstance(told, Ratio):
        return f"x {told.value:.4g}"
    return {Gradient: "reweighted", Structural: "another gradient", Differs: "replicas differ"}[
        type(told)
    ]
