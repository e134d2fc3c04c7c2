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
from contextlib import ExitStack
from pathlib import Path

from atoll import config, open_files, own_directory, torch_threads
from atoll import files as filesystem
from atoll.cli import output, repair, reset, stopping
from atoll.cli.options import ServeOptions
from atoll.cli.reset import Fresh
from atoll.cli.s3 import s3_access
from atoll.client.http import is_loopback
from atoll.clock import SystemClock
from atoll.coordinator import boot
from atoll.coordinator.planes import access
from atoll.coordinator.planes.access import Access, Role
from atoll.coordinator.planes.server import STOP_SIGNALS, Address, Listen, Server
from atoll.errors import ConfigError
from atoll.launch import memory, run_buckets, state
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import ManifestRecord
from atoll.versions import weights_file
from atoll.wire import certificate
from atoll.wire.certificate import Certificate

MIN_TOKEN_CHARACTERS = 16
HOME = Path(".atoll")  # of runs without a --dir, each below its name
_SENDABLE = re.compile(r"[!-~]+\Z")  # what a header can carry
TOKEN_VARIABLES = {Role.WORKER: "ATOLL_WORKER_TOKEN", Role.ADMIN: "ATOLL_ADMIN_TOKEN"}


def serve(
    options: ServeOptions,
    *,
    signals: Sequence[signal.Signals] = STOP_SIGNALS,
    started: Callable[[Server], None] = lambda _: None,
) -> None:
    """Serves until the run is over or a signal comes; `started` gets the server once it answers."""
    _check(options)
    run_file = config.load(options.run_file)
    directory = options.directory or HOME / str(run_file.settings["name"])
    if options.directory is None:
        own_directory.check_place(HOME)
    fresh = reset.reset(directory, run_file, options) if options.reset else Fresh(run_file)
    run_file = fresh.run_file
    clock = SystemClock()
    open_files.raise_limit()
    memory.bound_arenas()
    memory.keep_freed_tiles()
    torch_threads.use(1)
    with (
        ExitStack() as opened,
        repair.explaining(directory),
        state.held(
            directory,
            state.Addresses(run_file.ledger, run_file.blobs),
            s3=s3_access(),
            lease_seconds=options.ledger_lease,
            adopt_blobs=options.adopt_blobs,
        ) as stores,
    ):
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
            _tell_manifest(_manifests(stores.ledger), recorded_before=before)
        tokens, hashes = _tokens(stores.ledger, renew=options.new_tokens)
        secured = certificate_for(options, directory)
        buckets = opened.enter_context(
            run_buckets.opened(manifest.gather, clock=clock, s3=s3_access())
        )
        coordinator = boot.open_run(
            stores, clock, threads=min(4, os.cpu_count() or 1), buckets=buckets
        )
        listen = Listen(
            host=options.host,
            port=options.port,
            transfer_port=options.transfer_port,
            certificate=secured,
            stay=options.stay,
        )
        server = Server(coordinator, Access(hashes), clock, listen=listen)

        def ready(address: Address) -> None:
            # Not before: a start that ends without showing new tokens must not make them valid.
            with stores.ledger.writing() as t:
                t.credentials.set({role.value: hashes[role.value] for role in tokens})
            output.say(
                f"run {manifest.name!r} ({coordinator.run_id}), "
                f"version {coordinator.version}, state in {str(directory)!r}"
            )
            _announce(options, address, secured, tokens)
            started(server)

        stopping.EARLY.check()  # something on the way may have swallowed what was raised
        server.run(ready, signals=signals)
        output.say(
            f"coordinator stopped at version {coordinator.version}, "
            f"params digest {coordinator.digest}"
        )


