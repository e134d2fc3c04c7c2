"""The `atoll` command: the only place that prints, reads the environment and picks parts."""

import os
import sys

from atoll.cli import stopping

_AWAY = (
    "see that `atoll serve` runs there, under http or https as in the join command it printed, "
    "and that this machine reaches its port"
)


def main() -> None:
    """Runs the command line; a refused input is one sentence on stderr and exit code 2.

    A disk that fails is exit code 74 (EX_IOERR).
    """
    # Before anything that takes long to load.
    if sys.argv[1:2] == ["serve"]:
        stopping.EARLY.listen()
    try:
        _run()
    except (stopping.Stopped, Exception):
        # Any exception: a library that was just being loaded may have turned Stopped into its own.
        if stopping.EARLY.told is None:
            raise
        sys.stdout.write(f"coordinator {stopping.EARLY.told}\n")
        sys.exit(0)
    finally:
        stopping.EARLY.end()


def _run() -> None:
    # gRPC reads this when it is first imported; else every failed handshake of a port scan is a
    # line on stderr.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from atoll.cli.app import app
    from atoll.cli.output import complain
    from atoll.errors import AtollError, CoordinatorUnreachable, DiskFailed

    try:
        app()
    except DiskFailed as error:
        complain(error)
        # At once: what an interpreter does at its end would sync files again.
        os._exit(os.EX_IOERR)
    except AtollError as error:
        away = isinstance(error, CoordinatorUnreachable)
        complain(CoordinatorUnreachable(f"{error}; {_AWAY}") if away else error)
        sys.exit(2)
