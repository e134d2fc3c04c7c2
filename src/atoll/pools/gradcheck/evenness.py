"""What is to be said where ranks hold equal counts, so that a wrong count would look right."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WAY_OUT = "give rows of different length, or another number of rows or ranks"


@dataclass(frozen=True, slots=True)
class Evenness:
    """What is to be said of the counts: `no_verdicts` take the verdict away, remarks do not."""

    no_verdicts: tuple[str, ...]
    remarks: tuple[str, ...]


def evenness(
    held: Mapping[str, Sequence[Sequence[int]]], by_row: Mapping[str, Sequence[int]]
) -> Evenness:
    """Of each term's counts by rank at each size (`held`), and of single rows.

    With equal counts the mean of the ranks' means is the mean of all, so the commonest bug is
    right.
    """
    even = [name for name, sizes in held.items() if all(len(set(at)) == 1 for at in sizes)]
    hidden = [name for name in even if len(set(by_row[name])) > 1]
    alike = [name for name in even if name not in hidden]
    no_verdicts = []
    if hidden:
        no_verdicts.append(
            f"no verdict on counts: rows of {hidden} differ in count, but every rank has the same "
            f"count at every size; {WAY_OUT}"
        )
    if held and len(even) == len(held) and not hidden:
        no_verdicts.append(
            f"no verdict on counts: every rank has the same count of {alike}, of every term there "
            f"is; {WAY_OUT}"
        )
        alike = []
    remark = f"no verdict on counts: every rank has the same count of {alike}"
    return Evenness(tuple(no_verdicts), (remark,) if alike else ())
