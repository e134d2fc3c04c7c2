"""What a request says, as a message: bounded before it is read, and parsed beside the event loop.

Only a short body is parsed in the loop, where every heartbeat waits for it. One text has one
meaning: each key stands once and numbers are finite. Python's JSON takes the last of two equal keys
and NaN; somebody on the way might take the first.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request

from atoll.errors import FrameTooLarge, ProtocolError
from atoll.protocol.exchange import Ask

SMALL_BYTES = 4 << 10
MAX_KEYS = 1_100  # of one object: more than the 1,024 ranks that a message may name
PARSED_AT_ONCE = 2  # the interpreter runs one at a time anyway, and the loop is to get its turn


@dataclass(frozen=True)
class Bodies:
    """Reads messages of one server; belongs to its event loop."""

    _turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PARSED_AT_ONCE))

    async def message(self, http: Request, kind: type[Ask[Any]]) -> Ask[Any]:
        """The message of `kind` that a request carries; a typed refusal of anything else."""
        check_size(kind, int(http.headers.get("content-length", "0")))
        if not kind.model_fields:
            return kind()
        if kind.in_query():
            return _checked(kind, "query", _asked(http.query_params.multi_items()))
        body = await _read(http, kind)
        if len(body) <= SMALL_BYTES:
            return parse(kind, body)
        async with self._turns:
            return await run_in_threadpool(parse, kind, body)


def check_size(kind: type[Ask[Any]], nbytes: int) -> None:
    """FrameTooLarge for a body of so many bytes that no message of `kind` has."""
    route = kind.route
    if nbytes > route.max_body_bytes:
        raise FrameTooLarge(
            f"the body of {route.method} {route.path} has {nbytes} bytes and may have "
            f"{route.max_body_bytes}; send fewer items in one message, and weights through the "
            f"data plane"
        )


async def _read(http: Request, kind: type[Ask[Any]]) -> bytes:
    body = bytearray()
    try:
        async for piece in http.stream():
            body += piece
            check_size(kind, len(body))  # whatever its head has said
    except ClientDisconnect as exc:
        raise ProtocolError("the connection ended before the body did; send it whole") from exc
    return bytes(body)


def parse(kind: type[Ask[Any]], body: bytes) -> Ask[Any]:
    """The message in `body`; ProtocolError names the first thing that is wrong with it."""
    try:
        said = json.loads(body, object_pairs_hook=_table, parse_constant=_no_constant)
    except (ValueError, RecursionError) as exc:
        # Nesting, digits and encoding have limits of the interpreter's own.
        raise ProtocolError(f"body: not read as JSON: {exc}") from exc
    return _checked(kind, "body", said)


def _asked(pairs: list[tuple[str, str]]) -> dict[str, Any]:
    try:
        return _table(pairs)
    except ValueError as exc:
        raise ProtocolError(f"query: {exc}") from exc


def _table(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        # Each that is unknown would be an error of its own.
        raise ValueError(f"an object has {len(pairs)} fields and may have {MAX_KEYS}")
    found = dict(pairs)
    if len(found) != len(pairs):
        name, count = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"{name[:80]!r} stands {count} times; each key stands once")
    return found


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no number; numbers are finite")


def _checked(kind: type[Ask[Any]], where: str, said: object) -> Ask[Any]:
    try:
        return kind.model_validate(said)
    except ValidationError as exc:
        # Without what was given, which may be long.
        first = exc.errors(include_url=False, include_context=False, include_input=False)[0]
        raise ProtocolError(f"{_dotted(where, first['loc'])}: {first['msg']}") from exc


def _dotted(where: str, parts: Iterable[object]) -> str:
    return ".".join(map(str, (where, *parts)))
