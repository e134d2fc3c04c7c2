"""Whose blobs these are: one small object beside them, where several could reach them.

A copy of a state directory names the same place as the original, and each would remove what only
the other's ledger refers to. So a place outside the state directory belongs to one ledger, by name,
and whoever does not find its own name there touches nothing.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from atoll import files as filesystem
from atoll.blobs.access import S3Access
from atoll.errors import ConfigError, StoreError, Superseded

KEY = "owner.json"
MAX_BYTES = 4096


class Marker(Protocol):
    """The object that names the owner."""

    def read(self) -> bytes | None:
        """What it holds, at most `MAX_BYTES`; None when there is none."""
        ...

    def write(self, data: bytes) -> None:
        """Replaces it, durably."""
        ...


@dataclass(frozen=True)
class Ownership:
    """One ledger's claim to a place; `owner` names the ledger among its copies."""

    marker: Marker
    location: str
    owner: str

    def claim(self, *, adopt: bool = False) -> None:
        """Writes this owner's name; ConfigError when another's is there, unless it is adopted."""
        found = self._found()
        if found == self.owner:
            return
        if found is not None and not adopt:
            raise ConfigError(
                f"storage.blobs={self.location!r} belongs to the ledger {found}, this one is "
                f"{self.owner}; two copies of a run would each remove what only the other knows, "
                f"so give the copy a place of its own, or, when that ledger is never used again, "
                f"take its blobs over with --adopt-blobs"
            )
        self.marker.write(json.dumps({"ledger": self.owner}).encode())

    def is_claimed(self) -> bool:
        """Whether the place is this owner's already."""
        return self._found() == self.owner

    def check(self) -> None:
        """Superseded unless the place is still this owner's."""
        found = self._found()
        if found != self.owner:
            now = "nobody" if found is None else f"the ledger {found}"
            raise Superseded(
                f"storage.blobs={self.location!r} now belongs to {now} and no longer to "
                f"{self.owner}; this process removes nothing and must stop"
            )

    def _found(self) -> str | None:
        data = self.marker.read()
        if data is None:
            return None
        try:
            return str(json.loads(data)["ledger"])
        except (ValueError, KeyError, TypeError) as exc:
            raise StoreError(
                f"{KEY} in storage.blobs={self.location!r} cannot be read; it names whose blobs "
                f"these are, so see who wrote it, then remove it and start with --adopt-blobs"
            ) from exc


@dataclass(frozen=True)
class FileMarker:
    """The marker of a directory."""

    path: Path

    def read(self) -> bytes | None:
        try:
            with self.path.open("rb") as file:
                return file.read(MAX_BYTES)
        except FileNotFoundError:
            return None

    def write(self, data: bytes) -> None:
        filesystem.write_whole(self.path, data)


def marker(location: str, *, s3: S3Access | None) -> Marker:
    """The marker of the store at `location`."""
    if location.startswith("s3://"):
        # Here and not above: the client is only installed where it is used.
        from atoll.blobs.objects import ObjectMarker, ObjectStore, joined

        assert s3 is not None, "the store was opened with it"
        bucket, _, prefix = location.removeprefix("s3://").partition("/")
        return ObjectMarker(ObjectStore(bucket, s3), joined(prefix, KEY), MAX_BYTES)
    return FileMarker(Path(location) / KEY)
