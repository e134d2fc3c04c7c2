"""The one table from error codes to HTTP and gRPC statuses, and how an error reads on the wire."""

import grpc

from atoll import errors
from atoll.errors import AtollError, CoordinatorUnreachable, StaleGeneration

TABLE: dict[str, tuple[int, grpc.StatusCode]] = {
    "UNAUTHENTICATED": (401, grpc.StatusCode.UNAUTHENTICATED),
    "AUTH": (401, grpc.StatusCode.UNAUTHENTICATED),
    "PERMISSION_DENIED": (403, grpc.StatusCode.PERMISSION_DENIED),
    "UNKNOWN_WORKER": (404, grpc.StatusCode.NOT_FOUND),
    "BLOB_MISSING": (404, grpc.StatusCode.NOT_FOUND),
    "EVICTED": (404, grpc.StatusCode.NOT_FOUND),
    "STALE_GENERATION": (409, grpc.StatusCode.ABORTED),
    "ADDRESS_UNREACHABLE": (422, grpc.StatusCode.INVALID_ARGUMENT),
    "WORKER_TAKEN": (409, grpc.StatusCode.ALREADY_EXISTS),
    "TOO_MANY_WORKERS": (409, grpc.StatusCode.RESOURCE_EXHAUSTED),
    "FENCED": (409, grpc.StatusCode.ABORTED),
    "WORK": (409, grpc.StatusCode.FAILED_PRECONDITION),
    "CONFLICT": (409, grpc.StatusCode.ALREADY_EXISTS),
    "ROUND": (409, grpc.StatusCode.FAILED_PRECONDITION),
    "STALE": (409, grpc.StatusCode.FAILED_PRECONDITION),
    "WRONG_ROUND": (409, grpc.StatusCode.FAILED_PRECONDITION),
    "EMPTY_SUM": (409, grpc.StatusCode.FAILED_PRECONDITION),
    "WRONG_BASE": (409, grpc.StatusCode.FAILED_PRECONDITION),
    "DATASET_MISMATCH": (409, grpc.StatusCode.FAILED_PRECONDITION),
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
    "ATOLL": (500, grpc.StatusCode.INTERNAL),
    "STORE": (500, grpc.StatusCode.INTERNAL),
    "BLOB_CHANGED": (500, grpc.StatusCode.DATA_LOSS),
    "STATE_DAMAGED": (500, grpc.StatusCode.DATA_LOSS),
    "LEDGER_VERSION": (500, grpc.StatusCode.FAILED_PRECONDITION),
    "STATE_HELD": (500, grpc.StatusCode.FAILED_PRECONDITION),
    "DIVERGED": (500, grpc.StatusCode.INTERNAL),
    "GROUP_BROKEN": (500, grpc.StatusCode.INTERNAL),
    "SUPERSEDED": (503, grpc.StatusCode.UNAVAILABLE),
    "NOT_READY": (503, grpc.StatusCode.UNAVAILABLE),
    "UNREACHABLE": (503, grpc.StatusCode.UNAVAILABLE),
    "STORE_AWAY": (503, grpc.StatusCode.UNAVAILABLE),
    "DISK_FAILED": (503, grpc.StatusCode.UNAVAILABLE),
    "STORAGE_FULL": (507, grpc.StatusCode.RESOURCE_EXHAUSTED),
}
_UNLISTED = (500, grpc.StatusCode.INTERNAL)

INTERNAL = "INTERNAL"  # the code of an exception that nobody expected; its text stays here
ACCIDENT = "the coordinator met an error of its own; its log says which; send the message again"

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
    """The error that the coordinator named by `code`.

    Where it says `retry` and the class does not, a CoordinatorUnreachable, which callers retry.
    """
    error = errors.from_code(code, message)
    if isinstance(error, StaleGeneration):
        error.present = generation
    if retry and not error.retry:
        return CoordinatorUnreachable(f"{message} (code {code!r})")
    return error
