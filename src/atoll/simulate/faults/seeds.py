"""Which seeds to run, and how one is run again."""

from atoll.errors import ConfigError
from atoll.simulate.faults.scenario import Size

MAX_SEEDS = 10_000_000


def parse(text: str, *, first: int = 0) -> range:
    """`N` seeds from `first` on, or those of `A:B`, without B."""
    start, colon, stop = text.partition(":")
    try:
        found = range(int(start), int(stop)) if colon else range(first, first + int(start))
    except ValueError as exc:
        raise ConfigError(
            f"--seeds {text!r} is neither a number of seeds nor a range A:B; write 500 or 500:1000"
        ) from exc
    if not 0 < len(found) <= MAX_SEEDS or found.start < 0:
        raise ConfigError(
            f"--seeds {text!r} names {len(found)} seeds from {found.start} on; it must name "
            f"1 to {MAX_SEEDS}, none below 0"
        )
    return found


def command(seed: int, size: Size) -> str:
    """What repeats a seed exactly."""
    given = {
        "islands": size.islands,
        "rounds": size.rounds,
        "strategy": size.strategy_name,
        "mode": size.mode_name,
    }
    options = [f" --{name} {value}" for name, value in given.items() if value is not None]
    return f"atoll simulate --faults {seed}{''.join(options)}"
