"""What a value of many ranks is: a part of a sum, the same on all, the whole sum, or its mean.

    Partial      what one rank has of a sum; the only one that is added or reduced
    Replicated   what every rank of a group has alike; enters a sum by `once` alone
    Total        the sum over all, with the count over all: `reduce` of partials
    Mean         a total divided by its count, once, at the end; nothing takes it

Wrong ones are refused where they are made or used, by mypy too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Never, NoReturn

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from atoll.collectives.base import Collectives, Key
from atoll.errors import ProtocolError
from atoll.pools import provenance
from atoll.pools.provenance import Coverage, Provenance, Told
from atoll.sums.partial import PartialSum, check_count

LIMIT_BYTES = 64 << 10  # of what one rank says about its part


@dataclass(frozen=True, slots=True, eq=False)
class Partial(PartialSum):
    """What some ranks, mostly one, have of a sum, and which part of it that is.

    `+` takes another part of the same term and step, with the same unit and no row of an item in
    common. It has no mean: a part divided by its own count has another weight in the whole.
    """

    coverage: Coverage

    def __post_init__(self) -> None:
        _check_tensor(self.total)
        PartialSum.__post_init__(self)  # a class with slots has no bare super()
        if not self.coverage:
            raise ProtocolError(
                f"a partial sum over {self.unit!r} covers nothing; say of what it is"
            )
        object.__setattr__(self, "coverage", provenance.together(self.coverage))
        if self.count and all(one.is_empty for one in self.coverage):
            raise ProtocolError(
                f"{self.coverage[0]}: count={self.count} of {self.unit!r} comes from no row or no "
                f"item; say which it is of"
            )

    @property
    def term(self) -> str:
        return self.coverage[0].term

    @property
    def step(self) -> int:
        return self.coverage[0].step

    def __add__(self, other: "Partial") -> "Partial":  # type: ignore[override]  # of parts alone
        """The sum of both, in new memory; ProtocolError for what is no other part of this one."""
        _check_partial(other, "is added to")
        found = PartialSum(self.total, self.count, self.unit) + PartialSum(
            other.total, other.count, other.unit
        )
        return Partial(found.total, found.count, found.unit, (*self.coverage, *other.coverage))

    def __radd__(self, other: Never) -> NoReturn:
        """Refused: what stands on the left says not what it covers."""
        raise _refusal(other, "is added to")

    def mean(self) -> NoReturn:
        """Refused: `reduce` first."""
        raise ProtocolError(
            f"a partial sum of {self.term!r} over {self.unit!r} is not divided; reduce it, and "
            f"take the mean of the total"
        )


class _Unsummed:
    """What is never added."""

    __slots__ = ()

    def __add__(self, other: Never) -> NoReturn:
        raise _refusal(self, "is added to")

    def __radd__(self, other: Never) -> NoReturn:
        raise _refusal(self, "is added to")


@dataclass(frozen=True, slots=True, eq=False)
class Replicated(_Unsummed):
    """What every rank of a group computed alike, from the same things, and its count."""

    total: Tensor
    count: int
    unit: str
    provenance: Provenance

    def __post_init__(self) -> None:
        _check_tensor(self.total)
        check_count("count", self.count)


@dataclass(frozen=True, slots=True, eq=False)
class Total(_Unsummed):
    """The sum over all ranks of a group, and what it is over; the same bits on all of them."""

    total: Tensor
    count: int
    unit: str
    coverage: Coverage  # empty where ranks did not tell each other

    def mean(self) -> "Mean":
        """The one division; EmptySum where nothing was counted."""
        return Mean(PartialSum(self.total, self.count, self.unit).mean(), self.unit)


@dataclass(frozen=True, slots=True, eq=False)
class Mean(_Unsummed):
    """The end of a sum: to be looked at, or to step with."""

    value: Tensor
    unit: str


def once(replicated: Replicated, group: Collectives) -> Partial:
    """All of it on the group's first rank, zeros with a count of 0 on the others."""
    if not isinstance(replicated, Replicated):
        raise ProtocolError(
            f"a {type(replicated).__name__} is not what all ranks have alike; `once` takes a "
            f"Replicated"
        )
    own = replicated.provenance
    if group.rank == 0:
        return Partial(replicated.total, replicated.count, replicated.unit, (own,))
    nothing = Provenance.of(own.term, rank=own.rank, step=own.step, rows=(), items=())
    return Partial(torch.zeros_like(replicated.total), 0, replicated.unit, (nothing,))


