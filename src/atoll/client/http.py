"""One party's HTTP connection to a coordinator: address, trust, bounded answers, typed refusals.

What people's tools and islands share. Frames and presence go over gRPC: `island.link.network`.
"""

import ipaddress
import re
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ValidationError

from atoll.errors import AtollError, ConfigError, CoordinatorUnreachable, ProtocolError
from atoll.protocol.exchange import Ask
from atoll.protocol.messages import ErrorReply
from atoll.wire import pinning, statuses
from atoll.wire.pinning import Trust

MAX_REPLY_BYTES = 16 << 20
CONTROL_SECONDS = 30.0
_TOKEN = re.compile(r"[!-~]+\Z")  # what a header can carry

R = TypeVar("R", bound=BaseModel)


class HttpClient:
    """Sends messages and takes their answers. Thread-safe."""

    def __init__(
        self, url: str, *, token: str, fingerprint: str | None = None, insecure: bool = False
    ) -> None:
        """`insecure` sends the token in plain text to another machine; else that is refused."""
        self.secure, host, self._port = _address(url)
        self.host = f"[{host}]" if ":" in host else host  # as an address spells it
        if not _TOKEN.match(token):
            raise ConfigError(
                "the token holds a space, a line end or a letter outside ASCII; "
                "copy it from the join command that `atoll serve` printed"
            )
        self.authorization = f"Bearer {token}"
        if fingerprint is not None:
            pinning.checked(fingerprint)
            if not self.secure:
                raise ConfigError(f"a fingerprint needs an https:// url, not {url!r}")
        if not (self.secure or insecure or is_loopback(host)):
            raise ConfigError(
                f"url={url!r} would send the token in plain text to another machine, and anybody "
                f"on the way could read it; use the https:// url and --fingerprint of the join "
                f"command, or say --insecure (insecure=True) on a network that you trust"
            )
        self._fingerprint = fingerprint
        self._base = f"{'https' if self.secure else 'http'}://{self.host}:{self._port}"
        self._lock = threading.RLock()
        self._trust: Trust | None = None
        self._client: httpx.Client | None = None

    def close(self) -> None:
        """Ends all connections."""
        if self._client is not None:
            self._client.close()

    def send(self, message: Ask[R]) -> R:
        """The answer to `message`; the coordinator's refusal as the error it names."""
        path = message.target()
        content = None if message.in_query() else message.model_dump_json().encode()
        with self._asking(message.route.method, path, content) as response:
            answer = _bounded(response)
        try:
            return message.reply().model_validate_json(answer)
        except ValidationError as exc:
            first = exc.errors(include_url=False)[0]
            name = ".".join(str(part) for part in first["loc"])
            value = first["input"]
            given = f" (it says {value!r})" if isinstance(value, (str, int, float, bool)) else ""
            raise ProtocolError(
                f"{path} of {self._base} answers without a good {name!r}: {first['msg']}{given}; "
                f"run the same release of atoll on both sides"
            ) from exc

    def copy_ledger(self, write: Callable[[bytes], object]) -> None:
        """Streams a consistent copy of the ledger into `write`; needs the admin role."""
        with self._asking("GET", "/ledger") as response:
            for piece in response.iter_bytes():
                write(piece)

    @contextmanager
    def _asking(
        self, method: str, path: str, content: bytes | None = None
    ) -> Iterator[httpx.Response]:
        """The answer, to be read inside; a refusal, or no answer, as the error that says so."""
        try:
            with self._opened().stream(method, path, content=content) as response:
                if response.status_code != 200:
                    raise _refusal(response)
                yield response
        except httpx.HTTPError as exc:
            raise self._no_answer(path, exc) from exc

    def trust(self) -> Trust:
        """Which certificate encrypted connections accept; the pinned one is fetched once."""
        with self._lock:
            if self._trust is None:
                self._trust = pinning.pin(self.host.strip("[]"), self._port, self._fingerprint)
            return self._trust

    def _no_answer(self, path: str, exc: httpx.HTTPError) -> AtollError:
        cause: BaseException | None = exc
        while cause is not None:
            if isinstance(cause, ssl.SSLCertVerificationError):
                # Asking again would not help, and a person must decide.
                return ConfigError(
                    f"the certificate of {self._base} is not trusted here "
                    f"({cause.verify_message}); give --fingerprint from the join command"
                )
            cause = cause.__cause__ or cause.__context__
        reason = str(exc) or type(exc).__name__
        return CoordinatorUnreachable(f"no answer from {self._base}{path}: {reason}")

    def _opened(self) -> httpx.Client:
        with self._lock:
            if self._client is None:
                self._client = httpx.Client(
                    base_url=self._base,
                    headers={
                        "authorization": self.authorization,
                        "content-type": "application/json",
                        # Uncompressed: MAX_REPLY_BYTES bounds what is received, not what it
                        # would unpack to.
                        "accept-encoding": "identity",
                    },
                    timeout=CONTROL_SECONDS,
                    verify=self.trust().context() if self.secure else False,
                    trust_env=False,
                )
            return self._client


def is_loopback(host: str) -> bool:
    """Whether what is sent to `host` stays on this machine, by its name alone: nobody is asked."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bounded(response: httpx.Response) -> bytes:
    """The body as it was sent; ProtocolError as soon as it is longer than any reply."""
    body = bytearray()
    for piece in response.iter_raw():
        body += piece
        if len(body) > MAX_REPLY_BYTES:
            raise ProtocolError(
                f"{response.url} answers {response.status_code} with more than "
                f"{MAX_REPLY_BYTES} bytes; is it a coordinator?"
            )
    return bytes(body)


def _refusal(response: httpx.Response) -> AtollError:
    try:
        reply = ErrorReply.model_validate_json(_bounded(response))
    except ValidationError:
        if response.status_code >= 500:
            return CoordinatorUnreachable(f"{response.url} answers {response.status_code}")
        return ProtocolError(f"{response.url} answers {response.status_code}; is it a coordinator?")
    return statuses.reported(
        reply.code, reply.message, retry=reply.retry, generation=reply.generation or 0
    )


def _address(url: str) -> tuple[bool, str, int]:
    """Whether `url` is secure, its host and its port; ConfigError for anything else in it."""
    try:
        parts = urlsplit(url)
        port = parts.port
        bare = not parts.path.strip("/") and not parts.query and parts.username is None
        if parts.scheme not in ("http", "https") or not parts.hostname or not bare:
            raise ValueError(url)
    except ValueError as exc:
        raise ConfigError(f"url={url!r} must be http://host:port or https://host:port") from exc
    secure = parts.scheme == "https"
    return secure, parts.hostname, port or (443 if secure else 80)
