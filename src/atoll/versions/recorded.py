"""What a ledger records about its run: the newest manifest and the layout it implies."""

from atoll.errors import ConfigError
from atoll.layout import Layout
from atoll.ledger.ledger import Ledger
from atoll.models import registry as models
from atoll.protocol.manifest import Manifest
from atoll.strategies import registry
from atoll.strategies.base import run_layout
from atoll.versions.manifests import Manifests


def manifest_of(ledger: Ledger) -> Manifest | None:
    """The newest manifest, or None for a ledger without a run."""
    with ledger.reading() as t:
        records = t.manifests.all()
    return Manifests(records).newest.manifest if records else None


def layout_of(manifest: Manifest) -> Layout:
    """The layout of the manifest's model, checked against its fingerprint."""
    layout = run_layout(registry.any_of(manifest), models.layout(manifest.model.definition))
    if layout.digest != manifest.model.layout_digest:
        raise ConfigError(
            f"this program builds the run's model with layout {layout.digest}, the manifest says "
            f"{manifest.model.layout_digest}; use the version of atoll that created the run"
        )
    return layout
