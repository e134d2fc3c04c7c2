"""`atoll repair` and `--reset` of a run whose ledger or blobs are outside its state directory.

A ledger elsewhere is looked at and never changed; blobs elsewhere are moved aside only when they
belong to this ledger.
"""

import json
import uuid
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atoll.blobs import owner
from atoll.blobs.access import S3Access
from atoll.cli import main
from atoll.cli.app import app
from atoll.cli.repair import explained
from atoll.coordinator.rounds.spool import Spool
from atoll.errors import BlobMissing, ConfigError, StateDamaged
from atoll.launch import repair, reset, state
from atoll.launch.state import Addresses
from atoll.ledger import engines
from atoll.ledger.ledger import Ledger
from atoll.ledger.sqlite import lock
from atoll.proof import soundness
from tests import damages, lives, servers
from tests.clusters import Cluster
from tests.ledgers import alone

ROUNDS = 4  # the snapshot is of the third, so the last is replayed


class Elsewhere(Cluster):
    """A run whose stores are where `addresses` says."""

    def __init__(self, home: Path, addresses: Addresses, s3: S3Access | None = None) -> None:
        self.addresses, self.s3 = addresses, s3
        super().__init__(home, damages.SETTINGS)

    def _open_stores(self) -> None:
        state.keep_addresses(self.home, self.addresses)
        self.ledger = engines.open_ledger(self.addresses.ledger or self.home / "ledger.sqlite")
        self.blobs = state.open_blobs(self.home, self.addresses, s3=self.s3)
        self.spool = Spool(self.home / "spool")


def claim(ledger: Ledger, home: Path, addresses: Addresses, s3: S3Access | None) -> None:
    """As a coordinator does when it starts."""
    ownership = state.ownership(home, addresses, ledger=ledger.identity(), s3=s3)
    if ownership is not None:
        ownership.claim()


def at_rest(home: Path, addresses: Addresses, s3: S3Access | None = None) -> str:
    """Plays a run and ends it; the name of a contribution that replay of its last round needs."""
    cluster = Elsewhere(home, addresses, s3)
    a, b = cluster.pair()
    cluster.rounds(ROUNDS, a, b)
    a.contribute()
    claim(cluster.ledger, home, addresses, s3)
    needed = alone(cluster.ledger).contributions.of_round(ROUNDS)[0].sha256
    cluster.close()
    return needed


def lose(home: Path, sha256: str, s3: S3Access | None = None) -> None:
    blobs = state.open_blobs(home, state.addresses_of(home), s3=s3)
    blobs.delete(sha256)
    blobs.close()


def stored(home: Path, s3: S3Access | None = None) -> set[str]:
    blobs = state.open_blobs(home, state.addresses_of(home), s3=s3)
    try:
        return {ref.sha256 for ref in blobs.stored()}
    finally:
        blobs.close()


def files(home: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(home)): path.read_bytes()
        for path in sorted(home.rglob("*"))
        if path.is_file() and path.name != lock.FILE_NAME
    }


def ledger_state(url: str) -> str:
    ledger = engines.open_ledger(url)
    try:
        return ledger.state_hash()
    finally:
        ledger.close()


def command(home: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["repair", str(home), *options], catch_exceptions=False)
    return result.exit_code, result.output


@pytest.fixture
def s3(s3_server: servers.RunningServer, monkeypatch: pytest.MonkeyPatch) -> S3Access:
    """Access to the test server, also for commands, which read the environment."""
    access = lives.s3_access(s3_server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", servers.ACCESS_KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", servers.SECRET_ACCESS_KEY)
    return access


@pytest.fixture
def bucket() -> Addresses:
    return Addresses(blobs=f"s3://{servers.BUCKET}/repair-{uuid.uuid4().hex}")


# The ledger is elsewhere


@pytest.mark.postgres
def test_sound_run_on_postgresql_is_told_to_be_sound(tmp_path, postgres_url):
    at_rest(tmp_path / "run", Addresses(ledger=postgres_url))

    code, shown = command(tmp_path / "run", "--yes")

    assert code == 0
    assert "nothing is damaged" in shown


@pytest.mark.postgres
def test_damaged_run_on_postgresql_is_explained_and_not_changed(
    tmp_path, postgres_url, monkeypatch, capsys
):
    home = tmp_path / "run"
    lost = at_rest(home, Addresses(ledger=postgres_url))
    lose(home, lost)
    before = files(home), ledger_state(postgres_url)

    code, shown = command(home)
    told = json.loads(command(home, "--json")[1])
    monkeypatch.setattr("sys.argv", ["atoll", "repair", str(home), "--yes"])
    with pytest.raises(SystemExit) as ended:
        main()
    refusal = " ".join(capsys.readouterr().err.split())

    assert code == 1
    assert lost in shown
    assert "last good round: 3 of 4" in shown
    assert "restore that database" in shown
    assert "--yes" not in shown
    assert told["ledger_elsewhere"] is True
    assert told["last_good"] == 3
    assert ended.value.code == 2
    assert lost in refusal
    assert "nothing has been changed" in refusal
    assert "[STATE_DAMAGED]" in refusal
    assert (files(home), ledger_state(postgres_url)) == before


