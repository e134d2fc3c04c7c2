"""What a ledger records about its run: the manifest in force and the layout it implies."""

from atoll.errors import ConfigError
from atoll.layout import Layout
from atoll.ledger.base import Ledger
from atoll.models import registry as models
from atoll.protocol.manifest import Manifest


def manifest_of(ledger: Ledger) -> Manifest | None:
    """The manifest in force, or None for a ledger without a run."""
    manifests = ledger.manifests()
    return Manifest.model_validate_json(manifests[-1].body) if manifests else None


def layout_of(manifest: Manifest) -> Layout:
    """The layout of the manifest's model, checked against its fingerprint."""
    layout = models.layout_of(models.on_meta(manifest.model.definition))
    if layout.digest != manifest.model.layout_digest:
        raise ConfigError(
            f"this program builds the run's model with layout {layout.digest}, the manifest says "
            f"{manifest.model.layout_digest}; use the version of atoll that created the run"
        )
    return layout
