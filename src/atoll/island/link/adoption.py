"""Whether what a coordinator states now is the same run, or a recorded new version of it."""

from atoll.errors import ManifestMismatch
from atoll.protocol.manifest import differences
from atoll.protocol.messages import Info


def check(adopted: Info, found: Info) -> None:
    """ManifestMismatch names the first field that this island cannot follow, with both values."""
    if found.run_id != adopted.run_id:
        raise _refusal("run_id", adopted.run_id, found.run_id)
    changed = differences(_settings(adopted), _settings(found))
    same = found.manifest_sha256 == adopted.manifest_sha256
    if same and not changed:
        return
    is_newer = not same and found.manifest_version > adopted.manifest_version
    for difference in changed:
        if difference.is_fixed or not is_newer:
            raise _refusal(difference.field, difference.mine, difference.theirs)
    if not is_newer:
        raise _refusal("manifest_version", adopted.manifest_version, found.manifest_version)


def _settings(info: Info) -> dict[str, object]:
    return info.manifest().model_dump(mode="json")


def _refusal(field: str, mine: object, theirs: object) -> ManifestMismatch:
    return ManifestMismatch(
        f"{field} was {mine!r} when this island joined and the coordinator now says {theirs!r}; "
        f"that is no recorded new version of the run, so join again if it is the one you mean"
    )
