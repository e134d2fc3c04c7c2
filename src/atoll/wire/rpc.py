"""What every gRPC method needs on both sides: tokens, decoding, and errors as statuses and back.

Knows nothing of what a method does.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message

from atoll.errors import (
    Accident,
    AtollError,
    CoordinatorUnreachable,
    ProtocolError,
    StaleGeneration,
)
from atoll.wire import chunks, statuses

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)

if TYPE_CHECKING:  # grpc's classes are generic in their stubs only
    Context = grpc.aio.ServicerContext[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses every call whose `authorization` is not admitted, before its handler runs.

    `admit` gets all values of it and raises a typed error for what it refuses. Runs on the event
    loop.
    """

    def __init__(self, admit: Callable[[Sequence[str]], None]) -> None:
        self._admit = admit

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]",
        details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        handler = await continuation(details)
        sent = details.invocation_metadata or ()
        try:
            self._admit([str(value) for key, value in sent if key == "authorization"])
        except AtollError as error:
            return _refusing(handler, error)
        return handler


def error_of(exc: grpc.RpcError) -> AtollError:
    """The error for a call that failed: what the coordinator refused with, else Unreachable."""
    call: Any = exc
    said = {str(key): str(value) for key, value in (call.trailing_metadata() or ())}
    if "atoll-code" not in said:
        return CoordinatorUnreachable(f"transfer broken: {call.code()}: {call.details()}")
    return statuses.reported(
        said["atoll-code"],
        str(call.details()),
        retry=said.get("atoll-retry") == "true",
        generation=_number(said.get("atoll-generation", "")),
    )


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0


def trailers(error: AtollError) -> tuple[tuple[str, str], ...]:
    """What goes with the status of a refused call, so that `error_of` finds the error again."""
    said = [("atoll-code", error.code), ("atoll-retry", str(error.retry).lower())]
    if isinstance(error, StaleGeneration):
        said.append(("atoll-generation", str(error.present)))
    return tuple(said)


async def _abort(context: "Context", error: AtollError) -> NoReturn:
    """Ends a call: the sentence as the status detail, the rest as trailing metadata."""
    await context.abort(statuses.rpc(error), statuses.sentence(error), trailers(error))


@asynccontextmanager
async def answering(context: "Context") -> AsyncIterator[None]:
    """Ends a method's call with a status: by the table, or without text for an unexpected error."""
    try:
        yield
    except AtollError as error:
        statuses.log_fault(log, "a transfer found a fault", error)
        await _abort(context, error)
    except grpc.aio.AbortError:
        raise
    except Exception:
        log.exception("a transfer met an unexpected error")
        await _abort(context, Accident())


def _refusing(handler: "Handler | None", error: AtollError) -> "Handler":
    """A handler that streams as `handler` does and refuses without reading what was sent."""

    async def refuse(_: object, context: "Context") -> None:
        await _abort(context, error)

    if handler is None:
        return _KINDS[(False, False)](refuse)
    return _KINDS[(handler.request_streaming, handler.response_streaming)](refuse)


# Whether a stream comes in, whether one goes out.
_KINDS: "dict[tuple[bool, bool], Callable[..., Handler]]" = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def handlers(described: ServiceDescriptor, service: object) -> grpc.GenericRpcHandler:
    """All methods that `described` lists, each served by the method of that name of `service`.

    Bytes that are no message arrive there as None. The generated registration would let gRPC
    answer them itself, with a traceback in the log and without a code.
    """
    return grpc.method_handlers_generic_handler(
        described.full_name,
        {
            method.name: _KINDS[(method.client_streaming, method.server_streaming)](
                getattr(service, method.name),
                request_deserializer=_reader(method.input_type),
                response_serializer=written,
            )
            for method in described.methods
        },
    )


def _reader(described: Descriptor) -> Callable[[bytes], Message | memoryview | None]:
    """Reads a message; a part that carries only data comes as a view of what was received."""
    message_type = message_factory.GetMessageClass(described)
    carries_data = "data" in described.fields_by_name

    def read(data: bytes) -> Message | memoryview | None:
        if carries_data and (view := chunks.data_of(data)) is not None:
            return view
        try:
            return message_type.FromString(data)
        except DecodeError:
            return None

    return read


def written(message: Message | bytes) -> bytes:
    """The bytes of a message; a data part is bytes already, made by `chunks.data_part`."""
    return message if isinstance(message, bytes) else message.SerializeToString()


def readable(message: M | None) -> M:
    """Gives `message` back; ProtocolError for None, which `_reader` gives for undecodable bytes."""
    if message is None:
        raise ProtocolError("what was sent is no message of this method; update the sender")
    return message
