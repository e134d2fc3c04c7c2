"""The one table from error codes to HTTP and gRPC statuses, and how an error reads on the wire."""

import logging
import re

import grpc

from atoll import errors
from atoll.errors import (
    AtollError,
    ConfigError,
    CoordinatorUnreachable,
    StaleGeneration,
    StoreError,
)

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
    (500, grpc.StatusCode.FAILED_PRECONDITION): "LEDGER_VERSION STATE_HELD STATE_UNSAFE "
    "OBJECT_REFUSED",
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
# Absolute paths as Python quotes them, and bare ones of two names or more.
_QUOTED = re.compile(r"""(['"])/(?:(?!\1).)*?((?:(?!\1)[^/])*)\1""")
_BARE = re.compile(r"""(?<![\w…/:.])/(?:[^\s/'"`;,)]+/)+([^\s/'"`;,)]*)""")


def http(error: AtollError) -> int:
    """The HTTP status of `error`."""
    return TABLE.get(error.code, _UNLISTED)[0]


def rpc(error: AtollError) -> grpc.StatusCode:
    """The gRPC status of `error`."""
    return TABLE.get(error.code, _UNLISTED)[1]


def log_fault(log: logging.Logger, event: str, error: AtollError) -> None:
    """Logs a fault of this side that its peer cannot help, or is not told whole."""
    if http(error) >= 500 and (not error.retry or _said(error) != str(error)):
        level = logging.WARNING if error.retry else logging.ERROR
        log.log(level, event, extra={"code": error.code, "reason": str(error)})


def _said(error: AtollError) -> str:
    """What `error` says to whoever may not know this machine's directories."""
    own = isinstance(error, (StoreError, ConfigError))  # others quote what was sent
    return without_paths(str(error)) if own else str(error)


def without_paths(text: str) -> str:
    """`text` without directories of this machine: of an absolute path its last name is left."""
    shorter = _QUOTED.sub(lambda found: f"{found[1]}…/{found[2]}{found[1]}", text)
    return _BARE.sub(lambda found: f"…/{found[1]}", shorter)


def sentence(error: AtollError, *, paths: bool = False) -> str:
    """What the peer reads: one bounded text that every transport can carry.

    Errors quote what was sent, which may be long or hold half a surrogate pair. Without `paths`
    they name no directory of this machine.
    """
    told = str(error) if paths else _said(error)
    text = told.encode("utf-8", "backslashreplace").decode()
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
