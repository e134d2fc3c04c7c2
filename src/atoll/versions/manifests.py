"""A run's manifest versions: which one every round is under.

The ledger's rows as values. Rounds that are planned keep their version; a new one is in force from
the first round that is not planned yet (docs/decisions/0011).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pydantic import ValidationError

from atoll.errors import ManifestMismatch, StateDamaged
from atoll.layout import Layout
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import ManifestRecord
from atoll.protocol.manifest import Manifest
from atoll.strategies import registry
from atoll.strategies.base import AnyStrategy, Strategy
from atoll.versions import manifest_change


@dataclass(frozen=True)
class Recorded:
    """One version as the ledger has it."""

    version: int
    sha256: str
    from_round: int
    manifest: Manifest

    @cached_property
    def any_strategy(self) -> AnyStrategy:
        """The strategy under this version, whichever it is."""
        return registry.any_of(self.manifest)

    @cached_property
    def round_strategy(self) -> Strategy:
        """That of the rounds under this version, where contributions are handed in."""
        return registry.of(self.manifest)


class Manifests:
    """All versions of a run, oldest first. Safe to read while another thread adds one."""

    def __init__(self, records: Sequence[ManifestRecord]) -> None:
        assert records, "a run has a manifest from its creation on"
        self._versions = tuple(_recorded(record) for record in records)
        self._reached = 1  # the round that decides which version is in force

    @classmethod
    def of(cls, ledger: Ledger) -> "Manifests":
        """The versions that `ledger` records."""
        with ledger.reading() as t:
            return cls(t.manifests.all())

    @property
    def first(self) -> Recorded:
        """The version the run was created with."""
        return self._versions[0]

    @property
    def newest(self) -> Recorded:
        """The version recorded last; its first round may not be planned yet."""
        return self._versions[-1]

    @property
    def newest_of_file(self) -> Recorded:
        """The version that a run file made last."""
        return next(v for v in reversed(self._versions) if v.manifest.manifest_source == "file")

    @property
    def run_strategy(self) -> Strategy:
        """The strategy of the run: its lead and its fragments are the same in every version."""
        return self.first.round_strategy

    @property
    def in_force(self) -> Recorded:
        """The version that messages are under: that of the newest round, or of the next one."""
        return self.of_round(self._reached)

    def reach(self, round_number: int) -> None:
        """The run has come to this round: its version is in force from now on."""
        self._reached = round_number

    def of_round(self, round_number: int) -> Recorded:
        """The version that `round_number` is under; version 0 of the weights has round 1's."""
        wanted = max(1, round_number)
        return next(v for v in reversed(self._versions) if v.from_round <= wanted)

    def find(self, sha256: str) -> Recorded | None:
        """The version of that hash."""
        return next((v for v in self._versions if v.sha256 == sha256), None)

    def get(self, sha256: str) -> Recorded:
        """The version of that hash; ManifestMismatch when this run has none."""
        found = self.find(sha256)
        if found is None:
            raise ManifestMismatch(
                f"manifest={sha256!r} is no version of this run's manifest; ask for the one in "
                f"force, without a hash"
            )
        return found

    def record(self, ledger: Ledger, changed: Manifest, *, layout: Layout) -> None:
        """Records `changed`, the next version, from the first round that is not planned yet on.

        ConfigError, and nothing is recorded, when the run, whose layout is `layout`, cannot go on
        under it.
        """
        number = changed.manifest_version
        assert number == self.newest.version + 1, number
        manifest_change.check_strategy(self.first.manifest, changed, layout=layout)
        with ledger.writing() as t:
            latest = t.rounds.latest()
            first = 1 if latest is None else latest.round + 1
            record = ManifestRecord(number, changed.sha256(), changed.body(), from_round=first)
            t.manifests.add(record)
        self._versions = (*self._versions, _recorded(record))


def _recorded(record: ManifestRecord) -> Recorded:
    try:
        manifest = Manifest.model_validate_json(record.body)
    except ValidationError as exc:
        where = ".".join(str(part) for part in exc.errors(include_url=False)[0]["loc"])
        raise StateDamaged(
            f"manifest version {record.version} in the ledger breaks a rule at "
            f"{where or 'its start'!r}; it was changed, or a newer program wrote it; restore the "
            f"ledger from a copy, or use the version of atoll that created the run"
        ) from exc
    return Recorded(record.version, record.sha256, record.from_round, manifest)
