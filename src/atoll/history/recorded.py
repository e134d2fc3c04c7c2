"""What a ledger records about its run: the manifest in force and the layout it implies."""

from pydantic import ValidationError

from atoll.errors import ConfigError, StateDamaged
from atoll.layout import Layout
from atoll.ledger.base import Ledger
from atoll.models import registry as models
from atoll.protocol.manifest import Manifest


def manifest_of(ledger: Ledger) -> Manifest | None:
    """The manifest in force, or None for a ledger without a run."""
    manifests = ledger.manifests()
    if not manifests:
        return None
    try:
        return Manifest.model_validate_json(manifests[-1].body)
    except ValidationError as exc:
        where = ".".join(str(part) for part in exc.errors(include_url=False)[0]["loc"])
        raise StateDamaged(
            f"manifest version {manifests[-1].version} in the ledger breaks a rule at "
            f"{where or 'its start'!r}; it was changed, or a newer program wrote it; restore the "
            f"ledger from a copy, or use the version of atoll that created the run"
        ) from exc


def layout_of(manifest: Manifest) -> Layout:
    """The layout of the manifest's model, checked against its fingerprint."""
    layout = models.layout(manifest.model.definition)
    if layout.digest != manifest.model.layout_digest:
        raise ConfigError(
            f"this program builds the run's model with layout {layout.digest}, the manifest says "
            f"{manifest.model.layout_digest}; use the version of atoll that created the run"
        )
    return layout
