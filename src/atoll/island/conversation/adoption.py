"""Whether what a coordinator states now is the same run, or a recorded new version of it."""

from atoll.errors import ManifestMismatch
from atoll.protocol.manifest import Manifest, differences
from atoll.protocol.messages import Info


def check(adopted: Info, found: Info) -> None:
    """ManifestMismatch names the first field that this island cannot follow, with both values."""
    same = found.manifest_sha256 == adopted.manifest_sha256
    fields = ("run_id", *Manifest.model_fields)
    if same and all(getattr(found, n) == getattr(adopted, n) for n in fields):
        return  # as nearly always, and found out twenty times as fast
    is_newer = not same and found.manifest_version > adopted.manifest_version
    _check_settings(adopted, found, may_change=is_newer)
    if not is_newer:
        raise _refusal("manifest_version", adopted.manifest_version, found.manifest_version)


def check_version(adopted: Info, found: Info, wanted: str) -> None:
    """ManifestMismatch unless `found` is version `wanted` of the run that was joined."""
    _check_settings(adopted, found, may_change=True)
    if found.manifest_sha256 != wanted:
        raise _refusal("manifest_sha256", wanted, found.manifest_sha256)


def _check_settings(adopted: Info, found: Info, *, may_change: bool) -> None:
    if found.run_id != adopted.run_id:
        raise _refusal("run_id", adopted.run_id, found.run_id)
    for difference in differences(adopted.settings(), found.settings()):
        if difference.is_fixed or not may_change:
            raise _refusal(difference.field, difference.mine, difference.theirs)


def _refusal(field: str, mine: object, theirs: object) -> ManifestMismatch:
    return ManifestMismatch(
        f"{field} was {mine!r} when this island joined and the coordinator now says {theirs!r}; "
        f"that is no recorded new version of the run, so join again if it is the one you mean"
    )
