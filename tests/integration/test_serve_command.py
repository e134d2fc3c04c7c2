"""`atoll serve` as an operator starts it: what it prints, keeps, refuses and leaves behind."""

import json
import re
import socket
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from atoll.cli import serve as command
from atoll.cli.options import ServeOptions
from atoll.client.info import get_info
from atoll.coordinator.planes.access import Role
from atoll.errors import ConfigError
from atoll.launch import local
from tests import ledgers, served
from tests.commanded import RUN_FILE, commanded, options_in, port_of
from tests.served import TOKENS


@pytest.fixture
def options(tmp_path: Path) -> ServeOptions:
    return options_in(tmp_path)


JOIN = re.compile(
    r"ATOLL_TOKEN=(?P<token>\S+) atoll join https://(?P<host>\S+):(?P<port>\d+)"
    r" --fingerprint (?P<fingerprint>sha256:[0-9a-f]{64})"
)


def test_printed_join_command_opens_the_coordinator(
    options: ServeOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    with commanded(options):
        printed = JOIN.search(capsys.readouterr().out)
        assert printed is not None
        info = get_info(
            f"https://127.0.0.1:{printed['port']}",
            token=printed["token"],
            fingerprint=printed["fingerprint"],
        )

    assert info.name == "served"
    assert printed["host"] == socket.gethostname()
    assert printed[0].endswith(printed["fingerprint"])  # and nothing of plain text


def test_restarted_coordinator_has_the_same_fingerprint_and_tokens(
    options: ServeOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    with commanded(options):
        first = JOIN.search(capsys.readouterr().out)
    with commanded(options):
        again = capsys.readouterr().out
        assert first is not None
        info = get_info(
            f"https://127.0.0.1:{port_of(options)}",
            token=first["token"],
            fingerprint=first["fingerprint"],
        )

    assert info.name == "served"
    assert first["fingerprint"] in again
    assert first["token"] not in again


def test_restart_that_makes_no_tokens_leaves_the_recorded_ones_alone(options: ServeOptions) -> None:
    with commanded(options):
        pass
    with ledgers.listening() as asked, commanded(options):
        pass

    about_tokens = [text for text in asked if "credentials" in text]
    assert about_tokens
    assert all(text.startswith("SELECT") for text in about_tokens)


def test_tokens_are_nowhere_in_the_state_directory(
    options: ServeOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    with commanded(options):
        out = capsys.readouterr().out
    join, admin = JOIN.search(out), re.search(r"shown once: (\S+)", out)
    assert join is not None
    assert admin is not None
    assert options.directory is not None
    files = [path for path in options.directory.rglob("*") if path.is_file()]

    found = [
        path.name
        for path in files
        if join["token"].encode() in path.read_bytes() or admin[1].encode() in path.read_bytes()
    ]

    assert len(files) >= 4
    assert found == []


def test_loopback_asks_for_a_token_too(
    options: ServeOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    loopback = replace(options, host="127.0.0.1")

    with commanded(loopback):
        token = re.search(r"ATOLL_TOKEN=(\S+)", capsys.readouterr().out)
        assert token is not None
        url = f"http://127.0.0.1:{port_of(options)}/info"
        without = httpx.get(url, trust_env=False, verify=False).status_code
        known = {"authorization": f"Bearer {token[1]}"}
        with_token = httpx.get(url, headers=known, trust_env=False, verify=False).status_code

    assert (without, with_token) == (401, 200)


def test_insecure_serves_plain_text_and_says_what_that_means(
    options: ServeOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    with commanded(replace(options, insecure=True)):
        printed = capsys.readouterr().out
        reply = httpx.get(
            f"http://127.0.0.1:{port_of(options)}/health", trust_env=False, verify=False
        )

    assert reply.status_code == 200
    assert "anybody on the way can read the token" in printed
    assert re.search(r"atoll join http://\S+ --insecure\n", printed)


def test_tokens_from_the_environment_are_used_and_not_printed(
    options: ServeOptions, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_WORKER_TOKEN", TOKENS[Role.WORKER])
    monkeypatch.setenv("ATOLL_ADMIN_TOKEN", TOKENS[Role.ADMIN])

    with commanded(replace(options, host="127.0.0.1")):
        printed = capsys.readouterr().out
        info = get_info(f"http://127.0.0.1:{port_of(options)}", token=TOKENS[Role.WORKER])

    assert info.name == "served"
    assert not any(token in printed for token in TOKENS.values())


@pytest.mark.parametrize(
    ("worker", "admin", "rule"),
    [
        ("short", "b" * 20, "use 16 or more"),
        ("two words that are long", "b" * 20, "printable ASCII"),
        ("ümlaut-ümlaut-ümlaut", "b" * 20, "printable ASCII"),
        ("a" * 20, "a" * 20, "every worker would be an admin"),
    ],
)
def test_tokens_that_cannot_serve_are_refused(
    options: ServeOptions, monkeypatch: pytest.MonkeyPatch, worker: str, admin: str, rule: str
) -> None:
    monkeypatch.setenv("ATOLL_WORKER_TOKEN", worker)
    monkeypatch.setenv("ATOLL_ADMIN_TOKEN", admin)

    with pytest.raises(ConfigError, match=rule):
        command.serve(options, signals=())


def test_port_that_is_taken_is_refused_by_its_number(options: ServeOptions) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            command.serve(replace(options, host="127.0.0.1", port=port), signals=())


def test_transfer_port_that_is_taken_is_refused_by_its_number(options: ServeOptions) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        asked = replace(options, host="127.0.0.1", transfer_port=port)

        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port} for transfers"):
            command.serve(asked, signals=())


# A process of its own


@dataclass(frozen=True)
class Ended:
    """A coordinator process that was scanned, joined and told to stop."""

    exit_code: int
    name: str
    log_before: str
    log_after: str
    directory: Path


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    directory = tmp_path_factory.mktemp("process")
    run_file = directory / "run.toml"
    run_file.write_text(RUN_FILE)
    tokens = local.Tokens(worker=TOKENS[Role.WORKER], admin=TOKENS[Role.ADMIN])
    process = local.start_coordinator(
        run_file, directory / "state", tokens=tokens, options=["--host", "0.0.0.0"]
    )
    try:
        process.wait_ready()
        ready = json.loads(process.ready_path.read_text())
        port = int(ready["url"].rpartition(":")[2])
        before = process.log_tail(1 << 20)
        for data in served.SCANS * 5:
            served.knock(port, data)
            served.knock(ready["transfer_port"], data)
        name = get_info(
            f"https://127.0.0.1:{port}", token=tokens.worker, fingerprint=ready["fingerprint"]
        ).name
        after = process.log_tail(1 << 20)
        process.terminate()
        exit_code = process.wait(timeout_seconds=10.0)
    finally:
        process.kill()
    return Ended(exit_code, name, before, after, directory / "state")


def test_scanned_process_serves_on_and_ends_well(ended: Ended) -> None:
    assert (ended.name, ended.exit_code) == ("served", 0)


def test_scanned_process_writes_no_line_about_it(ended: Ended) -> None:
    assert ended.log_after == ended.log_before


def test_process_with_given_tokens_leaves_them_nowhere_in_its_directory(ended: Ended) -> None:
    files = [path for path in ended.directory.rglob("*") if path.is_file()]

    found = [
        path.name
        for path in files
        if any(token.encode() in path.read_bytes() for token in TOKENS.values())
    ]

    assert "coordinator.log" in {path.name for path in files}
    assert found == []
