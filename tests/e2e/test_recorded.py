"""What is on the way between islands and a coordinator is what the manifest says, and only that.

Every island is the same command: an address and a token. A recording proxy stands in between, and
the coordinator's run file alone differs from run to run. Sizes are held against formulas of
their own (docs/wire-format.md), counted from the bytes that passed.
"""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from atoll.clock import SystemClock
from atoll.coordinator.planes.access import Role
from atoll.island import trainer
from atoll.island.link.network import NetworkLink
from atoll.island.run import Run
from atoll.island.state.store import IslandIdentity, IslandStore
from tests import proxy, served
from tests.lives import Lives
from tests.proxy import Frame, Record
from tests.served import TOKENS

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(120)]

ISLANDS = ("island-0", "island-1")
BATCH, BLOCK, VOCAB, WIDTH, LAYERS = 3, 8, 33, 11, 4
# Odd numbers, so that every rounding up of a size shows.
OF_BLOCK = 12 * WIDTH * WIDTH + 2 * WIDTH
OTHERS = {
    "tokens.weight": VOCAB * WIDTH,
    "head.weight": VOCAB * WIDTH,
    "positions.weight": BLOCK * WIDTH,
    "norm.weight": WIDTH,
}
MODEL = LAYERS * OF_BLOCK + sum(OTHERS.values())

SIZES = {
    "fp32": lambda n: 4 * n,
    "bf16": lambda n: 2 * n,
    "int8": lambda n: n + 4 * ceil(n / 256),
    "int4": lambda n: ceil(n / 2) + 4 * ceil(n / 128),
    "sign": lambda n: ceil(n / 8) + 4 * ceil(n / 256),
    "topk": lambda n: n // 4096 * 82 + _rest_of_topk(ceil(n % 4096 / 64)),
}
FORMATS = {
    "fp32": "fp32",
    "bf16": "bf16_nearest",
    "int8": "int8_256",
    "int4": "int4_128",
    "sign": "sign_256",
    "topk": "topk_64",
}


def _rest_of_topk(kept: int) -> int:
    return (ceil(6 * kept / 8) + 2 * ceil(2 * kept / 8) + 2) if kept else 0


@dataclass(frozen=True)
class Said:
    """What a run file says; nothing else differs between the runs."""

    upload: str = "fp32"
    download: str = "fp32"
    sync_every: int = 2
    fragments: int = 1
    rounds: int = 3

    @property
    def rows(self) -> int:
        """Of one contribution."""
        return self.sync_every // self.fragments * BATCH

    def write(self, path: Path) -> Path:
        streaming = f'mode = "streaming"\nnum_fragments = {self.fragments}\ndelay_steps = 1'
        path.write_text(
            f"""
name = "recorded"
seed = 3
sync_every = {self.sync_every}
heartbeat_interval = 600.0
heartbeat_timeout = 6000.0
{streaming if self.fragments > 1 else ""}
[model]
architecture = "gpt"
vocab = {VOCAB}
block = {BLOCK}
layers = {LAYERS}
heads = 1
width = {WIDTH}
[data]
kind = "synthetic"
seed = 1
rows = 500
held_out_rows = 4
block = {BLOCK}
vocab = 32
[inner]
batch = {BATCH}
[upload]
codec = "{self.upload}"
[download]
codec = "{self.download}"
[membership]
min_workers = 2
[evaluate]
every = 0
[stop]
rounds = {self.rounds}
"""
        )
        return path


BASE = Said()
CODECS = (
    BASE,
    Said(upload="bf16", download="int8"),
    Said(upload="int8", download="int4"),
    Said(upload="int4", download="sign"),
    Said(upload="sign", download="topk"),
    Said(upload="topk", download="bf16"),
)
LONGER = Said(sync_every=5)
# The last round carries all fragments; before it, every one has its turn.
TWO = Said(upload="int4", download="bf16", sync_every=4, fragments=2, rounds=5)
THREE = Said(upload="int8", download="int8", sync_every=6, fragments=3, rounds=7)
ALL = (*CODECS, LONGER, TWO, THREE)
STREAMING = (TWO, THREE)
# Elements of the fragments: blocks in turn; of the others the largest first, to the lightest.
HEAVY = [VOCAB * WIDTH + BLOCK * WIDTH, VOCAB * WIDTH + WIDTH]
FRAGMENTS = {
    1: [MODEL],
    2: [2 * OF_BLOCK + HEAVY[0], 2 * OF_BLOCK + HEAVY[1]],
    3: [2 * OF_BLOCK, OF_BLOCK + HEAVY[0], OF_BLOCK + HEAVY[1]],
}
WHOLE = -1


