"""A coordinator on a manual clock and islands made by hand: no process, no network, no training.

The coordinator, its ledger, blobs and spool are the real ones in a directory of the test. An island
here only speaks the protocol: its displacements come from a seeded generator, so that a test can
compute by itself what a round must give.
"""

import copy
import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pytest
import torch
from sqlalchemy import and_, delete, insert, update
from torch import Tensor, nn

from atoll import config
from atoll.blobs.bucket import Bucket
from atoll.blobs.directory import DirectoryBlobs
from atoll.clock import ManualClock
from atoll.codecs.base import Codec
from atoll.config import RunFile
from atoll.coordinator import boot, handlers
from atoll.coordinator.accept.admission import UploadRequest
from atoll.coordinator.accept.uploads import UploadStream
from atoll.coordinator.handlers import Arrival
from atoll.coordinator.rounds.spool import Spool
from atoll.coordinator.service import Coordinator
from atoll.coordinator.stores import Stores
from atoll.island.conversation.asking import question
from atoll.island.conversation.beside import Beside
from atoll.island.conversation.hand_in import header_of
from atoll.island.conversation.intents import Send, Steps, Trained
from atoll.island.conversation.session import Session
from atoll.island.conversation.standing import Adopted
from atoll.island.state.store import IslandIdentity
from atoll.island.state.weights import IslandWeights
from atoll.island.telemetry import Samples
from atoll.layout import Fragment, Layout, byte_view
from atoll.ledger import engines
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import (
    ContributionRecord,
    LeaseRecord,
    ManifestRecord,
    RoundState,
    RunRecord,
)
from atoll.ledger.tables import schema
from atoll.models import init
from atoll.proof import audit as auditing
from atoll.proof.report import AuditReport
from atoll.protocol.manifest import DataSettings, Manifest, ModelSettings
from atoll.protocol.messages import Assignment, Identity, Info, RegisterRequest, Telemetry
from atoll.strategies.base import Fragments
from atoll.sums import digest as digests
from atoll.versions import recorded, weights
from atoll.versions.manifests import Manifests
from atoll.versions.replay import Replay
from atoll.wire import frame
from atoll.wire.header import FrameHeader
from tests.ledgers import alone, bare

RUN_ID = "by-hand"
BLOCK = 4
HELD_OUT_ROWS = 6
TICK_SECONDS = 0.05

SMALL = Layout.of(
    [("embedding", (40, 20), "float32"), ("norm", (20,), "float32"), ("head", (20, 40), "float32")]
)
# Two codec groups and a rest, so that tiles of one group cut tensors in the middle.
WIDE = Layout.of(
    [
        ("embedding", (300, 256), "float32"),
        ("norm", (257,), "float32"),
        ("head", (256, 250), "float32"),
    ]
)
DATA_IDENTITY: dict[str, Any] = {
    "kind": "by hand",
    "rows": 1000,
    "block": BLOCK,
    "held_out_rows": HELD_OUT_ROWS,
}


def values(layout: Layout, label: str, *, scale: float = 0.01) -> Tensor:
    """A flat fp32 buffer that depends on `label` alone."""
    seed = np.frombuffer(hashlib.sha256(label.encode()).digest()[:8], np.uint64)
    drawn = np.random.Generator(np.random.Philox(key=seed[0])).standard_normal(layout.size)
    return torch.from_numpy((drawn * scale).astype(np.float32))


def displacement(layout: Layout, worker_id: str, round_number: int) -> Tensor:
    """What an island made by hand contributes to a round."""
    return values(layout, f"{worker_id}/{round_number}")


def audited(home: Path) -> tuple[AuditReport, Manifest]:
    """What audit with replay says of a run's directory."""
    ledger = engines.open_ledger(home / "ledger.sqlite")
    manifest = recorded.manifest_of(ledger)
    assert manifest is not None
    report = auditing.audit(
        ledger,
        DirectoryBlobs(home / "blobs"),
        layout=recorded.layout_of(manifest),
        with_replay=True,
    )
    ledger.close()
    return report, manifest


def run_file(changes: Mapping[str, Any] | None = None) -> RunFile:
    """A run file for islands made by hand; `changes` by dotted name."""
    table: dict[str, Any] = {
        "name": "by-hand",
        "sync_every": 2,
        "inner": {"batch": 3},
        "membership": {"min_workers": 2},
        "evaluate": {"every": 0},
        "stop": {"rounds": 1000},
        "model": {},
        "data": {},
    }
    if (changes or {}).get("strategy") == "sharded":
        del table["sync_every"]
    for name, value in (changes or {}).items():
        *sections, last = name.split(".")
        place = table
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = copy.deepcopy(value)
    return config.parse(table)


