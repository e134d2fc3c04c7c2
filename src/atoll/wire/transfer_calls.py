"""The data plane's methods as an island calls them; data parts pass without protobuf's copies."""

from collections.abc import Callable, Iterator
from typing import Any

import grpc

from atoll.wire import chunks, rpc
from atoll.wire.proto import transfer_pb2

_SERVICE = transfer_pb2.DESCRIPTOR.services_by_name["Transfer"].full_name


class TransferCalls:
    """What `channel` offers: `offset`, `upload`, `download`, `presence`."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.offset: Callable[..., transfer_pb2.UploadOffset] = channel.unary_unary(
            f"/{_SERVICE}/Offset",
            request_serializer=rpc.written,
            response_deserializer=transfer_pb2.UploadOffset.FromString,
        )
        # Parts are messages or, for data, bytes that `chunks.data_part` made.
        self.upload: Callable[..., transfer_pb2.Receipt] = channel.stream_unary(
            f"/{_SERVICE}/Upload",
            request_serializer=rpc.written,
            response_deserializer=transfer_pb2.Receipt.FromString,
        )
        # Parts are messages or, for data, views of what came in.
        self.download: Callable[..., Iterator[Any]] = channel.unary_stream(
            f"/{_SERVICE}/Download",
            request_serializer=rpc.written,
            response_deserializer=_part,
        )
        self.presence: Callable[..., Any] = channel.unary_stream(
            f"/{_SERVICE}/Presence",
            request_serializer=rpc.written,
            response_deserializer=transfer_pb2.PresenceState.FromString,
        )


def _part(message: bytes) -> memoryview | transfer_pb2.DownloadPart:
    data = chunks.data_of(message)
    return transfer_pb2.DownloadPart.FromString(message) if data is None else data
