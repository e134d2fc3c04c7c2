"""What `test_resume` says, of streaming runs: deaths and lost replies do not show in the bits.

Two fragments, and two hand-ins under way where a round has one step: so faults hit an island whose
own weights hold rows that no published version has.
"""

from typing import Any

import pytest

from tests.integration.test_resume import FAULTS
from tests.seas import Call, Sea, killed_before
from tests.tiny import MODEL

STREAMING: dict[str, Any] = {
    "model": {**MODEL, "layers": 2},
    "mode": "streaming",
    "sync_every": 2,
    "num_fragments": 2,
    "delay_steps": 1,
    "local_weight": 0.25,
    "stop.rounds": 7,
}


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of a run in which nothing goes wrong."""
    return Sea(tmp_path_factory.mktemp("calm"), **STREAMING).run()


@pytest.mark.parametrize("name", FAULTS)
def test_island_ends_in_the_bits_of_a_calm_run(tmp_path, calm, name):
    sea = Sea(tmp_path, **STREAMING)
    sea.faults = FAULTS[name]

    assert sea.run() == calm
    assert all(sea.calls[island, method] >= n for island, method, n in sea.faults)


def test_island_that_lost_its_directory_ends_in_other_bits(tmp_path, calm):
    """The control: what an island saves is part of what the bits depend on."""

    def erased(sea: Sea, call: Any) -> None:
        for path in (sea.home / "a").glob("*-[0-9]*"):
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
        FAULTS["killed in training"]["a", "step", 3](sea, call)

    sea = Sea(tmp_path, **STREAMING)
    sea.faults = {("a", "step", 4): erased}

    assert sea.run() != calm


@pytest.mark.parametrize("step", [6, 8])
def test_island_killed_between_two_codecs_carries_its_residual_on(tmp_path, step):
    """A new manifest drops nothing any more; rounds that were planned before still do."""

    def moved(sea: Sea, call: Call) -> Any:
        sea.restart(**{"upload.codec": "fp32"})
        return call()

    settings = {**STREAMING, "sync_every": 4, "delay_steps": 3, "upload.codec": "int4"}
    calm, sea = Sea(tmp_path / "calm", **settings), Sea(tmp_path / "killed", **settings)
    calm.faults = {("a", "step", 5): moved}
    sea.faults = {("a", "step", 5): moved, ("a", "step", step): killed_before}

    assert sea.run() == calm.run()
    assert sea.lives["a"] == 2