def name_of(said: Said) -> str:
    parts = said.upload, said.download, f"H{said.sync_every}", f"P{said.fragments}"
    return "-".join(parts)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[Said, Record]:
    """What passed in every run; some at a time, since their processes mostly load and wait."""
    homes = [tmp_path_factory.mktemp(name_of(said)) for said in ALL]
    with ThreadPoolExecutor(3) as pool:
        return dict(zip(ALL, pool.map(recorded, homes, ALL), strict=True))


def recorded(home: Path, said: Said) -> Record:
    with Lives(home, said.write(home / "run.toml")) as run:
        run.serve()
        with proxy.recording(run.url) as between:
            for name in ISLANDS:
                run.join(name, between.url)
            run.finish()
            return between.record


def each(*said: Said) -> Any:
    return pytest.mark.parametrize("said", said, ids=name_of)


Shape = tuple[int, str, int, int, int, int]


def shape(frame: Frame) -> Shape:
    """Round, format, fragment, elements, rows, and the bytes of the payload that passed."""
    told = frame.header
    names = ("round", "codec", "fragment", "elements", "rows")
    return (*(told[name] for name in names), frame.payload_bytes)


def expected(said: Said, codec: str, *, rows: int) -> list[Shape]:
    """A frame for every round, each with what is its round's of the model."""
    found = []
    for number in range(1, said.rounds + 1):
        is_whole = said.fragments > 1 and number == said.rounds
        fragment = WHOLE if is_whole else (number - 1) % said.fragments
        elements = MODEL if is_whole else FRAGMENTS[said.fragments][fragment]
        size = SIZES[codec](elements)
        found.append((number, FORMATS[codec], fragment, elements, rows, size))
    return found


@each(*ALL)
@pytest.mark.parametrize("island", ISLANDS)
def test_island_sends_one_frame_a_round_of_the_fragment_rows_and_codec_of_the_manifest(
    records, said, island
):
    sent = records[said].of(island).uploads

    assert [shape(frame) for frame in sent] == expected(said, said.upload, rows=said.rows)
    assert {frame.header["kind"] for frame in sent} == {"contribution"}


@each(*ALL)
@pytest.mark.parametrize("island", ISLANDS)
def test_island_fetches_one_frame_a_round_in_the_codec_of_the_manifest(records, said, island):
    first, *later = records[said].of(island).downloads

    assert shape(first) == (0, "fp32", WHOLE, MODEL, 0, 4 * MODEL)
    assert [shape(frame) for frame in later] == expected(said, said.download, rows=0)
    # A lossless round is no shorter as an update.
    kind = "weights" if said.download == "fp32" else "update"
    assert {frame.header["kind"] for frame in later} == {kind}


@each(*STREAMING)
def test_frames_of_a_cycle_hold_every_tensor_once_and_blocks_in_turn(records, said):
    cycle = records[said].of(ISLANDS[0]).uploads[: said.fragments]

    held = [frame.tensors for frame in cycle]

    names = [name for tensors in held for name in tensors]
    assert sorted(names) == sorted(records[said].uploads[-1].tensors)
    assert len(names) == len(set(names)) == LAYERS * 6 + len(OTHERS)
    assert sum(sum(tensors.values()) for tensors in held) == MODEL
    assert [
        sorted({int(name.split(".")[1]) for name in tensors if name.startswith("blocks.")})
        for tensors in held
    ] == [list(range(part, LAYERS, said.fragments)) for part in range(said.fragments)]


@each(*ALL)
def test_leases_are_of_so_many_rows_as_the_manifest_says(records, said):
    assert {lease.rows for lease in records[said].leases} == {said.rows}


def test_every_run_file_shows_on_the_way(records):
    """The control: no two manifests are recorded alike, whatever differs between them."""
    seen = {
        tuple(sorted(shape(frame) for frame in [*record.uploads, *record.downloads]))
        for record in records.values()
    }

    assert len(seen) == len(ALL)