def _check(options: ServeOptions) -> None:
    """Refuses what cannot be, before anything is opened."""
    if options.ready_file is not None:
        weights_file.check_target(options.ready_file, option="--ready-file ")
    lease = "seconds that a silent coordinator keeps its ledger"
    for name, value, least, most, meaning in (
        ("--ledger-lease", options.ledger_lease, 1, 3600, lease),
        ("--port", options.port, 0, 65535, "0 takes a free one"),
        ("--transfer-port", options.transfer_port, 0, 65535, "0 takes a free one"),
    ):
        if not least <= value <= most:
            raise ConfigError(f"{name} {value} is not between {least} and {most}; {meaning}")
    for_reset = {"keep-weights": options.keep_weights, "purge": options.purge, "yes": options.yes}
    for name, is_given in for_reset.items():
        if is_given and not options.reset:
            raise ConfigError(f"--{name} is for --reset; give both or neither")


def _manifests(ledger: Ledger) -> list[ManifestRecord]:
    with ledger.reading() as t:
        return t.manifests.all()


def _tell_manifest(versions: list[ManifestRecord], *, recorded_before: int) -> None:
    newest = versions[-1]
    if len(versions) == recorded_before:
        output.say(f"the run file has not changed; manifest version {newest.version} stays")
    else:
        output.say(
            f"manifest version {newest.version} is in force from round {newest.from_round} on"
        )


def _tokens(ledger: Ledger, *, renew: bool) -> tuple[dict[Role, str], dict[str, str]]:
    """The tokens that can be shown, and the hash of every role's token.

    Those from the environment and newly made ones can be shown. Of tokens that were made at an
    earlier start only the hashes are known.
    """
    with ledger.reading() as t:
        hashes = t.credentials.all()
    shown: dict[Role, str] = {}
    for role, variable in TOKEN_VARIABLES.items():
        given = os.environ.get(variable)
        if given is not None:
            _check_token(variable, given)
            shown[role] = given
        elif renew or role.value not in hashes:
            shown[role] = secrets.token_urlsafe(32)
    hashes |= {role.value: access.token_hash(token) for role, token in shown.items()}
    if len(set(hashes.values())) < len(hashes):
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


def _reachable(host: str) -> str:
    """A host that other machines can dial: 0.0.0.0 and :: are none, so the host name instead."""
    try:
        unspecified = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host
    return socket.gethostname() if unspecified else host


def _announce(
    options: ServeOptions, address: Address, secured: Certificate | None, tokens: dict[Role, str]
) -> None:
    """Prints how to join, and writes the ready file."""

    def url(host: str) -> str:
        scheme = "http" if secured is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{address.port}"

    fingerprint = None if secured is None else secured.fingerprint
    output.say(f"serving at {url(address.host)}; transfers on port {address.transfer_port}")
    how, variable = "join with", TOKEN_VARIABLES[Role.WORKER]
    if variable in os.environ:
        token = f"${variable}"  # whoever set it knows it, and this often ends in a log file
    elif Role.WORKER in tokens:
        token = tokens[Role.WORKER]
    else:
        how, token = "join with the token printed at the first start (or --new-tokens)", "…"
    pin = "" if fingerprint is None else f" --fingerprint {fingerprint}"
    # In the environment, not among the arguments, which every user of the machine can list.
    there = _reachable(address.host)
    plain = "" if secured is not None or is_loopback(there) else " --insecure"
    output.say(f"{how}:\n  ATOLL_TOKEN={token} atoll join {url(there)}{pin}{plain}")
    if Role.ADMIN in tokens and TOKEN_VARIABLES[Role.ADMIN] not in os.environ:
        output.say(f"admin token, shown once: {tokens[Role.ADMIN]}")
    if options.insecure and secured is None and not is_loopback(options.host):
        output.say("warning: plain text on a public address; anybody on the way can read the token")
    if options.ready_file is not None:
        ready = {
            "url": url(address.host),
            "transfer_port": address.transfer_port,
            "pid": os.getpid(),
            "fingerprint": fingerprint,
        }
        part = filesystem.part_of(options.ready_file)
        part.unlink(missing_ok=True)  # made anew: it may be a link that somebody has planted
        with part.open("x") as file:
            file.write(json.dumps(ready))
        os.replace(part, options.ready_file)
