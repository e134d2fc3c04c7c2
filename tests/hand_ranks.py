"""A sharded run's coordinator on a manual clock, and ranks made by hand: they only speak.

What a rank saves is made from its group, rank and step alone, so that a test can compute by itself
what a checkpoint must hold.
"""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from atoll import config
from atoll.clock import ManualClock
from atoll.coordinator import boot
from atoll.coordinator.sharded.part_uploads import PartRequest
from atoll.coordinator.sharded.service import ShardedCoordinator
from atoll.coordinator.stores import Stores
from atoll.layout import Layout, byte_view
from atoll.ledger.records import CheckpointRecord, GroupRecord, ManifestRecord, RunRecord
from atoll.proof import audit as auditing
from atoll.proof.report import AuditReport
from atoll.protocol.manifest import DataSettings, Manifest, ModelSettings
from atoll.protocol.messages import HeartbeatRequest, Identity, RegisterRequest
from atoll.protocol.sharded import (
    BoundaryReply,
    BoundaryRequest,
    GroupReply,
    GroupRequest,
    HeldSave,
    Launch,
    MissingReport,
    PartReply,
    PartReport,
    SaveReply,
    SaveReport,
)
from atoll.strategies import registry
from atoll.strategies.base import run_layout
from atoll.sums import digest as digests
from atoll.versions import weights
from tests.clusters import DATA_IDENTITY, definition_of, stores_in, values
from tests.ledgers import alone

RUN_ID = "by-hand"
TICK_SECONDS = 0.25
# Units: the root, and two blocks; none is a multiple of the ranks.
MODEL = Layout.of(
    [
        ("embedding", (13, 5), "float32"),
        ("blocks.0.weight", (7, 11), "float32"),
        ("blocks.0.bias", (7,), "float32"),
        ("blocks.1.weight", (7, 11), "float32"),
        ("blocks.1.bias", (7,), "float32"),
        ("head", (3, 3), "float32"),
    ]
)
# Two saves to a round, three steps to a save.
SETTINGS: dict[str, Any] = {
    "name": "by-hand",
    "strategy": "sharded",
    "inner": {"batch": 5},
    "sharded": {"save_every": 3, "checkpoint_every": 2},
    "membership": {"min_workers": 2},
    "stop": {"rounds": 4},
    "model": {},
    "data": {},
}
ROUND_STEPS = 6


def manifest_for(changes: Mapping[str, Any] | None = None) -> tuple[Manifest, Layout]:
    """A sharded manifest with `changes` by dotted name, and the run's layout."""
    table = {k: dict(v) if isinstance(v, dict) else v for k, v in SETTINGS.items()}
    for name, value in (changes or {}).items():
        *sections, last = name.split(".")
        place: dict[str, Any] = table
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    file = config.parse(table)
    data = DataSettings(definition={}, identity=dict(DATA_IDENTITY))
    empty = ModelSettings(
        definition=definition_of(MODEL), layout_digest="0" * 64, initial_digest="0" * 64
    )
    layout = run_layout(registry.any_of(file.manifest(empty, data)), MODEL)
    measured = {
        "layout_digest": layout.digest,
        "initial_digest": digests.digest(layout, initial(layout)).root,
    }
    return file.manifest(empty.model_copy(update=measured), data), layout


def initial(layout: Layout) -> Tensor:
    """The weights that a run made by hand starts from."""
    return values(layout, "initial", scale=1.0)


