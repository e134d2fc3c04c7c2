"""`atoll serve` in a thread of the test, with a small run file."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll.cli import serve as command
from atoll.cli.options import ServeOptions
from atoll.coordinator.planes.server import Server
from tests import served

RUN_FILE = """
name = "served"
sync_every = 1
[model]
architecture = "gpt"
vocab = 256
block = 8
layers = 1
heads = 1
width = 8
[data]
kind = "synthetic"
seed = 1
rows = 1000
held_out_rows = 4
block = 8
[stop]
rounds = 10
"""


@contextmanager
def commanded(options: ServeOptions) -> Iterator[Server]:
    """`atoll serve` in a thread, until the block ends."""
    servers: list[Server] = []
    failures: list[BaseException] = []
    ready = threading.Event()

    def started(server: Server) -> None:
        servers.append(server)
        ready.set()

    def work() -> None:
        try:
            command.serve(options, signals=(), started=started)
        except BaseException as exc:
            failures.append(exc)
        finally:
            ready.set()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert ready.wait(served.START_SECONDS)
        if not failures:
            yield servers[0]
    finally:
        for server in servers:
            server.stop()
        thread.join(served.START_SECONDS)
    if failures:
        raise failures[0]


def options_in(home: Path) -> ServeOptions:
    """Serving on every address of this machine, with a state directory and files in `home`."""
    run_file = home / "run.toml"
    run_file.write_text(RUN_FILE)
    return ServeOptions(
        run_file=run_file,
        directory=home / "state",
        host="0.0.0.0",
        port=0,
        ready_file=home / "ready.json",
    )


def port_of(options: ServeOptions) -> int:
    assert options.ready_file is not None
    return int(json.loads(options.ready_file.read_text())["url"].rpartition(":")[2])
