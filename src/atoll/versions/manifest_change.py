"""What a new manifest version may change, and how one is made from the version before it."""

from pydantic import ValidationError

from atoll.errors import ConfigError
from atoll.layout import Layout
from atoll.protocol.manifest import Difference, Manifest, differences
from atoll.strategies import registry
from atoll.strategies.base import AnyStrategy


def changes(recorded: Manifest, found: Manifest) -> list[Difference]:
    """Settings in which `found` differs from `recorded`."""
    return differences(recorded.model_dump(mode="json"), found.model_dump(mode="json"))


def fixed(recorded: Manifest, found: Manifest) -> list[Difference]:
    """Changes from `recorded` to `found` that no version of a run may make."""
    own = registry.any_of(recorded).fixed
    return [d for d in changes(recorded, found) if d.is_fixed or d.field in own]


def next_version(recorded: Manifest, found: Manifest) -> Manifest:
    """`found` as the version after `recorded`; `recorded` itself when no setting differs.

    ConfigError for the first change that no version of a run may make.
    """
    if not changes(recorded, found):
        return recorded
    for difference in fixed(recorded, found):
        raise ConfigError(
            f"{difference.field} is {difference.mine!r} in this run and {difference.theirs!r} "
            f"in the run file; no version of a manifest changes it, because recorded weights, "
            f"rows or states depend on it; restore it, or start a new run in another directory"
        )

    number = recorded.manifest_version + 1
    return found.model_copy(update={"manifest_version": number, "manifest_source": "file"})


def with_outer_lr(recorded: Manifest, lr: float) -> Manifest:
    """The next version with another outer learning rate, made by an operator while serving."""
    settings = recorded.model_dump(mode="json")
    try:
        changed = Manifest.model_validate({**settings, "outer": {**settings["outer"], "lr": lr}})
    except ValidationError as exc:
        rule = exc.errors(include_url=False)[0]["msg"]
        raise ConfigError(f"outer.lr={lr!r}: {rule}") from exc
    if changed == recorded:
        return recorded
    number = recorded.manifest_version + 1
    return changed.model_copy(update={"manifest_version": number, "manifest_source": "operator"})


def check_strategy(first: Manifest, changed: Manifest, *, layout: Layout) -> None:
    """ConfigError when a run that began under `first` cannot go on under `changed`.

    Either the strategy refuses the settings, or they would change what is the same for a whole run:
    how many rounds are open, and where `layout`, the run's, is cut.
    """
    run, found = (_of_the_run(registry.any_of(made), layout) for made in (first, changed))
    for name, mine in run.items():
        if found.get(name) != mine:
            settings = "; ".join(map(str, changes(first, changed)))
            raise ConfigError(
                f"the strategy's {name} is {mine!r} in this run and {found.get(name)!r} with "
                f"{settings}; open rounds and recorded weights depend on it, so no version of a "
                f"manifest changes it; restore the settings, or start a new run in another "
                f"directory"
            )


def _of_the_run(strategy: AnyStrategy, layout: Layout) -> dict[str, object]:
    """Answers that are the same for a whole run, by what they are about."""
    places = {
        f"fragment of tensor {name!r}, with its place in it,": (number, place)
        for number, names in enumerate(strategy.cut(layout))
        for place, name in enumerate(names)
    }
    return {"lead": strategy.lead, **places}