def sharded_manifest(home: Path, changes: Mapping[str, Any]) -> tuple[Manifest, Tensor, Layout]:
    """The manifest of a new sharded run, its initial weights, flat, and its layout."""
    table = run_file({"stop.rounds": 1, **changes})
    stores = stores_in(home)
    manifest = boot.create_or_check(stores, table, ManualClock(), new_run_id="by-hand")
    layout = recorded.layout_of(manifest)
    flat = layout.zeros()
    views = layout.views(flat)
    for name, value in init.initial(manifest.model.definition, layout, seed=manifest.seed):
        views[name].copy_(value)
    stores.ledger.close()
    return manifest, flat, layout


def stores_in(home: Path, *, ledger: str | None = None) -> Stores:
    """What a coordinator keeps, in `home`; the ledger elsewhere if an address is given."""
    return Stores(
        engines.open_ledger(ledger or home / "ledger.sqlite"),
        DirectoryBlobs(home / "blobs"),
        Spool(home / "spool"),
    )


def definition_of(layout: Layout) -> dict[str, Any]:
    """A model definition that gives `layout`: a state directory tells its own then."""
    rows = [[spec.name, spec.dtype, list(spec.shape)] for spec in layout.tensors]
    return {"architecture": "custom", "tensors": rows}


def manifest_for(
    layout: Layout,
    changes: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] = DATA_IDENTITY,
) -> Manifest:
    """The manifest of a run over `layout` that starts from `values(layout, "initial")`."""
    return run_file(changes).manifest(
        ModelSettings(
            definition=definition_of(layout),
            layout_digest=layout.digest,
            initial_digest=digests.digest(layout, values(layout, "initial", scale=1.0)).root,
        ),
        DataSettings(definition={}, identity=dict(data)),
    )


def info_of(manifest: Manifest) -> Info:
    """What a coordinator that never served says of a run under `manifest`."""
    return Info(
        **{name: getattr(manifest, name) for name in Manifest.model_fields},
        run_id=RUN_ID,
        manifest_sha256=manifest.sha256(),
        model_hash="0" * 64,
        version=0,
        transfer_port=1,
    )


@dataclass(frozen=True)
class Frame:
    """A whole frame in memory; fulfils `island.link.FrameSource`."""

    data: bytes
    preamble_bytes: int

    @property
    def preamble(self) -> bytes:
        return self.data[: self.preamble_bytes]

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def read(self, offset: int, nbytes: int) -> bytes:
        return self.data[offset : offset + nbytes]


def make_frame(header: FrameHeader, payload: bytes) -> Frame:
    """`payload` under `header`, with an honest checksum."""
    data = bytearray()
    writer = frame.FrameWriter(header, data.extend)
    writer.payload(payload)
    writer.finish()
    return Frame(bytes(data), len(frame.preamble(header)))


def encode(codec: Codec, delta: Tensor) -> bytes:
    """The payload of a displacement, without noise or feedback."""
    return bytes(byte_view(codec.encode(delta, noise=None, first_group=0)))


class CutOff(Exception):
    """Ends what a coordinator is doing."""


def _cut_off(*_: object) -> None:
    raise CutOff


