"""An island's place in the run, shared by its training and by what goes on beside it."""

import socket
import threading
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from atoll.codecs import registry as codecs
from atoll.codecs.base import Codec
from atoll.island.state.store import IslandIdentity
from atoll.protocol.manifest import Manifest
from atoll.protocol.messages import Identity, Info, RegisterReply, RegisterRequest
from atoll.strategies import registry
from atoll.strategies.base import AnyStrategy, Strategy


@dataclass(frozen=True)
class Adopted:
    """The settings that the round under way is trained under."""

    info: Info
    manifest: Manifest
    upload: Codec
    download: Codec
    chosen: AnyStrategy

    @classmethod
    def of(cls, info: Info) -> "Adopted":
        """What `info` says, built; ConfigError for a strategy that this program does not have."""
        manifest = info.manifest()
        upload, download = manifest.upload.build(), manifest.download.build()
        return cls(info, manifest, upload, download, registry.any_of(manifest))

    @cached_property
    def asked(self) -> Strategy:
        """What answers for the round under way; ConfigError in a run without such rounds."""
        return registry.of(self.manifest)


class Standing:
    """Incarnation, generation and newest manifest that this island knows of. Thread-safe.

    Everybody reads the fields; only the methods here write them, but for `is_doubtful`. Only one
    thread registers at a time, the one that holds `joining`: its answer counts for all.
    """

    def __init__(self, island: IslandIdentity, info: Info) -> None:
        self.island = island
        self.info = info  # the newest manifest that this island knows of
        self.incarnation = 0  # which life of this worker_id this process is; 0 before it registers
        self.generation = 0  # the membership we know; whoever says otherwise is believed
        self.version = info.version  # the coordinator's, when it last registered us
        self.is_doubtful = False  # a registration may have begun a life that we do not know of
        self.joining = threading.Lock()  # of the one thread that registers now
        self._lock = threading.Lock()

    @property
    def place(self) -> tuple[int, int, int]:
        """Incarnation, generation and version, read together."""
        with self._lock:
            return self.incarnation, self.generation, self.version

    def identity(self, manifest_sha256: str | None = None) -> Identity:
        """Who this island is, for a message; by default under the newest manifest known."""
        incarnation, generation, _ = self.place
        return Identity(
            run_id=self.info.run_id,
            manifest_sha256=manifest_sha256 or self.info.manifest_sha256,
            incarnation=incarnation,
            generation=generation,
            **asdict(self.island),
        )

    def registration(
        self, *, layout_digest: str, data_identity: dict[str, Any], **listens: Any
    ) -> RegisterRequest:
        """The message that asks to take part, under the newest manifest known."""
        return RegisterRequest(
            run_id=self.info.run_id,
            manifest_sha256=self.info.manifest_sha256,
            hostname=socket.gethostname()[:255],
            layout_digest=layout_digest,
            data_identity=data_identity,
            settings=self.info.settings(),
            codec_versions=codecs.versions(),
            **listens,
            **asdict(self.island),
        )

    def joined(self, reply: RegisterReply) -> None:
        """A new life begins."""
        self.move(reply.incarnation, reply.generation, reply.version)
        self.is_doubtful = False

    def move(self, incarnation: int, generation: int, version: int) -> None:
        """Sets all three at once, so that nobody reads a mixture."""
        with self._lock:
            self.incarnation, self.generation, self.version = incarnation, generation, version

    def left(self) -> None:
        """This life is over."""
        with self._lock:
            self.incarnation = 0

    def told(self, generation: int) -> None:
        """The coordinator says which generation is the present one."""
        with self._lock:
            self.generation = generation

    def heard_of(self, info: Info) -> None:
        """Remembers `info`, unless another thread has learned of a later version meanwhile."""
        with self._lock:
            if info.manifest_version >= self.info.manifest_version:
                self.info = info