@each(*ALL)
def test_islands_say_nothing_before_they_have_asked_for_the_settings(records, said):
    """Then they register with those, so that nothing of their own could have taken part."""
    messages = records[said].said
    registered = [body for _, path, body in messages if path == "/workers/register"]

    assert messages[0] == ("GET", "/info", None)
    assert [body["settings"]["sync_every"] for body in registered] == [said.sync_every] * 2
    assert [body["settings"]["num_fragments"] for body in registered] == [said.fragments] * 2
    assert [
        (body["settings"]["upload"]["codec"], body["settings"]["download"]["codec"])
        for body in registered
    ] == [(said.upload, said.download)] * 2


# Speeds

EVERY = 4
STEP_SECONDS = {"island-0": 0.25, "island-1": 1.0}  # so the second has a fourth of the speed


class Pace(SystemClock):
    """Time passes by so much with every step, and while nothing is trained not at all."""

    def __init__(self, seconds: float) -> None:
        self._now = 0.0
        self._seconds = seconds

    def now(self) -> float:
        return self._now

    def step(self) -> None:
        self._now += self._seconds


def paced(url: str, home: Path, name: str, together: threading.Barrier) -> None:
    """An island that makes its steps at its pace and says so after each of them.

    Both begin their pieces together: so every round has both of them.
    """
    clock = Pace(STEP_SECONDS[name])
    with ExitStack() as held:
        link = NetworkLink(url, token=TOKENS[Role.WORKER])
        held.callback(link.close)
        store = IslandStore(home / name)
        held.callback(store.close)
        chance = random.Random(name)
        identity = IslandIdentity(name, chance.randbytes(32).hex())
        run = Run(link, store, clock, identity=identity, jitter=chance)

        def after_step() -> None:
            clock.step()
            if run.telemetry().step == 1:
                together.wait(proxy.LIMIT_SECONDS)
            run.beat()

        trainer.train(run, after_step=after_step)


def asynchronous(home: Path, *, dylu: bool) -> Record:
    changes: dict[str, Any] = {
        "mode": "async",
        "sync_every": EVERY,
        "dylu": dylu,
        "inner": {"batch": BATCH},
        "outer": {"optimizer": "delayed_nesterov", "delay": 2},
        "membership": {"min_workers": 2, "grace_seconds": 1000.0},
        "stop": {"rounds": 3},
    }
    together = threading.Barrier(len(ISLANDS))
    with (
        served.serving(home / "run", **changes) as run,
        proxy.recording(run.url) as between,
    ):
        islands = [
            threading.Thread(target=paced, args=(between.url, home, name, together))
            for name in ISLANDS
        ]
        for island in islands:
            island.start()
        for island in islands:
            island.join(proxy.LIMIT_SECONDS)
            assert not island.is_alive()
        return between.record


@pytest.fixture(scope="module")
def speeds(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Record]:
    home = tmp_path_factory.mktemp("speeds")
    return {dylu: asynchronous(home / str(dylu), dylu=dylu) for dylu in (False, True)}


def trained(record: Record, name: str) -> list[int]:
    """Rows of the island's contributions, in turn; its leases are of the same."""
    rows = [frame.header["rows"] for frame in record.of(name).uploads]
    assert [lease.rows for lease in record.of(name).leases] == rows
    return rows


@pytest.mark.parametrize("dylu", [False, True])
def test_fast_island_is_given_all_steps(speeds, dylu):
    assert trained(speeds[dylu], "island-0") == [EVERY * BATCH] * 3


def test_slow_island_is_given_fewer_steps_where_the_manifest_says_so(speeds):
    """At first its speed is not known; its frames are as large as ever."""
    assert trained(speeds[True], "island-1") == [EVERY * BATCH, BATCH, BATCH]
    assert trained(speeds[False], "island-1") == [EVERY * BATCH] * 3
    sizes = {frame.payload_bytes for record in speeds.values() for frame in record.uploads}
    assert len(sizes) == 1


@pytest.mark.parametrize("dylu", [False, True])
def test_both_islands_tell_their_speed_whatever_the_manifest_says(speeds, dylu):
    """So the coordinator's setting alone decides whether it is heeded."""
    told = {
        body["identity"]["worker_id"]: body["telemetry"]["tokens_per_second"]
        for _, path, body in speeds[dylu].said
        if path.endswith("/heartbeat")
    }

    assert told["island-0"] == 4 * told["island-1"] > 0