class Cluster:
    """One run's coordinator over a state directory, which can be opened again."""

    def __init__(
        self,
        home: Path,
        settings: Mapping[str, Any] | None = None,
        *,
        layout: Layout = SMALL,
        threads: int = 1,
        data: Mapping[str, Any] = DATA_IDENTITY,
    ) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.home = home
        self.layout = layout
        self.threads = threads
        self.manifest = manifest_for(layout, settings, data)
        self.clock = ManualClock()
        self._open_stores()
        if alone(self.ledger).run.get() is None:
            self._create()
        self.coordinator = self._coordinator()

    def _open_stores(self) -> None:
        stores = stores_in(self.home)
        self.ledger, self.blobs, self.spool = stores.ledger, stores.blobs, stores.spool

    def _create(self) -> None:
        sha256 = self.manifest.sha256()
        header = weights.weights_header(
            self.layout,
            run_id=RUN_ID,
            manifest_sha256=sha256,
            version=0,
            digest=self.manifest.model.initial_digest,
        )
        initial = values(self.layout, "initial", scale=1.0)
        stored = weights.store(self.blobs, header, initial, layout=self.layout)
        alone(self.ledger).run.create(
            RunRecord(RUN_ID, self.clock.wall(), stored),
            ManifestRecord(1, sha256, self.manifest.body(), from_round=1),
        )

    def _coordinator(self) -> Coordinator:
        stores = Stores(self.ledger, self.blobs, self.spool)
        return boot.open_coordinator(
            stores,
            self.clock,
            layout=self.layout,
            threads=self.threads,
            buckets=self._buckets(),
        )

    def _buckets(self) -> Mapping[str, Bucket]:
        """Those of a run whose islands publish."""
        return {}

    def close(self) -> None:
        """Lets the directory go, as a process that ends does."""
        self.ledger.close()
        self.blobs.close()

    def restart(self) -> Self:
        """Ends this life without a word and opens the directory again, on a clock of its own."""
        self.close()
        self.clock = ManualClock(1e6, wall_start=self.clock.wall() + 1)
        self._open_stores()
        self.coordinator = self._coordinator()
        return self

    def replay(self, *, manifests: Manifests | None = None, threads: int = 1) -> Replay:
        """What computes its weights again, under these manifests in place of the recorded ones."""
        known = self.coordinator.manifests if manifests is None else manifests
        return Replay(self.ledger, self.blobs, manifests=known, layout=self.layout, threads=threads)

    # Time

    def settle(self) -> int:
        """Does all that is due now; how many rounds closed."""
        closed = 0
        while self.coordinator.advance():
            closed += 1
        return closed

    def keep_alive(self, *islands: "HandIsland", seconds: float) -> int:
        """Lets time pass while `islands` beat every 4 s; how many rounds closed."""
        closed = 0
        for _ in range(round(seconds / 4)):
            closed += self.run_clock(seconds=4.0, tick_seconds=2.0)
            for island in islands:
                island.beat()
        return closed

    def run_clock(self, *, seconds: float, tick_seconds: float = TICK_SECONDS) -> int:
        """Lets virtual time pass with the closing thread's ticks; how many rounds closed."""
        closed = self.settle()
        for _ in range(round(seconds / tick_seconds)):
            self.clock.advance(seconds=tick_seconds)
            closed += self.settle()
        return closed

    def rounds(self, count: int, *islands: "HandIsland") -> None:
        """Lets `islands` complete so many rounds."""
        for _ in range(count):
            for island in islands:
                island.contribute()
            assert self.settle() == 1

    def freeze(self) -> list[ContributionRecord]:
        """Freezes the round that is due and goes no further, as a crash there; the frozen set."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.coordinator.weights, "compute", _cut_off)
            with pytest.raises(CutOff):
                self.coordinator.advance()
        return alone(self.ledger).contributions.of_round(self.version + 1)

    # What a test looks at

    @property
    def version(self) -> int:
        return self.coordinator.weights.current.version

    @property
    def digest(self) -> str:
        """Of the fp32 master."""
        return self.coordinator.weights.current.digests.master.root

    @property
    def published_digest(self) -> str:
        return self.coordinator.weights.current.digests.published.root

    def digests_by_round(self) -> list[str | None]:
        """The recorded master digest of every published round."""
        return [
            r.master_digest
            for r in alone(self.ledger).rounds.all()
            if r.state is RoundState.PUBLISHED
        ]

    def leases(self) -> list[LeaseRecord]:
        """Every lease of every round."""
        return [
            x
            for r in alone(self.ledger).rounds.all()
            for x in alone(self.ledger).leases.of_round(r.round)
        ]

    def buffer(self, name: Literal["master", "published"]) -> Tensor:
        """The run's weights as they are now, read from a snapshot that nobody records."""
        made = self.coordinator.weights.snapshot()
        sha256 = made.master_sha256 if name == "master" else made.published_sha256
        return weights.load(self.blobs, sha256, self.layout)

    def blob_names(self) -> set[str]:
        """Blobs that are stored."""
        return {ref.sha256 for ref in self.blobs.stored()}

    def drafts(self) -> list[str]:
        """Temporary files of uploads."""
        return sorted(path.name for path in (self.home / "blobs" / "tmp").iterdir())

    def blob_path(self, sha256: str) -> Path:
        return self.home / "blobs" / sha256[:2] / sha256

    def audit(self, *, with_replay: bool = False) -> AuditReport:
        """Proves the run as it stands."""
        return auditing.audit(
            self.ledger,
            self.blobs,
            layout=self.layout,
            with_replay=with_replay,
        )

    def island(self, name: str, *, key: str | None = None) -> "HandIsland":
        """A new island that has joined."""
        return HandIsland(self, name, key=key).join()

    def pair(self) -> tuple["HandIsland", "HandIsland"]:
        """Two islands that have joined: round 1 is open."""
        return self.island("a"), self.island("b")

    def trio(self, third: str = "c") -> tuple["HandIsland", "HandIsland", "HandIsland"]:
        """Three islands in round 2, which is the first of the third one."""
        a, b = self.pair()
        joined = self.island(third)
        self.rounds(1, a, b)
        return a, b, joined


