"""Bodies of the control plane: each key stands once, numbers are finite, one text has one meaning.

Python's JSON takes the last of two equal keys and NaN; somebody on the way might take the first.
"""

import json
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute


class JsonRoute(APIRoute):
    """A route whose body is read by `parsed`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return strict


class _JsonRequest(Request):
    async def json(self) -> Any:
        return parsed(await self.body())


def parsed(body: bytes) -> Any:
    """What `body` says; JSONDecodeError, as FastAPI expects it, for whatever is no good JSON."""
    try:
        return json.loads(body, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as exc:
        # Nesting, digits and encoding have limits of the interpreter's own.
        raise json.JSONDecodeError(str(exc)[:200] or type(exc).__name__, "", 0) from exc


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        name, count = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"{name[:80]!r} stands {count} times; each key stands once")
    return found


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no number; numbers are finite")