def reduce(partial: Partial, group: Collectives, key: Key, *, is_checked: bool = True) -> Total:
    """The SUM over the ranks of a group of a term's parts, and of their counts as integers.

    All ranks call it; it waits for them. The parts tell each other what they are first, with the
    same key for "control": where units, terms, steps or shapes differ, or a row of an item is
    covered twice, all ranks raise the same ProtocolError and nothing is summed. Without
    `is_checked` the counts alone travel, 8 bytes, and whoever calls it answers for the rest; so
    must rows that are too scattered for `LIMIT_BYTES`.
    The total is not connected to the parts by autograd: that is `global_sum`.
    """
    _check_partial(partial, "is reduced as")
    if key.op == "control":
        raise ProtocolError(f"{key}: a reduction tells its counts under 'control'; give another op")
    words = replace(key, op="control")
    if is_checked:
        count, coverage = _agreed(partial, group, words)
    else:
        count, coverage = _counted(partial, group, words), ()
    total = partial.total.detach().clone(memory_format=torch.contiguous_format)
    group.all_reduce(key, total.view(-1)).wait()
    return Total(total, count, partial.unit, coverage)


class _Word(BaseModel):
    """What a rank says about its part."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    unit: str
    count: int
    shape: list[int]
    dtype: str
    coverage: list[Told]


def _agreed(partial: Partial, group: Collectives, key: Key) -> tuple[int, Coverage]:
    """The count and the coverage of all; raises the same on every rank."""
    own = _Word(
        unit=partial.unit,
        count=partial.count,
        shape=list(partial.total.shape),
        dtype=str(partial.total.dtype),
        coverage=[Told.of(one) for one in partial.coverage],
    )
    said = group.all_gather_bytes(key, own.model_dump_json().encode(), limit=LIMIT_BYTES)
    words = [_read(word, rank) for rank, word in enumerate(said)]
    first = words[0]
    for rank, word in enumerate(words):
        if (word.unit, word.shape, word.dtype) != (first.unit, first.shape, first.dtype):
            raise ProtocolError(
                f"{key}: rank {rank} has a sum over {word.unit!r} of shape {word.shape} and "
                f"{word.dtype}, rank 0 one over {first.unit!r} of shape {first.shape} and "
                f"{first.dtype}; all parts of a sum must be alike, and nothing was summed"
            )
    return sum(word.count for word in words), _covered(words)


def _covered(words: Sequence[_Word]) -> Coverage:
    return provenance.together([one.provenance() for word in words for one in word.coverage])


def _read(word: bytes, rank: int) -> _Word:
    try:
        found = _Word.model_validate_json(word)
    except ValidationError as exc:
        raise ProtocolError(
            f"rank {rank} says {len(word)} bytes about its part that cannot be read; all ranks of "
            f"a group must run the same program"
        ) from exc
    check_count(f"count of rank {rank}", found.count)
    return found


def _counted(partial: Partial, group: Collectives, key: Key) -> int:
    count = torch.tensor([partial.count])
    group.all_reduce(key, count).wait()
    return int(count)


def _check_tensor(total: object) -> None:
    if isinstance(total, (_Unsummed, PartialSum)):
        raise _refusal(total, "is put into")
    if not isinstance(total, Tensor):
        raise ProtocolError(f"a sum of type {type(total).__name__} is none; give a tensor")


def _check_partial(given: object, done: str) -> None:
    if not isinstance(given, Partial):
        raise _refusal(given, done)


_WAYS_OUT = {
    "Mean": "a mean is the end of a sum: add and reduce sums and counts, and divide once",
    "Total": "it is the sum over all ranks already, and would be counted once for each",
    "Replicated": "every rank has it, so it enters by `once`, which takes it from the first rank",
}


def _refusal(given: object, done: str) -> ProtocolError:
    name = type(given).__name__
    way = _WAYS_OUT.get(name, "a Partial says what it covers, and only that is summed")
    return ProtocolError(f"a {name} {done} a sum; {way}")
