"""The one table from error codes to HTTP and gRPC statuses, and how an error reads on the wire."""

import grpc

from atoll import errors
from atoll.errors import AtollError, CoordinatorUnreachable, StaleGeneration

_ROWS: dict[tuple[int, grpc.StatusCode], str] = {
    (401, grpc.StatusCode.UNAUTHENTICATED): "UNAUTHENTICATED AUTH",
    (403, grpc.StatusCode.PERMISSION_DENIED): "PERMISSION_DENIED",
    (404, grpc.StatusCode.NOT_FOUND): "UNKNOWN_WORKER BLOB_MISSING OBJECT_MISSING EVICTED",
    (409, grpc.StatusCode.ABORTED): "STALE_GENERATION STALE_GROUP FENCED OBJECT_CHANGED",
    (409, grpc.StatusCode.ALREADY_EXISTS): "WORKER_TAKEN CONFLICT",
    (409, grpc.StatusCode.RESOURCE_EXHAUSTED): "TOO_MANY_WORKERS",
    (409, grpc.StatusCode.FAILED_PRECONDITION): "WORK ROUND STALE LEFT_OUT WRONG_ROUND EMPTY_SUM "
    "WRONG_BASE DATASET_MISMATCH LEASE_LOST MANIFEST_MISMATCH VERSION_MISMATCH",
    (413, grpc.StatusCode.OUT_OF_RANGE): "OVERSIZED",
    (422, grpc.StatusCode.INVALID_ARGUMENT): "ADDRESS_UNREACHABLE FRAME LAYOUT_MISMATCH "
    "CONTRIBUTION NOT_FINITE NOT_SUMMED CONFIG PROTOCOL",
    (500, grpc.StatusCode.INTERNAL): "ATOLL STORE DIVERGED GROUP_BROKEN INTERNAL",
    (500, grpc.StatusCode.DATA_LOSS): "BLOB_CHANGED OBJECT_SIZE STATE_DAMAGED",
    (500, grpc.StatusCode.FAILED_PRECONDITION): "LEDGER_VERSION STATE_HELD OBJECT_REFUSED",
    (503, grpc.StatusCode.UNAVAILABLE): "SUPERSEDED NOT_READY UNREACHABLE STORE_AWAY DISK_FAILED "
    "EXHAUSTED",
    (504, grpc.StatusCode.DEADLINE_EXCEEDED): "MISSING_RANKS STORE_LATE",
    (507, grpc.StatusCode.RESOURCE_EXHAUSTED): "STORAGE_FULL",
}
TABLE = {code: row for row, codes in _ROWS.items() for code in codes.split()}
_UNLISTED = (500, grpc.StatusCode.INTERNAL)

# A gRPC status travels in trailers, of which a peer takes 8 KiB; one character may need 12 bytes.
MAX_SENTENCE = 600
_ENDING = 200  # the way out stands at the end


def http(error: AtollError) -> int:
    """The HTTP status of `error`."""
    return TABLE.get(error.code, _UNLISTED)[0]


def rpc(error: AtollError) -> grpc.StatusCode:
    """The gRPC status of `error`."""
    return TABLE.get(error.code, _UNLISTED)[1]


def sentence(error: AtollError) -> str:
    """What the peer reads: one bounded text that every transport can carry.

    Errors quote what was sent, which may be long or hold half a surrogate pair.
    """
    text = str(error).encode("utf-8", "backslashreplace").decode()
    if len(text) <= MAX_SENTENCE:
        return text
    return f"{text[: MAX_SENTENCE - _ENDING - 3]} … {text[-_ENDING:]}"


def reported(code: str, message: str, *, retry: bool, generation: int) -> AtollError:
    """The error that the coordinator reported by `code`, as this side raises it.

    The coordinator may ask for a retry of an error that is not retried here, one of a newer release
    for instance; it becomes a CoordinatorUnreachable, which callers retry.
    """
    error = errors.from_code(code, message)
    if isinstance(error, StaleGeneration):
        error.present = generation
    if retry and not error.retry:
        return CoordinatorUnreachable(f"{message} (code {code!r})")
    return error
