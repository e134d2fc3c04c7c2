"""`atoll simulate --faults`: runs under faults, checked after every event."""

from collections import Counter
from dataclasses import asdict

import typer

from atoll.cli import output
from atoll.cli.options import SimulateOptions
from atoll.errors import ConfigError
from atoll.simulate import rank_faults
from atoll.simulate.faults import run as simulation
from atoll.simulate.faults import seeds as naming
from atoll.simulate.faults.invariants.base import INVARIANTS
from atoll.simulate.faults.run import Outcome
from atoll.simulate.faults.scenario import Size

SHARDED = "sharded"
SHOWN_EVERY = 25  # seeds between two lines of progress


def faults(options: SimulateOptions) -> None:
    """Runs one seed, or many; exit code 1 when an invariant does not hold."""
    if options.directory is not None:
        given = f"keeps no state, so --dir {str(options.directory)!r} has no effect"
        raise ConfigError(f"--faults {given}; leave it out")
    if options.run_file is not None:
        given = f"simulates a stand-in model, not {str(options.run_file)!r}"
        raise ConfigError(f"--faults {given}; leave the run file out")
    first, as_json = options.faults or 0, options.as_json
    for name, value, least in (
        ("faults", first, 0),
        ("islands", options.islands, 2),
        ("rounds", options.rounds, 1),
    ):
        if value is not None and value < least:
            raise ConfigError(f"--{name} {value} is below {least}, which simulated faults need")
    if options.strategy_name is not None and options.mode_name is not None:
        given = f"--mode {options.mode_name!r} is of diloco, not of {options.strategy_name!r}"
        raise ConfigError(f"{given}; leave one of --mode and --strategy out")
    if options.speeds is not None:
        given = f"draws speeds itself, so --speeds {options.speeds!r} has no effect"
        raise ConfigError(f"--faults {given}; leave it out")
    if options.strategy_name == SHARDED:
        _faults_of_ranks(options, first)
        return
    size = Size(options.islands, options.rounds, options.strategy_name, options.mode_name)
    wanted = naming.parse("1" if options.seeds is None else options.seeds, first=first)
    total: Counter[str] = Counter()
    failures = []
    outcome = None
    for count, number in enumerate(wanted, start=1):
        outcome = simulation.run(number, size)
        total.update(outcome.counts)
        if not outcome.holds:
            failures.append(outcome)
            if not as_json:
                _show_failure(outcome, size)
        if not as_json and len(wanted) > 1 and count % SHOWN_EVERY == 0:
            output.say(f"{count} of {len(wanted)} seeds, {len(failures)} failed")
    assert outcome is not None
    if as_json:
        output.print_json(
            {
                "seeds": [wanted.start, wanted.stop],
                "failed": [_as_json(failure, size) for failure in failures],
                "last": _as_json(outcome, size),
                "counts": dict(sorted(total.items())),
                "invariants": INVARIANTS,
            }
        )
    else:
        _show(outcome, total, seeds=len(wanted), failed=len(failures))
    if failures:
        raise typer.Exit(1)


def _faults_of_ranks(options: SimulateOptions, first: int) -> None:
    """The same for sharded runs, whose ranks train for real."""
    for name, value in (("islands", options.islands), ("rounds", options.rounds)):
        if value is not None:
            given = f"--{name} {value} with --strategy {SHARDED}, whose seeds draw it"
            raise ConfigError(f"{given}; leave it out")
    wanted = naming.parse("1" if options.seeds is None else options.seeds, first=first)
    found = [rank_faults.run(number) for number in wanted]
    failed = [outcome for outcome in found if outcome.problem]
    if options.as_json:
        told = [asdict(outcome) for outcome in failed]
        output.print_json({"seeds": [wanted.start, wanted.stop], "failed": told})
    for outcome in [] if options.as_json else failed:
        output.say(f"seed {outcome.seed}: {outcome.problem}")
        output.say(f"repeat it with: atoll simulate --faults {outcome.seed} --strategy {SHARDED}")
    if not options.as_json:
        groups = sum(outcome.groups for outcome in found)
        output.say(f"{len(found)} seeds, {groups} groups, {len(failed)} seeds failed")
    if failed:
        raise typer.Exit(1)


def _as_json(outcome: Outcome, size: Size) -> dict[str, object]:
    return {**asdict(outcome), "repeat": naming.command(outcome.seed, size)}


def _show(outcome: Outcome, total: Counter[str], *, seeds: int, failed: int) -> None:
    rows = [(kind, total[kind]) for kind in sorted(total)]
    output.console.print(output.table("what happened", ("event", "times"), rows))
    if seeds > 1:
        output.say(f"{seeds} seeds, {len(INVARIANTS)} invariants, {failed} seeds failed")
        return
    output.say(f"faults of seed {outcome.seed}: {', '.join(outcome.kinds) or 'none'}")
    output.say(
        f"{outcome.islands} islands, {outcome.version} rounds in {outcome.virtual_seconds:.1f} "
        f"virtual seconds; {outcome.events} events, {outcome.seams} places to be killed at; "
        f"{len(INVARIANTS)} invariants checked {outcome.checks} times"
    )
    output.say(f"params digest {outcome.digest}")
    output.say(f"history {outcome.trace}")


def _show_failure(outcome: Outcome, size: Size) -> None:
    for line in outcome.last:
        output.say(f"  {line}")
    output.say(
        f"seed {outcome.seed}: {outcome.invariant} does not hold "
        f"({INVARIANTS[str(outcome.invariant)]}); {outcome.detail}"
    )
    output.say(f"repeat it with: {naming.command(outcome.seed, size)}")
