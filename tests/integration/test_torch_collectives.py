"""Collectives on gloo, between five real processes that are started once: the bits of `local`."""

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch import Tensor

from atoll.collectives import schedule
from tests.rank_groups import sums, threads
from tests.ranks import collects, divides
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


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_subgroups_and_sends_have_the_sums_of_plain_additions(home, size):
    for rank in range(size):
        for name, wanted in (("divided", divides.wanted), ("sent", divides.came)):
            found, right = load_file(home / f"{name}-{size}-{rank}"), wanted(size, rank)
            assert found.keys() == right.keys()
            assert [one for one in found if not torch.equal(found[one], right[one])] == []


def test_deadline_of_a_subgroup_names_its_own_others(home):
    first = {rank: parts(home, rank)[0] for rank in (1, 3)}

    assert first[3].startswith("MISSING_RANKS [1, 2] ")
    assert first[1].startswith("MISSING_RANKS [0, 1] ")


def parts(home: Path, rank: int) -> list[str]:
    return (home / f"parts-{rank}").read_text().splitlines()


def test_send_in_a_subgroup_is_not_taken_by_another_one_of_the_same_ranks(home):
    """Who sends is told, too: nobody takes it."""
    assert parts(home, 0)[0].startswith("MISSING_RANKS [0] ")
    assert parts(home, 1)[1].startswith("MISSING_RANKS [0] ")
    assert parts(home, 1)[2] == "[7.0]"


def test_rank_that_sends_nothing_is_named_alone(home):
    assert parts(home, 3)[1].startswith("MISSING_RANKS [0] ")
    assert parts(home, 3)[2] == "[7.0]"


def test_send_of_another_length_is_refused_and_its_sender_finds_out_in_time(home):
    _, refused, left, _ = parts(home, 2)

    assert refused.startswith("LAYOUT_MISMATCH")
    assert "rank 0 sends 41 elements of float32, and this rank receives 40" in refused
    assert left == "[7.0]"
    assert parts(home, 4)[1].startswith("MISSING_RANKS [1] ")


def test_subgroup_ends_with_its_group(home):
    assert all(parts(home, rank)[-1].startswith("GROUP_BROKEN") for rank in range(5))
