"""The one table from error codes to HTTP and gRPC statuses."""

import grpc

from atoll.errors import AtollError

_TABLE: dict[str, tuple[int, grpc.StatusCode]] = {
    "UNAUTHENTICATED": (401, grpc.StatusCode.UNAUTHENTICATED),
    "PERMISSION_DENIED": (403, grpc.StatusCode.PERMISSION_DENIED),
    "UNKNOWN_WORKER": (404, grpc.StatusCode.NOT_FOUND),
    "BLOB_MISSING": (404, grpc.StatusCode.NOT_FOUND),
    "WORKER_TAKEN": (409, grpc.StatusCode.ALREADY_EXISTS),
    "FENCED": (409, grpc.StatusCode.ABORTED),
    "CONFLICT": (409, grpc.StatusCode.ALREADY_EXISTS),
    "STALE": (409, grpc.StatusCode.FAILED_PRECONDITION),
    "WRONG_ROUND": (409, grpc.StatusCode.FAILED_PRECONDITION),
    "WRONG_BASE": (409, grpc.StatusCode.FAILED_PRECONDITION),
    "LEASE_LOST": (409, grpc.StatusCode.FAILED_PRECONDITION),
    "MANIFEST_MISMATCH": (409, grpc.StatusCode.FAILED_PRECONDITION),
    "VERSION_MISMATCH": (409, grpc.StatusCode.FAILED_PRECONDITION),
    "OVERSIZED": (413, grpc.StatusCode.OUT_OF_RANGE),
    "FRAME": (422, grpc.StatusCode.INVALID_ARGUMENT),
    "LAYOUT_MISMATCH": (422, grpc.StatusCode.INVALID_ARGUMENT),
    "CONTRIBUTION": (422, grpc.StatusCode.INVALID_ARGUMENT),
    "NOT_FINITE": (422, grpc.StatusCode.INVALID_ARGUMENT),
    "CONFIG": (422, grpc.StatusCode.INVALID_ARGUMENT),
    "PROTOCOL": (422, grpc.StatusCode.INVALID_ARGUMENT),
    "NOT_READY": (503, grpc.StatusCode.UNAVAILABLE),
    "STORAGE_FULL": (507, grpc.StatusCode.RESOURCE_EXHAUSTED),
}
_UNLISTED = (500, grpc.StatusCode.INTERNAL)


def http(error: AtollError) -> int:
    """The HTTP status of `error`."""
    return _TABLE.get(error.code, _UNLISTED)[0]


def rpc(error: AtollError) -> grpc.StatusCode:
    """The gRPC status of `error`."""
    return _TABLE.get(error.code, _UNLISTED)[1]
