"""`atoll gradcheck`: the check of each file, on processes that are started once for all of them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn

from atoll.cli import gradcheck_shown as shown
from atoll.cli import output
from atoll.errors import ConfigError
from atoll.pools.gradcheck import check as checking
from atoll.pools.gradcheck import report as reporting
from atoll.pools.gradcheck.asked import Asked, Ranks, Sizes
from atoll.pools.gradcheck.crew import Crews
from atoll.pools.gradcheck.report import Report

KINDS: dict[str, Ranks] = {"local": "local", "gloo": "gloo"}


def gradcheck(
    files: Sequence[Path],
    *,
    mutants: bool,
    sizes: Sequence[str] | None,
    ranks: str | None,
    as_json: bool,
) -> None:
    """Reports of all files; the exit code is that of the worst."""
    if ranks is not None and ranks not in KINDS:
        raise ConfigError(f"--ranks {ranks!r} is not known; use one of {', '.join(KINDS)}")
    asked = Asked(
        sizes=[parse_sizes(one) for one in sizes] if sizes else None,
        ranks=None if ranks is None else KINDS[ranks],
        mutants=mutants,
    )
    reports = _checked(files, asked)
    code = reporting.exit_code(reports)
    if as_json:
        output.print_json({"exit_code": code, "files": [one.to_json() for one in reports]})
    else:
        for report in reports:
            shown.show(report)
    if code:
        raise typer.Exit(code)


def parse_sizes(text: str) -> Sizes:
    """`ci=6,layers=2x3` as {"ci": 6, "layers": (2, 3)}: ranks, or blocks and ranks of each."""
    found: dict[str, int | tuple[int, int]] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        numbers = size.split("x")
        is_known = name.isidentifier() and name not in found and len(numbers) in (1, 2)
        if not is_known or not all(one.isdecimal() and int(one) for one in numbers):
            raise ConfigError(
                f"--sizes {text!r}: {part!r} is not a new name=N or name=BLOCKSxRANKS; write it "
                f"like ci=6,layers=2x3,ppgd=2"
            )
        found[name] = int(size) if len(numbers) == 1 else (int(numbers[0]), int(numbers[1]))
    return found


def _checked(files: Sequence[Path], asked: Asked) -> list[Report]:
    bars = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        console=output.stderr,
        transient=True,
        disable=not output.stderr.is_terminal,
    )
    reports: list[Report] = []
    with Crews() as crews, bars:
        task = bars.add_task("gradcheck", total=None)
        for number, path in enumerate(files, 1):
            about = output.plain(f"{number}/{len(files)} {path.name}")

            def tell(what: str, about: str = about) -> None:
                bars.update(task, description=f"{about}: {what}")

            tell("loading")
            asked_here = replace(asked, progress=tell)
            reports.append(checking.check_file(path, asked_here, crews=crews))
    return reports
