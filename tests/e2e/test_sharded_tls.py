"""Ranks as processes with certificates of their own, int8 gradients straight over TCP sockets."""

import datetime
from contextlib import ExitStack
from pathlib import Path

from atoll.launch import local, state
from atoll.proof import audit as auditing
from atoll.simulate import lineage
from atoll.versions import recorded
from atoll.wire import certificate
from tests.processes import LIMIT_SECONDS, TOKENS
from tests.sharded_run_files import run_file

ROUNDS, ROUND_STEPS, RANKS = 2, 4, 2
RUN_FILE = run_file(
    "sharded-tls",
    f"""
[sharded]
bulk = "tcp"
exchange = "direct"
gradients = "int8"
save_every = 2
checkpoint_every = {ROUND_STEPS // 2}
deadline_seconds = 20
[membership]
min_workers = {RANKS}
[stop]
rounds = {ROUNDS}
""",
    inner="threads = 1",
)


def test_ranks_train_over_sockets_with_tls_and_end_cleanly(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(RUN_FILE)
    own = certificate.own(tmp_path, host="127.0.0.1", now=datetime.datetime.now(datetime.UTC))
    with ExitStack() as held:
        coordinator = local.start_coordinator(
            file,
            tmp_path / "state",
            tokens=TOKENS,
            options=["--cert", str(own.certificate_path), "--key", str(own.key_path)],
        )
        held.callback(coordinator.kill)
        coordinator.wait_ready(timeout_seconds=LIMIT_SECONDS)
        assert coordinator.fingerprint is not None
        islands = []
        for name in ("a", "b"):
            island = local.start_island(
                coordinator.url,
                tmp_path / name,
                worker_id=name,
                tokens=TOKENS,
                options=["--fingerprint", coordinator.fingerprint],
            )
            held.callback(island.kill)
            islands.append(island)
        for process in (*islands, coordinator):
            assert process.wait(timeout_seconds=LIMIT_SECONDS) == 0, process.log_tail()
        results = [island.result() for island in islands]
    with state.at_rest(tmp_path / "state") as (ledger, blobs):
        manifest = recorded.manifest_of(ledger)
        assert manifest is not None
        layout = recorded.layout_of(manifest)
        report = auditing.audit(ledger, blobs, layout=layout, with_replay=False)
        again = lineage.retrained(ledger)
        with ledger.reading() as t:
            groups = t.groups.all()

    assert coordinator.url.startswith("https://")
    assert [result["step"] for result in results] == [ROUNDS * ROUND_STEPS] * RANKS
    assert report.clean, report.problems
    assert report.digest == again  # the same in one process, without any socket
    # One group did it all, each member with a certificate of its own.
    [group] = groups
    shown = {member.certificate for member in group.members}
    assert len(shown) == RANKS
    assert all(text.startswith("-----BEGIN CERTIFICATE-----") for text in shown)