@dataclass(frozen=True)
class Held:
    """The published weights of an island that keeps none of them: what its headers say."""

    fragments: Fragments
    digests: tuple[str, ...]  # of each fragment

    @classmethod
    def of(cls, coordinator: Coordinator, given: Assignment) -> Self:
        """Those of the version that `given` names."""
        current = coordinator.weights.current
        digests = tuple(part.published.root for part in current.parts)
        if given.digest != current.digests.published.root:
            digests = (given.digest,)  # of an earlier version: known where it is in one piece
        strategy = coordinator.manifests.run_strategy
        return cls(Fragments.of(strategy, coordinator.layout), digests)

    def fragment(self, number: int) -> Fragment:
        return self.fragments[number]

    def base_digest(self, number: int) -> str:
        return self.digests[number]


class HandIsland:
    """Speaks as an island does, message by message, with displacements made by hand.

    What it says is made by the island's own code; when, and what of it is wrong, is the test's.
    """

    def __init__(self, cluster: Cluster, name: str, *, key: str | None = None) -> None:
        self.cluster = cluster
        self.name = name
        known = IslandIdentity(name, key or hashlib.sha256(name.encode()).hexdigest())
        self.session = Session(known, info_of(cluster.manifest), random.Random(name))
        self._beside = Beside(self.session, Telemetry, Samples(cluster.clock))

    @property
    def coordinator(self) -> Coordinator:
        return self.cluster.coordinator

    @property
    def identity(self) -> Identity:
        """Who it says it is; it always knows the present generation."""
        self.session.standing.told(self.coordinator.generation)
        return self.session.standing.identity()

    @property
    def codec(self) -> Codec:
        return self.session.adopted.upload

    def adopt(self, info: Info) -> None:
        """Speaks and trains under another manifest from now on."""
        self.session.standing.heard_of(info)
        self.session.adopted = Adopted.of(info)

    def register_request(self, **changes: Any) -> RegisterRequest:
        said = self.session.standing.registration(
            layout_digest=self.cluster.layout.digest,
            data_identity=self.cluster.manifest.data.identity,
        )
        return RegisterRequest.model_validate({**said.model_dump(), **changes})

    def join(self) -> Self:
        """Registers; a second call is a new incarnation."""
        self.session.standing.joined(self.coordinator.register(self.register_request()))
        return self

    def leave(self) -> None:
        self._say(self.session.leave())

    def beat(self) -> None:
        self._say(self._beside.beat())

    def _say(self, steps: Steps[Any]) -> None:
        """The first message of some steps, in the present generation; a refusal is the test's."""
        assert self.identity.incarnation, f"{self.name} has not joined"
        first = next(steps)
        assert isinstance(first, Send)
        handlers.answer(self.coordinator, first.message, Arrival())

    def ask(
        self,
        *,
        version: int | None = None,
        digest: str | None = None,
        under_way: tuple[int, ...] = (),
    ) -> Assignment:
        """The assignment of an island that holds these weights and trains rounds `under_way`."""
        asked = question(self.identity, version, digest, under_way=under_way)
        return self.coordinator.assignment(asked)

    def assignment(self, *, under_way: tuple[int, ...] = ()) -> Assignment:
        """The assignment of an island that holds the published weights."""
        current = self.coordinator.weights.current
        digest = current.digests.published.root
        return self.ask(version=current.version, digest=digest, under_way=under_way)

    def header(self, assignment: Assignment, **changes: Any) -> FrameHeader:
        """An honest header for `assignment`, with `changes`."""
        rows = sum(map(len, assignment.ranges))
        trained = Trained(2.0 * rows * BLOCK, rows * BLOCK, rows)
        assert assignment.round is not None
        honest = header_of(
            self.session,
            Held.of(self.coordinator, assignment),
            assignment,
            trained,
            began=assignment.round,
        )
        return replace(honest, **changes)

    def frame(
        self, assignment: Assignment | None = None, delta: Tensor | None = None, **changes: Any
    ) -> Frame:
        """The contribution to `assignment` (the present one), with `changes` of its header."""
        given = self.assignment() if assignment is None else assignment
        header = self.header(given, **changes)
        if delta is None:
            carried = Held.of(self.coordinator, given).fragment(header.fragment)
            delta = displacement(carried.layout, self.name, header.round)
        return make_frame(header, encode(self.codec, delta))

    def request(self, sent: Frame, **changes: Any) -> UploadRequest:
        return replace(
            UploadRequest(self.identity, sent.preamble, sent.sha256, sent.nbytes), **changes
        )

    def begin(self, sent: Frame, data: bytes = b"", **changes: Any) -> UploadStream:
        """Opens the upload of a frame that is not accepted yet, and sends so much of it."""
        stream = self.coordinator.begin_upload(self.request(sent, **changes))
        assert isinstance(stream, UploadStream)
        if data:
            self.coordinator.write_upload(stream, data)
        return stream

    def send(
        self, sent: Frame, *, chunk_bytes: int = 1 << 11, body: bytes | None = None, **changes: Any
    ) -> ContributionRecord:
        """Uploads a frame; `changes` of what is announced, `body` in place of its bytes."""
        stream = self.coordinator.begin_upload(self.request(sent, **changes))
        if isinstance(stream, ContributionRecord):
            return stream
        data = sent.data if body is None else body
        for offset in range(0, len(data), chunk_bytes):
            self.coordinator.write_upload(stream, data[offset : offset + chunk_bytes])
        return self.coordinator.commit_upload(stream)

    def contribute(self, delta: Tensor | None = None) -> ContributionRecord:
        """Trains the open round by hand and sends it."""
        return self.send(self.frame(delta=delta))


