"""What a new manifest version may change, and how one is made from the version before it."""

from pydantic import ValidationError

from atoll.errors import ConfigError
from atoll.protocol.manifest import Difference, Manifest, differences


def changes(recorded: Manifest, found: Manifest) -> list[Difference]:
    """Settings in which `found` differs from `recorded`."""
    return differences(recorded.model_dump(mode="json"), found.model_dump(mode="json"))


def next_version(recorded: Manifest, found: Manifest) -> Manifest:
    """`found` as the version after `recorded`; `recorded` itself when no setting differs.

    ConfigError for the first change that no version of a run may make.
    """
    changed = changes(recorded, found)
    if not changed:
        return recorded
    for difference in changed:
        if difference.is_fixed:
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
