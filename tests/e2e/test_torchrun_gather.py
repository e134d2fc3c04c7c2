"""An island of two ranks (torchrun, DDP) beside one of one process in a gather run.

Its leader alone publishes, announces and gathers; in one run it is killed inside its own gather,
and a second launch goes on. Buckets are directories; the island of one process is a real one, too.
"""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import lives, processes, torchruns
from tests.lives import History, Lives, Place
from tests.processes import FAULTS

pytestmark = [pytest.mark.xdist_group("torchrun-gather"), pytest.mark.timeout(300)]

SINGLE, PAIR = "island-0", "island-1"  # the names `atoll simulate` gives
ROUNDS, KILLED_IN = 4, 2
TOLERANCE = 1e-6  # of a loss; measured: 1.5e-8


def run_file(home: Path) -> Path:
    home.mkdir(parents=True, exist_ok=True)
    more = f"""
strategy = "gather"
[outer]
optimizer = "sgd"
lr = 1.0
[gather.buckets.main]
url = "{home / "bucket"}"
"""
    return lives.run_file(
        *(home / "run.toml", Place()),
        rounds=ROUNDS,
        min_workers=2,
        retain="all",
        more=more,
        codecs=("topk", "fp32"),
    )


@dataclass(frozen=True)
class Ended:
    """What a run came to."""

    history: History
    audit: dict[str, Any]
    log: str  # of the pair's last launch
    codes: list[int]  # of its launches

    @property
    def told(self) -> dict[str, Any]:
        """What the pair said of itself, once."""
        _, text = self.log.split("\n{\n")
        return dict(json.loads("{" + text.partition("\n}")[0] + "}"))

    def losses(self) -> list[float]:
        """Mean training loss of each round."""
        found = []
        for number in range(1, ROUNDS + 1):
            counted = [c for c in self.history.contributions if c.round == number]
            found.append(sum(c.loss_sum for c in counted) / sum(c.tokens for c in counted))
        return found


def ended(home: Path, points: Sequence[str]) -> Ended:
    """A run in which each launch of the pair has its point; the last one goes to the end."""
    codes: list[int] = []
    with Lives(home, run_file(home)) as run, ExitStack() as stack:
        run.serve()
        run.join(SINGLE)
        for number, point in enumerate(points):
            group = stack.enter_context(launched(run, home, number, point))
            codes.append(group.wait())
        run.finish()
        return Ended(run.history(), run.audit(), group.log(), codes)


def launched(run: Lives, home: Path, number: int, point: str) -> Any:
    folder = home / f"launch-{number}"
    folder.mkdir()
    words = [str(FAULTS / "gatherer_with_failpoint.py"), point, str(folder), "join", run.url]
    words += ["--worker-id", PAIR, "--state", str(home / PAIR), "--parallel", "ddp", "--json"]
    words += ["--device", "cpu"]
    return torchruns.torchrun(words, folder / "log", token=processes.TOKENS.worker)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return ended(tmp_path_factory.mktemp("calm"), ["none@0"])


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    home = tmp_path_factory.mktemp("killed")
    return ended(home, [f"object@{KILLED_IN}", "none@0"])


def test_pair_of_ranks_gathers_every_version_and_ends_in_the_runs_digest(calm):
    assert calm.codes == [0]
    assert (calm.told["version"], calm.told["digest"]) == (ROUNDS, calm.history.digests[-1])
    assert (calm.told["gathered_versions"], calm.told["stale_rounds"]) == (ROUNDS, 0)
    # Once for both ranks: as much as the other one published.
    others = [c.nbytes for c in calm.history.contributions if c.worker_id == SINGLE]
    assert calm.told["bucket_bytes_received"] == sum(others)


@pytest.mark.parametrize("name", ["calm", "killed"])
def test_run_with_a_pair_of_ranks_replays_clean(request, name):
    audit = request.getfixturevalue(name).audit

    assert (audit["exit_code"], audit["problems"]) == (0, [])
    assert audit["replayed_rounds"] == ROUNDS


def test_pair_whose_leader_dies_in_its_gather_goes_on_to_the_calm_runs_digests(killed, calm):
    assert killed.codes[0] != 0 and killed.codes[1] == 0
    assert killed.history.counted() == calm.history.counted()
    assert killed.history.digests == calm.history.digests
    assert killed.told["digest"] == calm.history.digests[-1]
    # The object that it died over was there: of that version it fetched nothing.
    others = {c.round: c.nbytes for c in killed.history.contributions if c.worker_id == SINGLE}
    rest = sum(nbytes for number, nbytes in others.items() if number > KILLED_IN)
    assert killed.told["gathered_versions"] == ROUNDS - KILLED_IN + 1
    assert killed.told["bucket_bytes_received"] == rest


def test_pair_trains_as_one_process_does(calm, tmp_path):
    """Ranks add in another order, so not to the bit; the simulation has islands of one process."""
    file = run_file(tmp_path)
    same = simulated(file)
    file.write_text(file.read_text().replace("lr = 2e-3", "lr = 2.2e-3"))

    assert calm.losses() == pytest.approx(same, rel=TOLERANCE)
    # The control: the comparison sees a tenth more of a learning rate.
    assert calm.losses() != pytest.approx(simulated(file), rel=10 * TOLERANCE)


def simulated(file: Path) -> list[float]:
    """Mean training loss of each round where islands are single processes."""
    history = processes.simulate(file)["status"]["history"]
    return [entry["train_loss"] for entry in history if entry["round"] > 0]
