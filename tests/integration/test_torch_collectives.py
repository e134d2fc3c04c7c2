"""Collectives on gloo, between five real processes that are started once: the bits of `local`."""

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch import Tensor

from atoll.collectives import schedule
from tests.rank_groups import sums, threads
from tests.ranks import collects
from tests.ranks.collects import CHUNK_BYTES, SIZES

LIMIT_SECONDS = 120.0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with all results of all processes."""
    folder = tmp_path_factory.mktemp("collects")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([collects.__name__])
    started = [
        context.Process(target=collects.process, args=(rank, str(folder)), daemon=True)
        for rank in range(max(SIZES))
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(LIMIT_SECONDS)
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in started] == [0] * len(started)
    return folder


@pytest.mark.parametrize("size", SIZES)
def test_every_result_has_the_bits_of_the_local_transport(home, size):
    wanted: list[dict[str, Tensor]] = threads(
        size, "direct", collects.cases, chunk_bytes=CHUNK_BYTES
    )

    for rank in range(size):
        found = load_file(home / f"{size}-{rank}")
        assert found.keys() == wanted[rank].keys()
        differ = [name for name, one in found.items() if not torch.equal(one, wanted[rank][name])]
        assert differ == []


def test_native_sum_is_equal_within_rounding_alone(home):
    wanted = torch.cat(sums(5, 1_003, torch.float32))
    spans = schedule.cut(1_003, 5)

    for rank in range(5):
        found = load_file(home / f"native-{rank}")
        torch.testing.assert_close(found["all"], wanted, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(found["part"], spans[rank].of(wanted), rtol=1e-5, atol=1e-4)
        assert not torch.equal(found["all"], wanted)  # the control: gloo's order is another


def test_ranks_at_different_exchanges_are_told_and_take_nothing(home):
    told = [(home / f"told-{rank}").read_text().splitlines()[0] for rank in range(5)]

    assert all(line.startswith("PROTOCOL") for line in told)
    assert all("from rank 2 belongs to another" in told[rank] for rank in (0, 1, 3, 4))
    assert "from rank 0 belongs to another" in told[2]


def test_deadline_names_all_others_and_fills_in_nothing(home):
    for rank in (0, 1, 2, 4):
        line = (home / f"told-{rank}").read_text().splitlines()[1]
        others = sorted({0, 1, 2, 3, 4} - {rank})
        assert line.startswith(f"MISSING_RANKS {others} ")
        assert "nothing is filled in" in line


def test_abort_reaches_whoever_waits_and_whoever_comes_later(home):
    told = (home / "told-0").read_text().splitlines()[2:]

    assert told == ["GROUP_BROKEN  rank 1 left"] * 2


def test_rank_with_too_much_to_say_is_named_on_all_ranks(home):
    told = [(home / f"said-{rank}").read_text() for rank in range(5)]

    assert all(line.startswith("PROTOCOL") and "rank 3 has 11 bytes" in line for line in told)
