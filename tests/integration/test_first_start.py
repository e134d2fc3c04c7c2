"""The first start of a coordinator that does not come to serve."""

import socket
from pathlib import Path

import pytest

from atoll.cli.options import ServeOptions
from atoll.cli.serve import serve
from atoll.coordinator.planes.server import Server
from atoll.errors import ConfigError
from tests.integration.test_reset import RUN_FILE, TOKENS, credentials


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in TOKENS:
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE)
    return path


def test_tokens_that_nobody_saw_are_not_valid(run_file, tmp_path, capsys):
    """Else the run would have a first start that never showed them."""
    directory = tmp_path / "state"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            serve(ServeOptions(run_file=run_file, directory=directory, port=port), signals=())

    assert credentials(directory) == {}

    capsys.readouterr()
    serve(
        ServeOptions(run_file=run_file, directory=directory, port=0),
        signals=(),
        started=Server.stop,
    )

    shown = capsys.readouterr().out
    assert "ATOLL_TOKEN=…" not in shown
    assert "admin token, shown once" in shown
    assert set(credentials(directory)) == {"worker", "admin"}
