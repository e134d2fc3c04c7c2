"""The result of a check: right, wrong, refused or without a verdict, and why.

Prints nothing: the command line shows it, a test raises by it, `to_json` is for tools.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

from atoll.errors import GradientsWrong
from atoll.pools.gradcheck import defects as finding
from atoll.pools.gradcheck.defects import Defect, Run

Verdict = Literal["right", "wrong", "refused", "no verdict"]
KillState = Literal["killed", "listed", "survived", "held"]
EXIT_CODES: Mapping[Verdict, int] = {"right": 0, "wrong": 1, "refused": 2, "no verdict": 3}
# The worst first: what several files together come to.
ORDER: tuple[Verdict, ...] = ("wrong", "refused", "no verdict", "right")


@dataclass(frozen=True, slots=True)
class Kill:
    """One mutant at one size: what it was predicted to change, and what was found.

    `listed`: the same program at this size, as predicted. `survived` is also a mutant that was
    seen with another table than the predicted one. `changes` are the words of the prediction, by
    "term", or "term on parameters" where it is not the same for all of them.
    """

    mutant: str
    size: str
    predicted: str
    found: str
    state: KillState
    changes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """Of one file's check."""

    subject: str
    runs: tuple[Run, ...] = ()
    tolerance: float = 1e-12
    remarks: tuple[str, ...] = ()
    no_verdicts: tuple[str, ...] = ()  # why the check proves nothing, where it does not
    kills: tuple[Kill, ...] = ()
    refusal: str | None = None

    @cached_property
    def defects(self) -> tuple[Defect, ...]:
        """What is wrong with the runs."""
        return tuple(finding.defects(self.runs, tolerance=self.tolerance))

    @property
    def survivors(self) -> tuple[Kill, ...]:
        """Mutants that were not seen, or not as predicted."""
        return tuple(one for one in self.kills if one.state == "survived")

    @property
    def unproven(self) -> tuple[str, ...]:
        """Why there is no verdict: what was given, and mutants that no size tells apart."""
        killed = {one.mutant for one in self.kills if one.state != "listed"}
        alike = dict.fromkeys(one.mutant for one in self.kills if one.mutant not in killed)
        said = (
            f"no verdict: mutant {name!r} is the same program at every size; run another size"
            for name in alike
        )
        return (*self.no_verdicts, *said)

    @property
    def verdict(self) -> Verdict:
        """Wrong before refused before no verdict."""
        if self.defects or self.survivors:
            return "wrong"
        if self.refusal is not None:
            return "refused"
        return "no verdict" if self.unproven else "right"

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    @property
    def worst_error(self) -> float:
        """The largest |g-r|/|r| of all connected pairs."""
        errors = [one.error for run in self.runs for one in run.pairs if one.cosine is not None]
        broken = any(math.isinf(one.error) for run in self.runs for one in run.pairs)
        return math.inf if broken else max(errors, default=0.0)

    @property
    def sentences(self) -> tuple[str, ...]:
        """Everything but what is right, the gravest first."""
        survived = (
            f"mutant {one.mutant!r} survived at {one.size}: predicted {one.predicted}, "
            f"found {one.found}"
            for one in self.survivors
        )
        refused = () if self.refusal is None else (f"refused: {self.refusal}",)
        wrong = (one.sentence for one in self.defects)
        return (*refused, *wrong, *survived, *self.unproven, *self.remarks)

    def raise_if_wrong(self) -> None:
        """Raises GradientsWrong with all sentences unless the verdict is right.

        A check that proves nothing raises too: a test that calls this wants a proof.
        """
        if self.verdict != "right":
            lines = "\n  ".join(self.sentences)
            raise GradientsWrong(f"gradients of {self.subject}: {self.verdict}\n  {lines}")

    def to_json(self) -> dict[str, Any]:
        """Everything, as values that JSON has; NaN and infinity as their names."""
        shown = {
            "subject": self.subject,
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "worst_error": self.worst_error,
            "tolerance": self.tolerance,
            "refusal": self.refusal,
            "defects": [asdict(one) for one in self.defects],
            "no_verdicts": list(self.unproven),
            "remarks": list(self.remarks),
            "runs": [_run(one) for one in self.runs],
            "mutants": [asdict(one) for one in self.kills],
        }
        named: dict[str, Any] = _named(shown)
        return named


def exit_code(reports: Sequence[Report]) -> int:
    """Of several files: that of the worst."""
    found = {report.verdict for report in reports}
    return EXIT_CODES[next((verdict for verdict in ORDER if verdict in found), "right")]


def _run(run: Run) -> dict[str, Any]:
    return {
        "size": run.size.label,
        "symbols": dict(run.size.symbols),
        "step": run.step,
        "counts": dict(run.counts or {}),
        "pairs": [asdict(one) for one in run.pairs],
        "logged": [{**asdict(one), "ratio": one.ratio} for one in run.logged],
        "differing": list(run.differing),
    }


def _named(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _named(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_named(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