@pytest.mark.postgres
def test_changed_record_on_postgresql_is_found(tmp_path, postgres_url):
    home = tmp_path / "run"
    at_rest(home, Addresses(ledger=postgres_url))
    ledger = engines.open_ledger(postgres_url)
    with ledger.writing() as t:
        t.connection.change("UPDATE rounds SET hash = 'f' WHERE round = 3")
    ledger.close()

    report = repair.look(home)

    assert "hash chain" in report.damages[0]
    assert report.last_good == 2
    with pytest.raises(StateDamaged, match="last good round is 2"):
        repair.repair(home)


@pytest.mark.postgres
def test_refused_start_on_postgresql_does_not_send_to_a_repair_that_changes(tmp_path, postgres_url):
    home = tmp_path / "run"
    lose(home, at_rest(home, Addresses(ledger=postgres_url)))

    said = str(explained(home, BlobMissing("a blob is not stored")))

    assert "the last good round is 3" in said
    assert "--yes" not in said


def test_ledger_in_another_directory_is_looked_at_where_it_is(tmp_path):
    home = tmp_path / "run"
    (tmp_path / "other").mkdir()
    lost = at_rest(home, Addresses(ledger=str(tmp_path / "other" / "ledger.sqlite")))

    assert command(home)[0] == 0

    lose(home, lost)
    before = files(tmp_path)
    assert repair.look(home).last_good == 3
    with pytest.raises(StateDamaged, match="nothing has been changed"):
        repair.repair(home)
    assert files(tmp_path) == before


# The blobs are elsewhere


@pytest.mark.s3
def test_blobs_in_a_bucket_are_moved_aside_and_none_is_lost(tmp_path, s3, bucket):
    home = tmp_path / "run"
    lost = at_rest(home, bucket, s3)
    lose(home, lost, s3)
    before = stored(home, s3)

    code, shown = command(home)
    assert (code, stored(home, s3)) == (1, before)
    assert "last good round: 3 of 4" in shown

    code, shown = command(home, "--yes")
    aside = {path.name for path in (home / "damaged-1" / "blobs").iterdir()}

    assert code == 0
    assert "audit with replay: clean" in shown
    assert len(aside) == 2  # the other contribution to round 4, and that to the open round
    assert stored(home, s3) == before - aside
    with state.held(home, bucket, s3=s3) as stores:
        soundness.check_start(stores.ledger, stores.blobs)


@pytest.mark.s3
def test_blobs_of_another_ledger_are_not_moved_by_the_repair_of_a_copy(tmp_path, s3, bucket):
    """What the original did after the copy was made looks like lost records to the copy."""
    home, copy = tmp_path / "run", tmp_path / "copy"
    original = Elsewhere(home, bucket, s3)
    claim(original.ledger, home, bucket, s3)
    a, b = original.pair()
    original.rounds(1, a, b)
    copy.mkdir()
    state.keep_addresses(copy, bucket)
    original.ledger.copy_to(str(copy / "ledger.sqlite"))
    original.rounds(2, a, b)
    original.close()
    before = stored(home, s3)
    assert not repair.look(copy, s3=s3).sound

    with pytest.raises(ConfigError, match="belongs to the ledger"):
        repair.repair(copy, s3=s3)

    assert stored(home, s3) == before
    assert not list(copy.glob("damaged-*"))
    marker = owner.marker(str(bucket.blobs), s3=s3).read()
    assert str(home) in json.loads(marker or b"{}")["ledger"]


# Starting over


@pytest.mark.parametrize("place", ["postgresql://user@host/atoll", None], ids=["named", "dropped"])
def test_reset_leaves_a_run_alone_whose_ledger_is_elsewhere(tmp_path, place):
    """Also where the run file no longer names it."""
    state.keep_addresses(tmp_path, Addresses(ledger="postgresql://user@host/atoll"))
    before = files(tmp_path)

    with pytest.raises(ConfigError, match="elsewhere"):
        reset.look(tmp_path, Addresses(ledger=place))

    assert files(tmp_path) == before


def test_reset_where_the_process_stands_is_refused(tmp_path, monkeypatch):
    Cluster(tmp_path).close()
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ConfigError, match="whole path"):
        reset.look(Path(), Addresses())
