"""A whole run over two datasets and a stream: trained, audited, the same bits again."""

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from atoll.blobs.directory import DirectoryBlobs
from atoll.cli.app import app
from atoll.coordinator.shown import queues
from atoll.data import parts
from atoll.ledger import engines
from atoll.proof import audit
from atoll.protocol.manifest import WorkSettings
from atoll.simulate import cluster as simulation
from atoll.simulate.cluster import Outage
from atoll.versions import recorded
from tests import clusters
from tests.ledgers import alone
from tests.tiny import MODEL

SHAPE = {"kind": "synthetic", "held_out_rows": 2, "block": 8, "vocab": 16}
TABLE: dict[str, Any] = {
    "seed": 3,
    "model": MODEL,
    "data": [
        {"name": "words", "weight": 3, "seed": 1, "rows": 10, **SHAPE},
        {"name": "code", "weight": 1, "seed": 2, "rows": 500, **SHAPE},
        {"name": "flood", "weight": 2, "seed": 3, "rows": 0, **SHAPE},
    ],
    "inner.batch": 4,
    "evaluate.every": 1,
    "stop.rounds": 3,
    "work.stream_unit_rows": 4,
}


def test_run_over_several_datasets_trains_each_row_once(tmp_path: Path):
    """8 rows for each of two islands in each of three rounds; once with an absent coordinator."""
    file = clusters.run_file(TABLE)

    plain = simulation.simulate(file, islands=2, directory=tmp_path / "plain")
    again = simulation.simulate(
        file, islands=2, directory=tmp_path / "away", outage=Outage(version=1, seconds=3.0)
    )

    assert plain.digest == again.digest
    ledger = engines.open_ledger(tmp_path / "away" / "ledger.sqlite")
    blobs = DirectoryBlobs(tmp_path / "away" / "blobs")
    manifest = recorded.manifest_of(ledger)
    assert manifest is not None
    report = audit.audit(ledger, blobs, layout=recorded.layout_of(manifest), with_replay=True)
    found = queues.work(
        ledger, parts.parts_of(manifest.data.identity), WorkSettings(), expired_leases=0
    )
    ledger.close()
    blobs.close()
    assert report.problems == []
    assert sum(epoch.done_once for epoch in report.balance) == 48
    assert {d.name: d.rows_issued for d in found.datasets} == {"words": 24, "code": 8, "flood": 16}


def audited(directory: Path, *options: str) -> tuple[int, str]:
    """Exit code and output of `atoll audit`."""
    result = CliRunner().invoke(app, ["audit", str(directory), *options])
    return result.exit_code, result.output


def test_audit_command_shows_the_row_balance_and_fails_when_it_does_not_hold(tmp_path: Path):
    file = clusters.run_file({**TABLE, "stop.rounds": 1, "evaluate.every": 0})
    simulation.simulate(file, islands=2, directory=tmp_path)
    code, shown = audited(tmp_path)
    as_json, report = audited(tmp_path, "--json")
    ledger = engines.open_ledger(tmp_path / "ledger.sqlite")
    [lease] = [
        x for x in alone(ledger).leases.of_round(1) if (x.worker_id, x.start) == ("island-0", 0)
    ][:1]
    clusters.remove(ledger, "leases", round=1, worker_id="island-0", dataset_id=lease.dataset_id)
    ledger.close()

    broken, problems = audited(tmp_path)

    assert (code, as_json, broken) == (0, 0, 1)
    assert "epoch 0: 10 rows, 8 done once, 0 twice, 2 missing (0 leased, 0 reopened, 2" in shown
    assert [e["done_twice"] for e in json.loads(report)["balance"]] == [0, 0, 0]
    assert f"row balance of {lease.dataset_id} epoch 0" in problems
