"""The data plane's methods as an island calls them; data parts pass without protobuf's copies."""

from collections.abc import Callable, Iterator
from typing import Any

import grpc

from atoll.wire import chunks, rpc
from atoll.wire.proto import transfer_pb2

_SERVICE = transfer_pb2.DESCRIPTOR.services_by_name["Transfer"].full_name


class TransferCalls:
    """What `channel` offers: calls for frames, for parts of checkpoints, and for presence.

    Parts are messages or, for data, bytes that `chunks.data_part` made (sent) and views of what
    came in (received).
    """

    def __init__(self, channel: grpc.Channel) -> None:
        def call(kind: Callable[..., Any], name: str, read: Callable[[bytes], Any]) -> Any:
            path = f"/{_SERVICE}/{name}"
            return kind(path, request_serializer=rpc.written, response_deserializer=read)

        self.offset: Callable[..., transfer_pb2.UploadOffset] = call(
            channel.unary_unary, "Offset", transfer_pb2.UploadOffset.FromString
        )
        self.upload: Callable[..., transfer_pb2.Receipt] = call(
            channel.stream_unary, "Upload", transfer_pb2.Receipt.FromString
        )
        self.download: Callable[..., Iterator[Any]] = call(channel.unary_stream, "Download", _part)
        self.part_offset: Callable[..., transfer_pb2.UploadOffset] = call(
            channel.unary_unary, "PartOffset", transfer_pb2.UploadOffset.FromString
        )
        self.send_part: Callable[..., transfer_pb2.PartReceipt] = call(
            channel.stream_unary, "SendPart", transfer_pb2.PartReceipt.FromString
        )
        self.fetch: Callable[..., Iterator[Any]] = call(channel.unary_stream, "Fetch", _part)
        self.presence: Callable[..., Any] = call(
            channel.unary_stream, "Presence", transfer_pb2.PresenceState.FromString
        )


def _part(message: bytes) -> memoryview | transfer_pb2.DownloadPart:
    data = chunks.data_of(message)
    return transfer_pb2.DownloadPart.FromString(message) if data is None else data
