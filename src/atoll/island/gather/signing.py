"""Who an island is to those that read its bucket: its key, and where its contributions lie."""

from dataclasses import dataclass
from pathlib import Path

from atoll.errors import ConfigError
from atoll.gather import statement as statements
from atoll.gather.keys import SecretKey
from atoll.gather.statement import Statement
from atoll.island.link.base import FrameSource
from atoll.protocol.gather import sample_digest
from atoll.protocol.manifest import GatherSettings
from atoll.protocol.messages import Publisher
from atoll.wire import frame as frames

KEY_FILE = "signing.key"


@dataclass(frozen=True)
class Signing:
    """The key that signs an island's statements, and the bucket of the run that it publishes in."""

    key: SecretKey
    bucket: str

    def publisher(self) -> Publisher:
        """What the run is told of it, at registration."""
        return Publisher(key=self.key.public.hex, bucket=self.bucket)

    def document(self, statement: Statement) -> bytes:
        """The signed statement; the same bytes each time."""
        return statements.signed(statement, self.key)


def statement_of(frame: FrameSource) -> Statement:
    """What an island says of a contribution: that of its header, and the frame's size and hash."""
    header, _ = frames.parse_preamble(frame.preamble)
    assert header.worker_id is not None and header.base_digest is not None, header
    return Statement(
        run_id=header.run_id,
        manifest_sha256=header.manifest_sha256,
        uid=header.worker_id,
        window=header.round,
        base_digest=header.base_digest,
        sample_digest=sample_digest(header.ranges),
        nbytes=frame.nbytes,
        sha256=frame.sha256,
    )


def key_in(directory: Path) -> SecretKey:
    """The key of the island whose state is in `directory`; a new one, kept there, the first time.

    The run knows the island by it: with another one the same worker_id is refused.
    """
    path = directory / KEY_FILE
    if path.exists():
        return SecretKey.load(path)
    made = SecretKey.make()
    made.save(path)
    return made


def bucket_of(settings: GatherSettings, wanted: str | None) -> str:
    """The bucket that an island publishes in: the one it wants, else the run's only one."""
    names = sorted(settings.buckets)
    if wanted is None and len(names) == 1:
        return names[0]
    if wanted in names:
        return str(wanted)
    given = "no --bucket" if wanted is None else f"--bucket {wanted!r}"
    raise ConfigError(f"{given} where the run has {', '.join(names)}; name one of them")
