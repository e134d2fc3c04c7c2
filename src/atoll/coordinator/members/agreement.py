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
        raise LayoutMismatch(
            f"layout_digest={request.layout_digest!r} of worker_id={request.worker_id!r} is not "
            f"the run's {layout.digest!r}; the worker's model must have the run's names, shapes "
            f"and dtypes"
        )
    difference = datasets.first_difference(in_force.manifest.data.identity, request.data_identity)
    if difference is not None:
        _check_lengths(request, in_force)
        field, mine, theirs = difference
        raise ManifestMismatch(
            f"data.{field[:_MAX_NAME]} of worker_id={request.worker_id!r} is "
            f"{_shown.repr(theirs)}, the run's is {mine!r}; the worker's data must be the run's"
        )
    _check_codecs(request, in_force)


def _check_lengths(request: RegisterRequest, in_force: Recorded) -> None:
    """Refuses a dataset of the run that the worker has with another length, by both."""
    mine = in_force.manifest.data.identity
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
        raise ManifestMismatch(
            f"{found[0].field[:_MAX_NAME]} of worker_id={request.worker_id!r} is "
            f"{_shown.repr(found[0].theirs)}, the run's is {found[0].mine!r}; settings "
            f"come from the coordinator alone, so fetch /info again and adopt them"
        )


def _check_codecs(request: RegisterRequest, in_force: Recorded) -> None:
    manifest = in_force.manifest
    for name in sorted({_WHOLE_WEIGHTS, manifest.upload.codec, manifest.download.codec}):
        mine, theirs = codecs.versions()[name], request.codec_versions.get(name, 1)
        if theirs != mine:
            raise VersionMismatch(
                f"codec_versions.{name} of worker_id={request.worker_id!r} is {theirs!r}, this "
                f"coordinator's is {mine!r}; run the same release of atoll on both sides"
            )
