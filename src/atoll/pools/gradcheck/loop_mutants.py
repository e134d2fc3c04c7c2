"""Mutants of a loop: a user's step cannot be edited, so what it left is, as a bug would have.

Each mutant says first what the comparison must find, computed from the reference's own shares. It
proves that the rows, weights and sizes of this file would show such a bug.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from atoll.pools.counted import Counted
from atoll.pools.gradcheck import compare as comparing
from atoll.pools.gradcheck import loop_ranks, tensors
from atoll.pools.gradcheck.loop_ranks import Left
from atoll.pools.gradcheck.loop_reference import Grads, LoopReference
from atoll.pools.gradcheck.outcome import ALL, Outcome
from atoll.pools.gradcheck.report import Kill, KillState
from atoll.pools.loop import rows_of

SEEN = 1e-6  # an error below it is taken for the same program
WITHIN = 1e-9  # of what was predicted
Lanes = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Mutant:
    """What a bug adds to the gradient, by lane; `ratio` where that makes it a multiple."""

    name: str
    change: Lanes
    ratio: float | None = None


def kills(reference: LoopReference, wanted: Outcome, left: Left, *, tolerance: float) -> list[Kill]:
    """The kill matrix's rows of one size; `left` must have been found right."""
    ranks = len(left.ranks)
    within = max(WITHIN, 10 * tolerance)
    found = loop_ranks.outcome(left)
    gradients = [
        _killed(mutant, str(ranks), wanted, found, within)
        for mutant in _mutants(reference, wanted, ranks)
    ]
    return [*gradients, _replica(left)]


def _mutants(reference: LoopReference, wanted: Outcome, ranks: int) -> Iterator[Mutant]:
    rows = reference.loop.num_rows
    every = rows_of(0, ranks=1, rows=rows)
    indices = [rows_of(rank, ranks=ranks, rows=rows) for rank in range(ranks)]
    yield Mutant("gradient / ranks", _scaled(wanted.grads, 1 / ranks - 1), 1 / ranks)
    with torch.no_grad():
        whole = reference.terms(every)
    shares = [reference.share(whole, index) for index in indices]
    for rank, share in enumerate(shares):
        yield Mutant(f"rank {rank} lost, its count kept", _scaled(share, -1.0))
    counts = reference.counts(indices)
    counted = [name for name, one in whole.items() if isinstance(one, Counted)]
    means = {name: _mean_of_means(name, shares, counts[name]) for name in counted}
    if means:  # a Through has no mean of its own to take
        yield Mutant("mean of the ranks' means", {ALL: _sum(list(means.values())), **means})
    twice = torch.cat([every[:-1], every[:1]])
    yield Mutant(
        "first row twice, last left out", _minus(reference.outcome(twice).grads, wanted.grads)
    )


def _mean_of_means(term: str, shares: Sequence[Mapping[str, Grads]], counts: list[int]) -> Grads:
    """What dividing by the rank's own count, then by the number of ranks, adds."""
    weighed = [
        _scaled({term: share[term]}, sum(counts) / (count * len(counts)) - 1 if count else 0.0)
        for share, count in zip(shares, counts, strict=True)
    ]
    return _sum([one[term] for one in weighed])


def _killed(mutant: Mutant, size: str, wanted: Outcome, found: Outcome, within: float) -> Kill:
    """Killed if every pair has the predicted error and ratio, and one at least is seen."""
    changed = {
        lane: _sum([grads, mutant.change.get(lane, {})]) for lane, grads in found.grads.items()
    }
    pairs = comparing.compare(wanted, replace(found, grads=changed), tolerance=SEEN)
    predicted = _errors(wanted, mutant)
    at = {(one.term, one.tensor): one for one in pairs if one.cosine is not None}
    is_as_predicted = all(
        key in at
        and abs(at[key].error - error) <= within
        and (mutant.ratio is None or abs((at[key].ratio or 0.0) - mutant.ratio) <= within)
        for key, error in predicted.items()
    )
    most = max(predicted.values(), default=0.0)
    seen = max((one.error for one in at.values()), default=0.0)
    told = "" if mutant.ratio is None else f"ratio {mutant.ratio:.4f}, "
    state: KillState = "killed" if most > SEEN else "listed"
    state = state if is_as_predicted else "survived"
    return Kill(mutant.name, size, f"{told}error {most:.3g}", f"error {seen:.3g}", state)


def _errors(wanted: Outcome, mutant: Mutant) -> dict[tuple[str, str], float]:
    """|change| / |reference| of every pair that is observed."""
    observed = comparing.compare(wanted, wanted, tolerance=SEEN)
    return {
        (one.term, one.tensor): float(
            mutant.change.get(one.term, {}).get(one.tensor, torch.zeros(())).double().norm()
            / wanted.grads[one.term][one.tensor].double().norm()
        )
        for one in observed
        if one.state == "right"
    }


def _replica(left: Left) -> Kill:
    """The last rank's first gradient has another bit; one rank alone has no replica."""
    ranks = len(left.ranks)
    name = next(iter(left.grads[ALL]))
    last = left.ranks[-1]
    gradient = left.grads[ALL][name].clone()  # which the last rank has too
    gradient.view(-1)[0] = torch.nextafter(gradient.view(-1)[0], torch.tensor(torch.inf))
    other = {**last.digests[ALL], name: tensors.digest(gradient)}
    changed = replace(last, digests={**last.digests, ALL: other})
    found = loop_ranks.differing([*left.ranks[:-1], changed])
    predicted = () if ranks == 1 else (name,)
    state: KillState = "killed" if predicted else "listed"
    state = state if found == predicted else "survived"
    return Kill(
        "a replica differs in one bit", str(ranks), _differing(predicted), _differing(found), state
    )


def _differing(names: Sequence[str]) -> str:
    return f"{', '.join(names)} differs" if names else "nothing differs"


def _scaled(lanes: Lanes, factor: float) -> dict[str, Grads]:
    return {
        lane: {name: factor * one for name, one in grads.items()} for lane, grads in lanes.items()
    }


def _minus(lanes: Lanes, others: Lanes) -> dict[str, Grads]:
    return {lane: _sum([lanes[lane], _scaled(others, -1.0)[lane]]) for lane in lanes}


def _sum(parts: Sequence[Mapping[str, Tensor]]) -> Grads:
    found: Grads = {}
    for part in parts:
        for name, one in part.items():
            found[name] = found[name] + one if name in found else one
    return found
