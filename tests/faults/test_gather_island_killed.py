"""`kill -9` of an island inside its own gather of a version, one life after another.

It goes on from what its spool has: no byte comes to its disk twice, and the run's bits are those of
one that nobody killed. Buckets are directories.
"""

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import lives
from tests.faults.gatherer_with_failpoint import POINTS
from tests.lives import History, Lives, Place
from tests.processes import KILLED

pytestmark = [pytest.mark.xdist_group("gather-island-killed"), pytest.mark.timeout(240)]

VICTIM, ISLANDS = "island-1", ("island-0", "island-1", "island-2")
OTHERS = len(ISLANDS) - 1
FIRST = 2  # the version in whose gather the first point is; each next one has the next point
ROUNDS = FIRST + len(POINTS)  # one that nobody is killed in
FIRST_PIECE = 16 << 10  # of an object, before its peer is known to be quick; the rest follows


@dataclass
class Ended:
    """What a run came to, and what the victim's lives wrote to their spools."""

    history: History
    audit: dict[str, Any]
    told: dict[str, dict[str, Any]]  # what each island's last life said of itself
    exit_codes: list[int | None] = field(default_factory=list)
    written: list[list[tuple[int, str, int, int]]] = field(default_factory=list)  # by life

    def twice(self) -> int:
        """Bytes that came to the victim's disk more than once."""
        found = Counter(
            (version, uid, place)
            for life in self.written
            for version, uid, start, nbytes in life
            for place in range(start, start + nbytes)
        )
        return sum(times - 1 for times in found.values())

    def of(self, life: int, version: int) -> int:
        """Bytes of a version that a life wrote."""
        return sum(n for number, _, _, n in self.written[life] if number == version)

    def listed(self, version: int) -> int:
        """Bytes of the others' objects of a version."""
        found = self.history.contributions
        return sum(c.nbytes for c in found if c.round == version and c.worker_id != VICTIM)


def ended(home: Path, points: Sequence[str], *, spoil: bool = False) -> Ended:
    """A run whose victim has a life for each point, and one to the end; some lose their spools."""
    home.mkdir(parents=True, exist_ok=True)
    more = f"""
strategy = "gather"
[outer]
optimizer = "sgd"
lr = 1.0
[gather.buckets.main]
url = "{home / "bucket"}"
"""
    file = lives.run_file(
        *(home / "run.toml", Place()),
        rounds=ROUNDS,
        min_workers=len(ISLANDS),
        retain="all",
        more=more,
        codecs=("topk", "fp32"),
    )
    text = file.read_text().replace("sync_every = 6", "sync_every = 2")
    # Objects of more than one piece.
    file.write_text(text.replace("width = 64", "width = 224").replace("batch = 4", "batch = 1"))
    codes: list[int | None] = []
    folders = [home / f"life-{number}" for number in range(len(points) + 1)]
    with Lives(home, file) as run:
        run.serve()
        for island in ISLANDS:
            if island != VICTIM:
                run.join(island, options=["--json"])
        for number, folder in enumerate(folders):
            point = f"{points[number]}@{FIRST + number}" if number < len(points) else "none@0"
            variables = lives.failpoint("gatherer", point, folder)
            life = run.join(VICTIM, options=["--json"], **variables)
            if number < len(points):
                codes.append(life.wait())
                if spoil:
                    shutil.rmtree(run.home / VICTIM / "gather" / f"{FIRST + number:08d}")
        run.finish()
        told = {name: _told(run.home / f"{name}.log") for name in ISLANDS}
        written = [_written(folder / "written") for folder in folders]
        return Ended(run.history(), run.audit(), told, codes, written)


def _told(log: Path) -> dict[str, Any]:
    """What an island's last life said of itself."""
    return dict(json.loads(log.read_text().rpartition("\n{\n")[2].join(["{", ""])))


def _written(path: Path) -> list[tuple[int, str, int, int]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(v), uid, int(s), int(n)) for v, uid, s, n in map(str.split, lines)]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return ended(tmp_path_factory.mktemp("killed"), POINTS)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return ended(tmp_path_factory.mktemp("calm"), ())


def test_island_killed_at_every_point_of_its_gather_ends_in_the_calm_runs_digest(killed, calm):
    assert killed.exit_codes == [KILLED] * len(POINTS)
    assert killed.history.counted() == calm.history.counted()
    assert killed.history.digests == calm.history.digests
    assert {told["digest"] for told in killed.told.values()} == {calm.history.digests[-1]}


def test_run_with_such_an_island_replays_clean(killed):
    assert (killed.audit["exit_code"], killed.audit["problems"]) == (0, [])
    assert killed.audit["replayed_rounds"] == ROUNDS


def test_next_life_downloads_only_the_rest(killed):
    """By what came to its disk: a piece, an object, all of it was there already."""
    listed = [killed.listed(FIRST + life) for life in range(len(POINTS))]
    before = [killed.of(life, FIRST + life) for life in range(len(POINTS))]
    rest = [killed.of(life + 1, FIRST + life) for life in range(len(POINTS))]

    by_point = dict(zip(POINTS, zip(before, rest, listed, strict=True), strict=True))
    assert min(listed) > 2 * FIRST_PIECE
    # Another thread may have been writing, and was not heard of.
    assert FIRST_PIECE <= by_point["piece"][0] < listed[0]
    assert 0 < by_point["piece"][1] <= listed[0] - FIRST_PIECE
    assert by_point["object"][1] <= listed[1] / 2 + 1
    assert [by_point[name][1] for name in ("fed", "made")] == [0, 0]
    assert killed.twice() == 0


def test_next_life_takes_no_whole_weights(killed, calm):
    """They are on its disk: it downloads what follows, and that from buckets."""
    again, first = killed.told[VICTIM], calm.told[VICTIM]

    assert again["bytes_received"] == again["bucket_bytes_received"] > 0
    # The control: a first life has to.
    assert first["bytes_received"] > 10 * first["bucket_bytes_received"]


def test_control_island_that_lost_its_spool_downloads_again(tmp_path):
    found = ended(tmp_path, ["object"], spoil=True)

    assert found.exit_codes == [KILLED]
    assert found.twice() >= found.listed(FIRST) // OTHERS - 1


def test_calm_island_fetches_every_object_of_the_others_once(calm):
    assert calm.twice() == 0
    versions = range(1, ROUNDS + 1)
    assert [calm.of(0, v) for v in versions] == [calm.listed(v) for v in versions]
