"""What gRPC messages say about their sender, and how a stream of them ends."""

from collections.abc import AsyncIterator

from pydantic import ValidationError

from atoll.errors import FrameError, ProtocolError
from atoll.protocol.messages import Identity
from atoll.wire.proto import transfer_pb2


def identity(message: transfer_pb2.Identity) -> Identity:
    """Who speaks; ProtocolError for what no identity says."""
    try:
        return Identity(**{name: getattr(message, name) for name in Identity.model_fields})
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        raise ProtocolError(f"identity.{first['loc'][0]}: {first['msg']}") from exc


def check_commit(kind: str | None, commit: bool, *, of: str) -> None:
    """FrameError for a message that is neither data nor a commit that says so."""
    if kind != "commit":
        raise FrameError(f"{of} goes on with `data` or `commit`, not {kind!r}")
    if not commit:
        raise FrameError(f"{of} ends with `commit: true`; `commit: false` commits nothing")


async def check_end(messages: AsyncIterator[object], *, of: str) -> None:
    """FrameError for anything behind the commit, before it is carried out."""
    async for _ in messages:
        raise FrameError(
            f"{of} ends with its `commit` and more was sent; nothing of it counts, close the "
            f"stream there"
        )
