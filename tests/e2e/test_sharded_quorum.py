"""Ranks as processes that commit by quorum: with nobody late, the weights are those of strict."""

from contextlib import ExitStack
from pathlib import Path

from atoll import config, torch_threads
from atoll.launch import local, state
from atoll.proof import audit as auditing
from atoll.simulate import cluster
from atoll.versions import recorded
from tests.processes import LIMIT_SECONDS, TOKENS
from tests.sharded_run_files import run_file

ROUNDS, ROUND_STEPS, RANKS = 2, 4, 2
RUN_FILE = run_file(
    "sharded-quorum",
    f"""
[sharded]
commit = "quorum"
exchange = "direct"
micro_batches = 2
save_every = 2
checkpoint_every = {ROUND_STEPS // 2}
deadline_seconds = 60
[membership]
min_workers = {RANKS}
[evaluate]
every = 1
[stop]
rounds = {ROUNDS}
""",
    inner="threads = 1",
)


def test_ranks_that_commit_by_quorum_end_where_strict_ones_do(tmp_path: Path) -> None:
    file, strict = tmp_path / "run.toml", tmp_path / "strict.toml"
    file.write_text(RUN_FILE)
    strict.write_text(RUN_FILE.replace('commit = "quorum"', 'commit = "strict"'))
    with ExitStack() as held:
        coordinator = local.start_coordinator(file, tmp_path / "state", tokens=TOKENS)
        held.callback(coordinator.kill)
        coordinator.wait_ready(timeout_seconds=LIMIT_SECONDS)
        islands = []
        for name in ("island-0", "island-1"):
            island = local.start_island(
                coordinator.url, tmp_path / name, worker_id=name, tokens=TOKENS
            )
            held.callback(island.kill)
            islands.append(island)
        with torch_threads.kept():
            wanted = cluster.simulate(config.load(strict), islands=RANKS)
        for process in (*islands, coordinator):
            assert process.wait(timeout_seconds=LIMIT_SECONDS) == 0, process.log_tail()
        results = [island.result() for island in islands]
    with state.at_rest(tmp_path / "state") as (ledger, blobs):
        manifest = recorded.manifest_of(ledger)
        assert manifest is not None
        report = auditing.audit(ledger, blobs, layout=recorded.layout_of(manifest))
        with ledger.reading() as t:
            groups, checkpoints = t.groups.all(), t.checkpoints.all()

    assert [result["step"] for result in results] == [ROUNDS * ROUND_STEPS] * RANKS
    assert report.clean, report.problems
    assert [len(group.members) for group in groups] == [RANKS]
    assert [checkpoint.late for checkpoint in checkpoints] == [()] * ROUNDS
    assert report.digest == wanted.digest
