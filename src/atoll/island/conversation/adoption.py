"""Whether what a coordinator states now is the same run, or a recorded new version of it."""

from atoll.errors import ManifestMismatch
from atoll.protocol.manifest import Manifest, differences
from atoll.protocol.messages import Info


def check(adopted: Info, found: Info) -> None:
    """ManifestMismatch names the first field that this island cannot follow, with both values."""
    if found.run_id != adopted.run_id:
        raise _refusal("run_id", adopted.run_id, found.run_id)
    same = found.manifest_sha256 == adopted.manifest_sha256
    if same and all(getattr(found, n) == getattr(adopted, n) for n in Manifest.model_fields):
        return  # as nearly always, and found out twenty times as fast
    changed = differences(adopted.settings(), found.settings())
    is_newer = not same and found.manifest_version > adopted.manifest_version
    for difference in changed:
        if difference.is_fixed or not is_newer:
            raise _refusal(difference.field, difference.mine, difference.theirs)
    if not is_newer:
        raise _refusal("manifest_version", adopted.manifest_version, found.manifest_version)


def check_version(adopted: Info, found: Info, wanted: str) -> None:
    """ManifestMismatch unless `found` is version `wanted` of the run that was joined."""
    if found.run_id != adopted.run_id:
        raise _refusal("run_id", adopted.run_id, found.run_id)
    if found.manifest_sha256 != wanted:
        raise _refusal("manifest_sha256", wanted, found.manifest_sha256)
    for difference in differences(adopted.settings(), found.settings()):
        if difference.is_fixed:
            raise _refusal(difference.field, difference.mine, difference.theirs)


def _refusal(field: str, mine: object, theirs: object) -> ManifestMismatch:
    return ManifestMismatch(
        f"{field} was {mine!r} when this island joined and the coordinator now says {theirs!r}; "
        f"that is no recorded new version of the run, so join again if it is the one you mean"
    )
