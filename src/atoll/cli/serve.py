"""`atoll serve`: open or create the run, pick the address and its security, serve to the end."""

import datetime
import ipaddress
import json
import os
import re
import secrets
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from atoll import config, torch_threads
from atoll.cli import output, repair, reset, stopping
from atoll.cli.options import ServeOptions
from atoll.cli.reset import Fresh
from atoll.cli.s3 import s3_access
from atoll.clock import SystemClock
from atoll.config import RunFile
from atoll.coordinator import boot
from atoll.coordinator.planes import access
from atoll.coordinator.planes.access import Access, Role
from atoll.coordinator.planes.server import STOP_SIGNALS, Address, Listen, Server
from atoll.errors import ConfigError
from atoll.launch import memory, state
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import ManifestRecord
from atoll.wire import certificate
from atoll.wire.certificate import Certificate

MIN_TOKEN_CHARACTERS = 16
MAX_PORT = 65535
MIN_LEASE_SECONDS, MAX_LEASE_SECONDS = 1.0, 3600.0
_SENDABLE = re.compile(r"[!-~]+\Z")  # what a header can carry
TOKEN_VARIABLES = {Role.WORKER: "ATOLL_WORKER_TOKEN", Role.ADMIN: "ATOLL_ADMIN_TOKEN"}


def serve(
    options: ServeOptions,
    *,
    signals: Sequence[signal.Signals] = STOP_SIGNALS,
    started: Callable[[Server], None] = lambda _: None,
) -> None:
    """Serves until the run is over or a signal comes; `started` gets the server once it answers."""
    _check_ready_file(options.ready_file)
    _check_lease(options.ledger_lease)
    _check_port("--port", options.port)
    _check_port("--transfer-port", options.transfer_port)
    run_file = config.load(options.run_file)
    directory = options.directory or Path(".atoll") / str(run_file.settings["name"])
    fresh = _reset(options, run_file, directory)
    try:
        _serve(options, fresh, directory, signals=signals, started=started)
    except repair.DAMAGED as error:
        raise repair.explained(directory, error) from error


def _reset(options: ServeOptions, run_file: RunFile, directory: Path) -> Fresh:
    if not options.reset:
        for name in ("keep_weights", "purge", "yes"):
            if getattr(options, name):
                raise ConfigError(
                    f"--{name.replace('_', '-')} is for --reset; give both or neither"
                )
        return Fresh(run_file)
    return reset.reset(
        directory,
        run_file,
        keep_weights=options.keep_weights,
        purge=options.purge,
        yes=options.yes,
    )


def _serve(
    options: ServeOptions,
    fresh: Fresh,
    directory: Path,
    *,
    signals: Sequence[signal.Signals],
    started: Callable[[Server], None],
) -> None:
    clock, run_file = SystemClock(), fresh.run_file
    addresses = state.Addresses(run_file.ledger, run_file.blobs)
    memory.bound_arenas()
    memory.keep_freed_tiles()
    torch_threads.use(1)
    with state.held(
        directory,
        addresses,
        s3=s3_access(),
        lease_seconds=options.ledger_lease,
        adopt_blobs=options.adopt_blobs,
    ) as stores:
        before = len(_manifests(stores.ledger))
        manifest = boot.create_or_check(
            stores,
            run_file,
            clock,
            new_run_id=secrets.token_hex(8),
            new_manifest=options.new_manifest,
        )
        if fresh.dropped is not None:
            fresh.settle(stores.ledger, purge=options.purge)
        if options.new_manifest:
            _tell_manifest(stores.ledger, recorded_before=before)
        tokens, hashes = _tokens(stores.ledger, renew=options.new_tokens)
        secured = certificate_for(options, directory)
        coordinator = boot.open_coordinator(stores, clock, threads=min(4, os.cpu_count() or 1))
        server = Server(
            coordinator,
            Access({**_credentials(stores.ledger), **hashes}),
            clock,
            listen=Listen(
                host=options.host,
                port=options.port,
                transfer_port=options.transfer_port,
                certificate=secured,
                stay=options.stay,
            ),
        )

        def ready(address: Address) -> None:
            # Not before: a start that ends without showing new tokens must not make them valid.
            with stores.ledger.writing() as t:
                t.credentials.set(hashes)
            _announce(
                options,
                address,
                secured,
                tokens,
                title=f"run {manifest.name!r} ({coordinator.run_id}), "
                f"version {coordinator.weights.current.version}, state in {str(directory)!r}",
            )
            started(server)

        stopping.EARLY.check()  # something on the way may have swallowed what was raised
        server.run(ready, signals=signals)
        current = coordinator.weights.current
        output.say(
            f"coordinator stopped at version {current.version}, "
            f"params digest {current.digests.master.root}"
        )


def _manifests(ledger: Ledger) -> list[ManifestRecord]:
    with ledger.reading() as t:
        return t.manifests.all()


def _credentials(ledger: Ledger) -> dict[str, str]:
    with ledger.reading() as t:
        return t.credentials.all()


