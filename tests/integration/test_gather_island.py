"""An island's own gather of versions: what it makes, and what it does where objects are missing."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll import config
from atoll.blobs.memory_bucket import MemoryBucket
from atoll.config import RunFile
from atoll.coordinator.service import Coordinator
from atoll.errors import AtollError, FrameError, StoreError
from atoll.gather import publish
from atoll.island.gather import kept
from atoll.island.gather.buckets import IslandBuckets
from atoll.island.run import Run
from atoll.layout import byte_view
from atoll.protocol.gather import prefix_of
from atoll.simulate.cluster import Outage, SimulatedCluster, worker_name
from atoll.sums import digest
from tests import clusters

ISLANDS, ROUNDS = 3, 4
NAMES = [worker_name(index) for index in range(ISLANDS)]


def run_file(*, weighting: str = "equal", **gather: Any) -> RunFile:
    return config.parse(
        {
            "name": "tiny",
            "strategy": "gather",
            "weighting": weighting,
            "sync_every": 2,
            "model": {
                "architecture": "gpt",
                "vocab": 16,
                "block": 8,
                "layers": 1,
                "heads": 2,
                "width": 64,
            },
            "data": {
                "kind": "synthetic",
                "seed": 1,
                "rows": 200,
                "held_out_rows": 4,
                "block": 8,
                "vocab": 16,
            },
            "inner": {"batch": 2},
            "upload": {"codec": "topk"},
            "download": {"codec": "fp32"},
            "outer": {"optimizer": "sgd", "lr": 1.0},
            "gather": {"buckets": {"main": {"url": "s3://anywhere"}}, **gather},
            "membership": {"min_workers": ISLANDS},
            "evaluate": {"every": 0},
            "stop": {"rounds": ROUNDS},
        }
    )


class Gathering:
    """A simulated run; `closed` is called with the bucket whenever a round has closed."""

    def __init__(
        self,
        home: Path,
        closed: Callable[[MemoryBucket, int], None] = lambda *_: None,
        outage: Outage | None = None,
        starts: bool = True,
        **gather: Any,
    ) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.home = home
        self.cluster = SimulatedCluster(run_file(**gather), home, outage=outage)
        bucket = self.cluster.coordinator.buckets["main"]
        assert isinstance(bucket, MemoryBucket)
        self._closed = lambda status: closed(bucket, status.version)
        if starts:
            self.run()

    def run(self) -> None:
        self.found = self.cluster.run(ISLANDS, self._closed)

    def coordinator(self) -> Coordinator:
        """The one that serves now."""
        found = self.cluster.coordinator.now
        assert isinstance(found, Coordinator)
        return found

    def islands(self) -> dict[str, Run]:
        found = {name: self.cluster.runs[name] for name in NAMES}
        assert all(isinstance(run, Run) for run in found.values())
        return found  # type: ignore[return-value]  # just looked

    def gathered(self) -> dict[str, int]:
        return {name: _buckets(run).gathered for name, run in self.islands().items()}

    def digests(self) -> set[str | None]:
        return {run.digest for run in self.islands().values()}


def _buckets(run: Run) -> IslandBuckets:
    assert isinstance(run.buckets, IslandBuckets)
    return run.buckets


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Gathering:
    return Gathering(tmp_path_factory.mktemp("calm"))


def test_islands_make_every_version_themselves_and_end_in_the_coordinators_digest(calm):
    assert calm.gathered() == dict.fromkeys(NAMES, ROUNDS)
    assert calm.digests() == {calm.found.digest}
    report, _ = clusters.audited(calm.home)
    assert (report.problems, report.replayed_rounds) == ([], ROUNDS)


def test_each_island_fetches_what_the_others_published_and_nothing_twice(calm):
    sent = {name: _buckets(run).traffic.sent for name, run in calm.islands().items()}
    got = {name: _buckets(run).traffic.received for name, run in calm.islands().items()}

    assert got == {name: sum(sent.values()) - sent[name] for name in NAMES}
    # Beside them each has downloaded the same, the weights at the start.
    whole = {name: _buckets(run).link_traffic.received for name, run in calm.islands().items()}
    assert len({whole[name] - got[name] for name in NAMES}) == 1


def test_nothing_of_a_round_stays_on_an_islands_disk_but_its_version(calm):
    left = [path.name for name in NAMES for path in (calm.home / name / "gather").iterdir()]

    assert left == [kept.NAME] * ISLANDS


@pytest.mark.parametrize("version", [0, 2, ROUNDS + 3])
def test_weights_of_another_history_on_an_islands_disk_are_not_its_own(tmp_path, calm, version):
    """Their hash is right; the coordinator never published them."""
    found = Gathering(tmp_path, starts=False)
    layout = found.coordinator().layout
    other = torch.full((layout.size,), 0.5)
    told = digest.digest(layout, other).root
    kept.keep(tmp_path / NAMES[0] / "gather", version, told, byte_view(other))

    found.run()

    assert found.found.digest == calm.found.digest
    assert found.digests() == calm.digests()


def lost(bucket: MemoryBucket, key: str) -> None:
    bucket.remove(key)


def cut(bucket: MemoryBucket, key: str) -> None:
    bucket.put(key, b"ATOL")


def swapped(bucket: MemoryBucket, key: str) -> None:
    """Another object of the right size."""
    tag = bucket.look(key, deadline=1e18)
    assert tag is not None
    [data] = bucket.pieces(key, tag, 0, tag.nbytes, deadline=1e18)
    bucket.put(key, bytes(data)[:-40] + bytes(40))


SPOILED = {"lost": lost, "cut": cut, "swapped": swapped}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
@pytest.mark.parametrize("part", ["frames", "statements"])
def test_who_lacks_an_object_takes_the_coordinators_frame(tmp_path, caplog, calm, spoil, part):
    victim = prefix_of("simulated", NAMES[1])
    spoiled: list[str] = []

    def closed(bucket: MemoryBucket, version: int) -> None:
        if version == 2:
            newest = publish.statement_key(victim, 2)
            for key in list(bucket.keys(f"{victim}/{part}")):
                if part == "frames" or key == newest:
                    spoiled.append(key)
                    spoil(bucket, key)

    caplog.set_level("WARNING", logger="atoll.island")
    found = Gathering(tmp_path, closed, keep=1)

    assert spoiled
    others = {name: ROUNDS - 1 for name in NAMES if name != NAMES[1]}
    # The owner has its own frame on its disk.
    assert found.gathered() == {**others, NAMES[1]: ROUNDS}
    assert found.digests() == {found.found.digest} == calm.digests()
    told = [
        r for r in caplog.records if r.message == "not gathered, taking the coordinator's frame"
    ]
    assert [getattr(record, "version") for record in told] == [2, 2]  # noqa: B009  # an extra


def test_own_old_statement_that_is_damaged_holds_up_no_hand_in(tmp_path, caplog, calm):
    """It is not known then which frames may go: none does, and what is new is published once."""
    victim = prefix_of("simulated", NAMES[1])

    def closed(bucket: MemoryBucket, version: int) -> None:
        if version == 1:
            cut(bucket, publish.statement_key(victim, 1))

    caplog.set_level("WARNING", logger="atoll.island")
    found = Gathering(tmp_path, closed, keep=ROUNDS)

    said = [record.message for record in caplog.records]
    assert "publishing again" not in said
    assert said.count("old objects stay in the bucket") == ROUNDS - 1
    sent = {name: _buckets(run).traffic.sent for name, run in found.islands().items()}
    assert sent == {name: _buckets(run).traffic.sent for name, run in calm.islands().items()}
    assert found.digests() == calm.digests()


def test_coordinator_that_dies_between_two_rounds_changes_no_bit(tmp_path, calm):
    found = Gathering(tmp_path, outage=Outage(version=2, seconds=3.0))

    assert found.found.digest == calm.found.digest
    assert found.digests() == calm.digests()


@pytest.mark.parametrize("weighting", ["equal", "tokens"])
def test_island_makes_the_coordinators_frame_byte_for_byte(tmp_path, monkeypatch, weighting):
    """What it feeds to its receiver in one round is what it would have downloaded."""
    made: dict[int, bytes] = {}
    offered: dict[int, bytes] = {}
    collect = IslandBuckets.collect

    def watched(self: IslandBuckets, wanted: Any) -> None:
        data = bytearray()

        def sink(piece: bytes | memoryview) -> None:
            data.extend(piece)
            wanted.sink(piece)

        collect(self, replace(wanted, sink=sink))
        made[wanted.window.round] = bytes(data)

    def closed(_: MemoryBucket, version: int) -> None:
        weights = found.coordinator().weights
        digest = weights.base_digest(version)
        spooled = weights.frame_for(round_number=version, have_digest=digest)
        offered[version] = spooled.read(0, spooled.nbytes)

    monkeypatch.setattr(IslandBuckets, "collect", watched)
    found = Gathering(tmp_path, closed, starts=False, weighting=weighting)

    found.run()

    assert sorted(made) == list(range(1, ROUNDS + 1))
    assert made == offered


def test_frame_that_breaks_off_is_followed_by_the_whole_weights(tmp_path, monkeypatch, calm):
    """Its receiver has got a part of it, so nobody may take that for nothing."""
    collect, met = IslandBuckets.collect, list[AtollError]()

    def broken(self: IslandBuckets, wanted: Any) -> None:
        fed: list[object] = []

        def sink(piece: bytes | memoryview) -> None:
            if wanted.window.round == 2 and fed and not met:
                raise StoreError("its file was cut")
            fed.append(wanted.sink(piece))

        try:
            collect(self, replace(wanted, sink=sink))
        except AtollError as error:
            met.append(error)
            raise

    monkeypatch.setattr(IslandBuckets, "collect", broken)

    found = Gathering(tmp_path)

    assert [type(error) for error in met] == [FrameError]
    assert sorted(found.gathered().values()) == [ROUNDS - 1, ROUNDS, ROUNDS]
    assert found.digests() == calm.digests()