def state_at(layout: Layout, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weights and both moments of the whole model after a step, as all ranks have them."""
    found = [values(layout, f"{what}/{step}") for what in ("weights", "first", "second")]
    return found[0], found[1], found[2]


class Sea:
    """One sharded run's coordinator over a state directory, which can be opened again."""

    def __init__(self, home: Path, changes: Mapping[str, Any] | None = None) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.home = home
        self.manifest, self.layout = manifest_for(changes)
        self.sharded = registry.sharded(self.manifest)
        self.clock = ManualClock()
        self.dialled: list[tuple[str, int]] = []
        self.open_stores()
        if alone(self.stores.ledger).run.get() is None:
            self._create()
        self.coordinator = self._coordinator()

    def open_stores(self) -> None:
        self.stores: Stores = stores_in(self.home)
        self.ledger, self.blobs = self.stores.ledger, self.stores.blobs

    def _create(self) -> None:
        sha256 = self.manifest.sha256()
        header = weights.weights_header(
            self.layout,
            run_id=RUN_ID,
            manifest_sha256=sha256,
            version=0,
            digest=self.manifest.model.initial_digest,
        )
        stored = weights.store(self.blobs, header, initial(self.layout), layout=self.layout)
        alone(self.ledger).run.create(
            RunRecord(RUN_ID, self.clock.wall(), stored),
            ManifestRecord(1, sha256, self.manifest.body(), from_round=1),
        )

    def _coordinator(self) -> ShardedCoordinator:
        return boot.open_sharded(
            Stores(self.ledger, self.blobs, self.stores.spool),
            self.clock,
            layout=self.layout,
            dial=lambda address, port, _: self.dialled.append((address, port)),
        )

    def close(self) -> None:
        """Lets the directory go, as a process that ends does."""
        self.ledger.close()
        self.blobs.close()

    def restart(self) -> Self:
        """Ends this life without a word and opens the directory again, on a clock of its own."""
        self.close()
        self.clock = ManualClock(1e6, wall_start=self.clock.wall() + 1)
        self.open_stores()
        self.coordinator = self._coordinator()
        return self

    def settle(self) -> int:
        """Does all that is due now; how many checkpoints were recorded."""
        recorded = 0
        while self.coordinator.advance():
            recorded += 1
        return recorded

    def run_clock(self, *ranks: "HandRank", seconds: float) -> int:
        """Time passes with the heartbeats of `ranks`; how many checkpoints were recorded."""
        recorded = self.settle()
        for _ in range(round(seconds / TICK_SECONDS)):
            self.clock.advance(seconds=TICK_SECONDS)
            for rank in ranks:
                rank.beat()
            recorded += self.settle()
        return recorded

    @property
    def group(self) -> GroupRecord | None:
        return self.coordinator.groups.present

    def ranks(self, *names: str, **more: Any) -> list["HandRank"]:
        """Ranks that have joined and not asked for a group yet."""
        return [HandRank(self, name, **more).join() for name in names]

    def formed(self, *ranks: "HandRank") -> list["HandRank"]:
        """Brings `ranks` into a group; they in the order of its ring."""
        for rank in ranks:
            rank.ask()
        for rank in ranks:
            rank.measure()
        for rank in ranks:
            reply = rank.ask()
            assert reply.action == "train", reply
            rank.enter(reply)
        return sorted(ranks, key=lambda r: r.rank)

    def trained(self, ranks: list["HandRank"], round_number: int, *, upload: bool = True) -> None:
        """All ranks come to the end of a round: they save on the way and hand in its parts."""
        first, last = self.sharded.steps(round_number)
        for step in range(first, last + 1):
            if step % self.manifest.sharded.save_every == 0:
                for rank in ranks:
                    rank.save(step)
        for rank in ranks if upload else ():
            rank.hand_in(round_number)

    def audit(self, *, with_replay: bool = True) -> AuditReport:
        return auditing.audit(self.ledger, self.blobs, layout=self.layout, with_replay=with_replay)

    def state_hash(self) -> str:
        return self.coordinator.state_hash()


class HandRank:
    """A rank that only speaks. Its disk outlives its lives."""

    def __init__(self, sea: Sea, name: str, *, port: int = 4000, certificate: str = "") -> None:
        self.sea = sea
        self.name = name
        self.key = hashlib.sha256(name.encode()).hexdigest()
        self.port = port
        self.certificate = certificate
        self.incarnation = 0
        self.generation = 0
        self.label = b"root"  # roots are made from
        self.disk: list[HeldSave] = []
        self.formed = GroupReply(action="wait")
        self.pings: Callable[[str], float | None] = lambda _: 1.0
        self.launch: Launch | None = None
        self._measured = 0
        self._pings: dict[str, float] = {}

    @property
    def coordinator(self) -> ShardedCoordinator:
        return self.sea.coordinator

    def join(self) -> Self:
        """Registers: a new life, without a group."""
        reply = self.coordinator.register(
            RegisterRequest(
                run_id=RUN_ID,
                manifest_sha256=self.sea.manifest.sha256(),
                worker_id=self.name,
                island_key=self.key,
                ip_address="10.0.0.1",
                port=self.port,
                certificate=self.certificate,
                layout_digest=self.sea.layout.digest,
                data_identity=dict(DATA_IDENTITY),
            )
        )
        self.incarnation, self.generation = reply.incarnation, reply.generation
        self.formed = GroupReply(action="wait")
        return self

    @property
    def identity(self) -> Identity:
        """In the present generation, as a session that adopts it silently."""
        return Identity(
            run_id=RUN_ID,
            manifest_sha256=self.sea.manifest.sha256(),
            worker_id=self.name,
            incarnation=self.incarnation,
            island_key=self.key,
            generation=self.coordinator.generation,
        )

    def beat(self) -> None:
        self.coordinator.heartbeat(HeartbeatRequest(identity=self.identity))

    def leave(self) -> None:
        self.coordinator.deregister(self.identity)

    # Groups

    @property
    def number(self) -> int:
        return self.formed.group

    @property
    def rank(self) -> int:
        return [m.worker_id for m in self.formed.members].index(self.name)

    @property
    def size(self) -> int:
        return len(self.formed.members)

    def question(self, **changes: Any) -> GroupRequest:
        given: dict[str, Any] = {
            "identity": self.identity,
            "group": 0,
            "held": tuple(self.disk),
            "launch": self.launch,
            "measured": self._measured,
            "pings": self._pings,
        }
        return GroupRequest(**{**given, **changes})

    def ask(self, **changes: Any) -> GroupReply:
        """Asks for a group."""
        return self.coordinator.group(self.question(**changes))

    def measure(self) -> GroupReply:
        """Pings the candidate that it is told of, and asks again."""
        reply = self.ask()
        if reply.action == "measure":
            self._measured = reply.group
            found = {m.worker_id: self.pings(m.worker_id) for m in reply.members}
            self._pings = {
                name: ms for name, ms in found.items() if ms is not None and name != self.name
            }
        return self.ask()

    def enter(self, reply: GroupReply) -> None:
        """Is in the group from now on, and watches it."""
        self.formed = reply
        watched = self.watch()
        assert (watched.action, watched.group) == ("train", reply.group)

    def watch(self) -> GroupReply:
        """Whether the group that it is in goes on."""
        return self.ask(group=self.number, held=())

    def missing(self, *names: str) -> None:
        self.coordinator.missing(
            MissingReport(identity=self.identity, group=self.number, step=1, missing=names)
        )

    # Saves

    def part(self, step: int, *, rank: int | None = None) -> bytes:
        """The bytes of a save: this rank's, or that of another of its group."""
        place = self.rank if rank is None else rank % self.size
        shard = self.sea.sharded.shard(self.sea.layout, place, self.size)
        whole = state_at(self.sea.layout, step)
        return b"".join(bytes(byte_view(s.of(flat).clone())) for flat in whole for s in shard)

    def root(self, step: int, *, rank: int | None = None) -> str:
        return hashlib.sha256(self.label + self.part(step, rank=rank)).hexdigest()

    def held(self, step: int) -> HeldSave:
        return HeldSave(
            step=step,
            group=self.number,
            rank=self.rank,
            own=self.root(step),
            predecessor=self.root(step, rank=self.rank - 1),
        )

    def save(self, step: int) -> SaveReply:
        """Has its shard and its predecessor's on its disk, and says so."""
        self.disk = [*self.disk, self.held(step)][-8:]
        return self.coordinator.saved(SaveReport(identity=self.identity, save=self.held(step)))

    def request(self, round_number: int, **changes: Any) -> PartRequest:
        data = self.part(self.sea.sharded.steps(round_number)[1])
        given: dict[str, Any] = {
            "identity": self.identity,
            "group": self.number,
            "round": round_number,
            "sha256": hashlib.sha256(data).hexdigest(),
            "nbytes": len(data),
        }
        return PartRequest(**{**given, **changes})

    def upload(self, round_number: int) -> None:
        data = self.part(self.sea.sharded.steps(round_number)[1])
        stream = self.coordinator.begin_part(self.request(round_number))
        if stream is not None:
            for start in range(0, len(data), 100):
                self.coordinator.write_part(stream, data[start : start + 100])
            self.coordinator.commit_part(stream)

    def tell_part(self, round_number: int, **changes: Any) -> PartReply:
        first, step = self.sea.sharded.steps(round_number)
        given: dict[str, Any] = {
            "identity": self.identity,
            "group": self.number,
            "round": round_number,
            "step": step,
            "part": self.root(step),
            "blob": hashlib.sha256(self.part(step)).hexdigest(),
            "loss_sum": 240.0,
            "tokens": self._tokens(step - first + 1, changes.get("late", ())),
            "evaluation_loss": 4.0 + self.rank,
            "evaluation_tokens": 2,
        }
        return self.coordinator.part(PartReport(**{**given, **changes}))

    def _tokens(self, steps: int, late: tuple[tuple[int, int, int], ...]) -> int:
        """Of a round, without what late ranks left out: [r*B//N, (r+1)*B//N) of a step's rows."""
        batch = self.sea.manifest.inner.batch
        left_out = sum((r + 1) * batch // n - r * batch // n for _, r, n in late if n)
        return (steps * batch - left_out) * int(self.sea.manifest.data.identity["block"])

    def hand_in(self, round_number: int) -> PartReply:
        self.upload(round_number)
        return self.tell_part(round_number)

    def boundary(self, round_number: int) -> BoundaryReply:
        return self.coordinator.boundary(
            BoundaryRequest(identity=self.identity, group=self.number, round=round_number)
        )


def restore_of(*ranks: HandRank):
    """What the group that `ranks` form goes back to."""
    found = ranks[0].sea.formed(*ranks)
    assert found[0].formed.restore is not None
    return found[0].formed.restore


def digest_at(sea: Sea, step: int) -> str:
    """Of the weights after a step, by the whole buffer: nothing here is streamed."""
    return digests.digest(sea.layout, state_at(sea.layout, step)[0]).root


def checkpoint(sea: Sea) -> CheckpointRecord:
    """The newest."""
    return alone(sea.ledger).checkpoints.all()[-1]