def _tell_manifest(ledger: Ledger, *, recorded_before: int) -> None:
    versions = _manifests(ledger)
    newest = versions[-1]
    if len(versions) == recorded_before:
        output.say(f"the run file has not changed; manifest version {newest.version} stays")
    else:
        output.say(
            f"manifest version {newest.version} is in force from round {newest.from_round} on"
        )


def _check_lease(seconds: float) -> None:
    if not MIN_LEASE_SECONDS <= seconds <= MAX_LEASE_SECONDS:
        raise ConfigError(
            f"--ledger-lease {seconds:g} is not between {MIN_LEASE_SECONDS:g} and "
            f"{MAX_LEASE_SECONDS:g} seconds; it is how long a silent coordinator keeps its ledger"
        )


def _check_port(option: str, port: int) -> None:
    if not 0 <= port <= MAX_PORT:
        raise ConfigError(f"{option} {port} is not between 0 and {MAX_PORT}; 0 takes a free one")


def _check_ready_file(path: Path | None) -> None:
    if path is None:
        return
    if not path.parent.is_dir():
        raise ConfigError(
            f"--ready-file {str(path)!r} lies in {str(path.parent)!r}, which is not a directory; "
            f"make it first"
        )
    if path.is_dir():
        raise ConfigError(f"--ready-file {str(path)!r} is a directory; name a file in it")


def _tokens(ledger: Ledger, *, renew: bool) -> tuple[dict[Role, str], dict[str, str]]:
    """The tokens that can be shown, and the hashes of them that are to be stored.

    That is, those from the environment and newly made ones. Of tokens that were made at an earlier
    start only the hashes are known.
    """
    stored = _credentials(ledger)
    shown: dict[Role, str] = {}
    for role, variable in TOKEN_VARIABLES.items():
        given = os.environ.get(variable)
        if given is not None:
            _check_token(variable, given)
            shown[role] = given
        elif renew or role.value not in stored:
            shown[role] = secrets.token_urlsafe(32)
    hashes = {role.value: access.token_hash(token) for role, token in shown.items()}
    known = {**stored, **hashes}
    if len(set(known.values())) < len(known):
        raise ConfigError(
            f"{' and '.join(TOKEN_VARIABLES.values())} are the same; "
            f"every worker would be an admin, so choose two"
        )
    return shown, hashes


def _check_token(variable: str, token: str) -> None:
    if len(token) < MIN_TOKEN_CHARACTERS:
        raise ConfigError(
            f"{variable} has {len(token)} characters; use {MIN_TOKEN_CHARACTERS} or more"
        )
    if not _SENDABLE.match(token):
        raise ConfigError(
            f"{variable} holds a space, a line end or a letter outside ASCII; "
            f"a token travels in a header, so use printable ASCII"
        )


def certificate_for(options: ServeOptions, directory: Path) -> Certificate | None:
    """The given certificate, or one of our own; None for plain text: on loopback or --insecure."""
    if (options.cert is None) != (options.key is None):
        raise ConfigError("--cert and --key go together; give both files or neither")
    if options.cert is not None and options.key is not None:
        return certificate.given(options.cert, options.key)
    if is_loopback(options.host) or options.insecure:
        return None
    return certificate.own(directory, host=options.host, now=datetime.datetime.now(datetime.UTC))


def is_loopback(host: str) -> bool:
    """Whether traffic to `host` never leaves this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _url(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _reachable(host: str) -> str:
    """A host that other machines can dial: 0.0.0.0 and :: are none, so the host name instead."""
    try:
        unspecified = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host
    return socket.gethostname() if unspecified else host


def _announce(
    options: ServeOptions,
    address: Address,
    secured: Certificate | None,
    tokens: dict[Role, str],
    *,
    title: str,
) -> None:
    scheme = "http" if secured is None else "https"
    url = _url(scheme, address.host, address.port)
    reached = _url(scheme, _reachable(address.host), address.port)
    pin = "" if secured is None else f" --fingerprint {secured.fingerprint}"
    output.say(title)
    output.say(f"serving at {url}; transfers on port {address.transfer_port}")
    if TOKEN_VARIABLES[Role.WORKER] in os.environ:
        # Whoever set it knows it, and what is printed often ends in a log file.
        output.say(
            f"join with:\n  atoll join {reached} --token ${TOKEN_VARIABLES[Role.WORKER]}{pin}"
        )
    elif Role.WORKER in tokens:
        output.say(f"join with:\n  atoll join {reached} --token {tokens[Role.WORKER]}{pin}")
    else:
        output.say(
            f"join with the token printed at the first start (or --new-tokens):\n"
            f"  atoll join {reached} --token …{pin}"
        )
    if Role.ADMIN in tokens and TOKEN_VARIABLES[Role.ADMIN] not in os.environ:
        output.say(f"admin token, shown once: {tokens[Role.ADMIN]}")
    if options.insecure and secured is None and not is_loopback(options.host):
        output.say("warning: plain text on a public address; anybody on the way can read the token")
    if options.ready_file is not None:
        ready = {
            "url": url,
            "transfer_port": address.transfer_port,
            "pid": os.getpid(),
            "fingerprint": None if secured is None else secured.fingerprint,
        }
        part = options.ready_file.with_name(options.ready_file.name + ".part")
        part.write_text(json.dumps(ready))
        os.replace(part, options.ready_file)
