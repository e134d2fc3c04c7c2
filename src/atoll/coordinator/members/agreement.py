"""Whether a worker that asks to take part agrees with the run: settings, model, data, codecs.

Names the first field that differs, with both values.
"""

import reprlib
from collections.abc import Mapping
from typing import Any

from atoll.codecs import registry as codecs
from atoll.data import base as datasets
from atoll.data import parts
from atoll.errors import DatasetMismatch, LayoutMismatch, ManifestMismatch, VersionMismatch
from atoll.layout import Layout
from atoll.protocol.manifest import ABSENT, VERSION_FIELDS, Difference, differences
from atoll.protocol.messages import RegisterRequest
from atoll.versions.manifests import Manifests, Recorded

_shown = reprlib.Repr()  # what a worker sends may be large, or nested deep
_shown.maxstring = _shown.maxother = _shown.maxlong = 200
_MAX_NAME = 200
_WHOLE_WEIGHTS = "fp32"  # how whole weights travel, whatever the run's codecs are


def check(
    request: RegisterRequest, in_force: Recorded, manifests: Manifests, *, layout: Layout
) -> None:
    """Refuses the request for the first thing in which the worker differs from the run."""
    _check_settings(request, in_force, manifests)
    if request.layout_digest != layout.digest:
        rule = "the worker's model must have the run's names, shapes and dtypes"
        found = Difference("layout_digest", layout.digest, request.layout_digest)
        raise LayoutMismatch(_told(request, found, rule))
    mine = in_force.manifest.data.identity
    difference = datasets.first_difference(mine, request.data_identity)
    if difference is not None:
        _check_lengths(request, mine)
        field, *sides = difference
        rule = "the worker's data must be the run's"
        raise ManifestMismatch(_told(request, Difference(f"data.{field}", *sides), rule))
    manifest = in_force.manifest
    for name in sorted({_WHOLE_WEIGHTS, manifest.upload.codec, manifest.download.codec}):
        speaks, theirs = codecs.versions()[name], request.codec_versions.get(name, 1)
        if theirs != speaks:
            rule = "run the same release of atoll on both sides"
            found = Difference(f"codec_versions.{name}", speaks, theirs)
            raise VersionMismatch(_told(request, found, rule))


def _told(request: RegisterRequest, found: Difference, rule: str) -> str:
    return (
        f"{found.field[:_MAX_NAME]} of worker_id={request.worker_id!r} is "
        f"{_shown.repr(found.theirs)}, the run's is {found.mine!r}; {rule}"
    )


def _check_lengths(request: RegisterRequest, mine: Mapping[str, Any]) -> None:
    """Refuses a dataset of the run that the worker has with another length, by both."""
    found = zip(_identities(mine), _identities(request.data_identity), strict=False)
    for part, (one, other) in zip(parts.parts_of(mine), found, strict=False):
        rows = other.get("rows")
        if rows != part.length and {**other, "rows": one["rows"]} == one:
            raise DatasetMismatch(
                f"data.rows of worker_id={request.worker_id!r} is {_shown.repr(rows)}, the run's "
                f"is {part.length!r} of {part.name!r}, and the data is the same otherwise; a "
                f"dataset keeps its length, so give the worker the run's data"
            )


def _identities(identity: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The identity of each dataset of a mixture, in order; one of a run with a single dataset.

    A worker may send anything: what is no identity counts as an empty one.
    """
    entries = identity.get("datasets") if identity.get("kind") == parts.MIXTURE else None
    if not isinstance(entries, list):
        return [dict(identity)]
    found = (entry.get("identity") if isinstance(entry, dict) else None for entry in entries)
    return [one if isinstance(one, dict) else {} for one in found]


def _check_settings(request: RegisterRequest, in_force: Recorded, manifests: Manifests) -> None:
    earlier = manifests.find(request.manifest_sha256)
    if earlier is not None and earlier is not in_force:
        raise ManifestMismatch(
            f"manifest version {earlier.version} of worker_id={request.worker_id!r} is not the one "
            f"in force, {in_force.version}, from round {in_force.from_round} on; fetch /info again "
            f"and adopt it"
        )
    if not request.settings:
        return
    settings = in_force.manifest.model_dump(mode="json")
    found = differences(settings, request.settings) or [
        Difference(name, settings[name], request.settings.get(name, ABSENT))
        for name in VERSION_FIELDS
        if request.settings.get(name) != settings[name]
    ]
    if found:
        rule = "settings come from the coordinator alone, so fetch /info again and adopt them"
        raise ManifestMismatch(_told(request, found[0], rule))
