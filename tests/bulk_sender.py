"""A caller of a rank's bulk sockets that writes whatever it likes, by the documented bytes.

Byte layout as in `collectives/grpc/messages.py` and `sockets.py`, written here a second time.
"""

import json
import socket
import ssl
import struct
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from atoll.collectives.grpc import dial
from atoll.collectives.grpc.trust import Identity, RankGroup
from atoll.errors import from_code

LIMIT_SECONDS = 20.0


class Broken(Exception):
    """The rank ended the socket without a word."""


def invitation(
    group: RankGroup, shown: tuple[tuple[str, str], ...], *, to: int, identity: Identity | None
) -> tuple[int, bytes]:
    """Port and key; raises what the rank refuses with."""
    with dial.typed(), dial.channel(group, to, identity) as channel:
        ask: Any = channel.unary_unary(f"/{dial.SERVICE}/Bulk")
        port, key = struct.unpack("<H32s", ask(b"", metadata=shown, timeout=LIMIT_SECONDS))
        return port, key


class BulkSender:
    """One socket, from its key on."""

    def __init__(
        self,
        port: int,
        key: bytes,
        *,
        identity: Identity | None = None,
        trusts: bytes = b"",
        host: str = "127.0.0.1",
    ) -> None:
        self._socket: socket.socket = socket.create_connection((host, port), LIMIT_SECONDS)
        try:
            if identity is not None:
                self._socket = _context(identity, trusts).wrap_socket(self._socket)
            self._socket.sendall(key)
            self.answer()
        except BaseException:
            self.close()
            raise

    def send(self, group: int, step: int, values: bytes, *, start: int = 0, **raw: int) -> None:
        """A message of a reduction, to be answered at once; `raw` says something else than is true.

        Nothing follows what is not true: the rank may be gone by then.
        """
        said = {"nbytes": len(values), "op": 1, "stop": start + len(values), **raw}
        numbers = (said["nbytes"], group, 0, step, 0, said["op"], 0, 0, start, said["stop"])
        ask = b"" if raw else bytes(struct.calcsize("<QQQQIBIIQQ"))
        self._socket.sendall(struct.pack("<QQQQIBIIQQ", *numbers) + values + ask)

    def told(self, group: int, step: int, values: bytes) -> None:
        """Sends a message and waits for the answer."""
        try:
            self.send(group, step, values)
        except ConnectionError as error:
            raise Broken from error
        self.answer()

    def raw(self, data: bytes) -> None:
        self._socket.sendall(data)

    def answer(self) -> None:
        """Returns when the rank has taken one more; raises what it refuses with."""
        kind = self._read(1)
        if kind == b"\1":
            (nbytes,) = struct.unpack("<H", self._read(2))
            said = json.loads(self._read(nbytes))
            raise from_code(said["code"], said["message"])
        assert kind == b"\0", kind

    def _read(self, nbytes: int) -> bytes:
        got = b""
        while len(got) < nbytes:
            try:
                more = self._socket.recv(nbytes - len(got))
            except TimeoutError:
                raise
            except OSError as error:
                raise Broken from error
            if not more:
                raise Broken
            got += more
        return got

    def close(self) -> None:
        self._socket.close()


def sent(
    group: RankGroup,
    messages: Iterable[tuple[int, int, bytes]],
    *,
    shown: tuple[tuple[str, str], ...],
    to: int = 0,
    identity: Identity | None = None,
) -> int:
    """How many messages (group, step, values) were taken; raises what the rank refuses with."""
    port, key = invitation(group, shown, to=to, identity=identity)
    trusts = group.members[to].certificate_pem
    sender = BulkSender(port, key, identity=identity, trusts=trusts)
    taken = 0
    try:
        for number, step, values in messages:
            sender.send(number, step, values)
            sender.answer()
            taken += 1
    finally:
        sender.close()
    return taken


def _context(identity: Identity, trusts: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cadata=trusts.decode())
    with tempfile.TemporaryDirectory() as home:
        path = Path(home) / "own.pem"
        path.write_bytes(identity.key_pem + identity.certificate_pem)
        context.load_cert_chain(path)
    return context