def tamper(ledger: Ledger, table: str, where: Mapping[str, object], **changes: object) -> None:
    """Changes rows of a ledger behind its back; exactly those that match `where`."""
    found = schema.metadata.tables[table]
    matching = and_(*(found.c[name] == value for name, value in where.items()))
    with bare(ledger) as connection:
        connection.rows("PRAGMA foreign_keys=OFF")
        statement = update(found).where(matching).values(**changes)
        assert connection.change(statement), (table, where)


def add(ledger: Ledger, table: str, **values: object) -> None:
    """Inserts a row into a ledger behind its back."""
    with bare(ledger) as connection:
        connection.change(insert(schema.metadata.tables[table]).values(**values))


def remove(ledger: Ledger, table: str, **where: object) -> None:
    """Deletes rows of a ledger behind its back, whatever refers to them."""
    found = schema.metadata.tables[table]
    matching = and_(*(found.c[name] == value for name, value in where.items()))
    with bare(ledger) as connection:
        connection.rows("PRAGMA foreign_keys=OFF")
        assert connection.change(delete(found).where(matching)), (table, where)


def flip_byte(path: Path, place: int) -> None:
    """Changes one byte of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


class TrackingIsland(HandIsland):
    """An island made by hand that also keeps the published weights, with the island's own code."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        super().__init__(cluster, name)
        self.model = module_of(cluster.layout)
        self.weights = IslandWeights(
            self.model,
            cluster.layout,
            strategy=cluster.coordinator.manifests.run_strategy,
            download=cluster.manifest.download.build(),
        )
        self.kinds: list[str] = []  # of the frames it was given

    def fetch(self) -> Tensor:
        """Brings its weights to the published version; returns them."""
        wanted = 0 if self.weights.version is None else self.weights.version + 1
        carried = self.coordinator.manifests.run_strategy.fragment(wanted, is_last=False)
        have = self.weights.base_digest(carried)
        spooled = self.coordinator.download(self.identity, round_number=wanted, have_digest=have)
        receiver = self.weights.receive()
        for offset in range(0, spooled.nbytes, 100_000):
            receiver.feed(spooled.read(offset, 100_000))
        receiver.finish()
        self.kinds.append(spooled.header.kind)
        return self.published()

    def published(self) -> Tensor:
        """Its copy of the published weights, with which every round starts."""
        self.weights.train()
        self.weights.reset()
        return flat_of(self.model)


def flat_of(module: nn.Module) -> Tensor:
    """A copy of the module's parameters in one buffer, in their order."""
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def module_of(layout: Layout) -> nn.Module:
    """A module whose parameters are the layout's tensors."""
    module = nn.Module()
    for spec in layout.tensors:
        module.register_parameter(spec.name, nn.Parameter(torch.zeros(spec.shape)))
    return module
