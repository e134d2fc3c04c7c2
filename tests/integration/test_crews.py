"""Crews of gloo processes: many jobs from one start, and ranks that raise, die or are late."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from atoll.errors import ConfigError, RanksFailed
from atoll.pools.gradcheck.crew import Crew, Crews
from tests.ranks import crew_jobs

JOBS = crew_jobs.__name__


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(3) as made:
        yield made


def done(crew: Crew, folder: Path, *, more: int = 0) -> list[dict[str, Any]]:
    """What each rank says after a job that sums."""
    folder.mkdir()
    crew.run(f"{JOBS}:add", {"more": more}, folder)
    about = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(crew.size)]
    sums = [load_file(folder / f"{rank}.safetensors") for rank in range(crew.size)]
    return [
        {**told, "ours": one["ours"].tolist(), "theirs": one["theirs"].tolist()}
        for told, one in zip(about, sums, strict=True)
    ]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_jobs_share_the_processes_of_one_start(crew, tmp_path):
    first, second = done(crew, tmp_path / "a"), done(crew, tmp_path / "b", more=10)

    assert [one["ours"] for one in first] == [[3]] * 3
    assert [one["ours"] for one in second] == [[33]] * 3
    assert [one["theirs"] for one in second] == [[3]] * 3
    assert [one["pid"] for one in first] == [one["pid"] for one in second] == crew.pids
    assert {one["threads"] for one in first} == {1}
    assert first[0]["job"] < second[0]["job"]


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_what_ranks_print_goes_to_a_log_of_their_own(crew, tmp_path, stream):
    """Not to the parent's streams, where a tool reads JSON."""
    crew.run(f"{JOBS}:prints", {}, tmp_path)

    logs = [Path((tmp_path / f"{stream}-{rank}").read_text()) for rank in range(3)]
    assert [log.name for log in logs] == ["rank-0.log", "rank-1.log", "rank-2.log"]
    assert logs[0].read_text().splitlines()[-1] == "said by a rank"


def test_job_that_destroys_the_group_is_refused_before_the_next_one_meets_it(crew, tmp_path):
    with pytest.raises(RanksFailed, match="leave it as it was given"):
        crew.run(f"{JOBS}:leaves", {}, tmp_path)

    assert [one["theirs"] for one in done(crew, tmp_path / "a")] == [[3]] * 3


def test_rank_that_raises_is_named_with_its_text_and_the_next_job_starts_anew(crew, tmp_path):
    done(crew, tmp_path / "a")
    before = crew.pids

    with pytest.raises(RanksFailed) as raised:
        crew.run(f"{JOBS}:one_raises", {"rank": 2}, tmp_path)

    assert str(raised.value) == ("'one_raises' on 3 ranks: rank 2: coeff=-1 must be positive")
    assert not any(is_running(pid) for pid in before)
    assert [one["ours"] for one in done(crew, tmp_path / "b")] == [[3]] * 3
    assert set(crew.pids).isdisjoint(before)


def test_error_that_all_ranks_raise_is_told_once(crew, tmp_path):
    with pytest.raises(RanksFailed, match=r"ranks 0, 1, 2: KeyError: 'tokens' \(crew_jobs.py:\d+"):
        crew.run(f"{JOBS}:all_raise", {}, tmp_path)


def test_rank_that_dies_is_named_and_not_those_that_waited_for_it(crew, tmp_path):
    with pytest.raises(RanksFailed) as raised:
        crew.run(f"{JOBS}:one_dies", {"rank": 1}, tmp_path)

    assert str(raised.value) == "'one_dies' on 3 ranks: rank 1: died with exit code -9"
    assert crew.pids == []


def test_rank_that_is_late_is_named_and_ended(tmp_path):
    with Crew(2, job_seconds=0.5) as crew:
        with pytest.raises(RanksFailed, match=r"on 2 ranks: rank 1: was not done within 0.5 s"):
            crew.run(f"{JOBS}:one_is_late", {"rank": 1}, tmp_path)

        assert crew.pids == []


def test_entry_that_is_not_there_is_named(crew, tmp_path):
    with pytest.raises(RanksFailed, match=r"ranks 0, 1, 2: AttributeError"):
        crew.run(f"{JOBS}:absent", {}, tmp_path)


@pytest.mark.parametrize("size", [0, 65])
def test_crew_of_no_or_too_many_ranks_is_refused(size):
    with pytest.raises(ConfigError, match=f"{size} ranks are asked for"):
        Crew(size)


def test_job_with_too_much_in_it_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="pass tensors as files"), Crew(1) as crew:
        crew.run(f"{JOBS}:add", {"more": "x" * (1 << 20)}, tmp_path)


def test_crews_are_kept_by_size_and_end_together(tmp_path):
    with Crews() as crews:
        assert crews.of(1) is crews.of(1)
        done(crews.of(1), tmp_path / "a")
        (pid,) = crews.of(1).pids

        assert is_running(pid)

    assert not is_running(pid)
