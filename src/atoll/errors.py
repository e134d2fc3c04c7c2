"""Every failure Atoll names, as one tree.

    AtollError
      ConfigError                 a run file, flag or argument
      AuthError                   Unauthenticated, Forbidden
      ProtocolError               FrameError, VersionMismatch, ContributionError,
                                  ManifestMismatch (DatasetMismatch)
      StoreError                  BlobMissing, BlobChanged, StorageFull, StoreAway, DiskFailed,
                                  LedgerVersion, StateHeld, Superseded, StateDamaged
      RoundError                  NotReady, WrongRound, StaleContribution, Conflict, EmptySum,
                                  Diverged
      WorkError                   UnknownWorker (Evicted), WorkerTaken, TooManyWorkers, Fenced,
                                  LeaseLost, StaleGeneration, AddressUnreachable
      GroupBroken                 a rank of this island is gone or late
      CoordinatorUnreachable      the network, a dead or restarting coordinator

`code` is stable and crosses the wire; `retry` tells the sender whether the same message can succeed
later; where the sender met the error on its own machine it is set to False. Statuses of HTTP and
gRPC are assigned in `wire/statuses.py`, never here.
"""

from typing import ClassVar


class AtollError(Exception):
    """Something Atoll refuses; the subclass and its code say what."""

    code: ClassVar[str] = "ATOLL"
    retry: bool = False

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or "").strip())


class ConfigError(AtollError):
    """A setting breaks its rule."""

    code = "CONFIG"


class AuthError(AtollError):
    """A credential does not open this door."""

    code = "AUTH"


class Unauthenticated(AuthError):
    """The request carries no known bearer token; use the one that `atoll serve` printed."""

    code = "UNAUTHENTICATED"


class Forbidden(AuthError):
    """The token's role does not allow this call."""

    code = "PERMISSION_DENIED"


class ProtocolError(AtollError):
    """A message breaks the protocol."""

    code = "PROTOCOL"


class FrameError(ProtocolError):
    """A frame is damaged or not what its header says."""

    code = "FRAME"


class FrameTooLarge(FrameError):
    """A frame or body is larger than what the run's layout and codec allow."""

    code = "OVERSIZED"


class VersionMismatch(ProtocolError):
    """The two sides speak different versions."""

    code = "VERSION_MISMATCH"


class ManifestMismatch(ProtocolError):
    """The message was made under another run or manifest."""

    code = "MANIFEST_MISMATCH"


class DatasetMismatch(ManifestMismatch):
    """A dataset is known by another length."""

    code = "DATASET_MISMATCH"


class ContributionError(ProtocolError):
    """A contribution's values break the run's rules."""

    code = "CONTRIBUTION"


class LayoutMismatch(ContributionError):
    """Names, shapes or dtypes differ from the run's layout."""

    code = "LAYOUT_MISMATCH"


class NotFinite(ContributionError):
    """A contribution holds NaN or infinity."""

    code = "NOT_FINITE"


class WrongBase(ContributionError):
    """A contribution was computed from other weights than the published ones."""

    code = "WRONG_BASE"


class StoreError(AtollError):
    """Durable state could not be read or written."""

    code = "STORE"


class BlobMissing(StoreError):
    """No blob of that name is stored."""

    code = "BLOB_MISSING"


class BlobChanged(StoreError):
    """A stored blob's bytes no longer match its name."""

    code = "BLOB_CHANGED"


class StorageFull(StoreError):
    """The disk has no room for this upload; free some and the sender's retry will pass."""

    code = "STORAGE_FULL"
    retry = True


class StoreAway(StoreError):
    """The server that keeps the ledger or the blobs does not answer; nothing can be recorded."""

    code = "STORE_AWAY"
    retry = True  # by the islands: once the server, and with it the coordinator, is back


class DiskFailed(StoreError):
    """A disk did not confirm what was written; the process that met this stops and starts again."""

    code = "DISK_FAILED"
    retry = True  # by a sender, once the coordinator is back; a sync is never repeated


class LedgerVersion(StoreError):
    """The ledger's tables are of another release than this program's."""

    code = "LEDGER_VERSION"


class StateHeld(StoreError):
    """Another process holds this state directory."""

    code = "STATE_HELD"


class Superseded(StoreError):
    """Another coordinator has taken this ledger over; this one writes nothing more and stops."""

    code = "SUPERSEDED"
    retry = True  # by the islands: the new coordinator may take what this one refuses


class StateDamaged(StoreError):
    """What the ledger says and what is stored disagree."""

    code = "STATE_DAMAGED"


class RoundError(AtollError):
    """A round does not take this now."""

    code = "ROUND"


class NotReady(RoundError):
    """The coordinator cannot answer this yet."""

    code = "NOT_READY"
    retry = True


class WrongRound(RoundError):
    """The message names a round that is not open."""

    code = "WRONG_ROUND"


class StaleContribution(RoundError):
    """The round closed without this contribution; its rows are open again."""

    code = "STALE"


class Conflict(RoundError):
    """Other bytes were accepted under the same key before."""

    code = "CONFLICT"


class EmptySum(RoundError):
    """No contribution was accepted; the model is unchanged."""

    code = "EMPTY_SUM"


class Diverged(RoundError):
    """The outer step gives NaN or infinity; nothing of it was published."""

    code = "DIVERGED"


class WorkError(AtollError):
    """A worker may not do this."""

    code = "WORK"


class UnknownWorker(WorkError):
    """The coordinator does not know this worker_id; register first."""

    code = "UNKNOWN_WORKER"


class Evicted(UnknownWorker):
    """The coordinator took this worker for dead; register again, the work done so far counts."""

    code = "EVICTED"


class WorkerTaken(WorkError):
    """A live process with another island key holds this worker_id."""

    code = "WORKER_TAKEN"


class TooManyWorkers(WorkError):
    """The run knows as many worker names as it takes; use one that has left."""

    code = "TOO_MANY_WORKERS"


class Fenced(WorkError):
    """A later incarnation of this worker_id has taken over; this process must stop."""

    code = "FENCED"


class LeaseLost(WorkError):
    """The rows of this contribution are not leased to this worker."""

    code = "LEASE_LOST"


class StaleGeneration(WorkError):
    """The message was made in a generation that is over; adopt the present one and repeat it."""

    code = "STALE_GENERATION"

    def __init__(self, message: str | None = None, *, present: int = 0) -> None:
        super().__init__(message)
        self.present = present  # the number to repeat the message with


class AddressUnreachable(WorkError):
    """The coordinator could not connect to the address that a worker advertises."""

    code = "ADDRESS_UNREACHABLE"


class GroupBroken(AtollError):
    """A rank of this island is gone or late; start its group again and it continues."""

    code = "GROUP_BROKEN"


class CoordinatorUnreachable(AtollError):
    """The coordinator does not answer."""

    code = "UNREACHABLE"
    retry = True


def tree(root: type[AtollError]) -> list[type[AtollError]]:
    """`root` and every class below it, each before its own children."""
    return [root, *(leaf for child in root.__subclasses__() for leaf in tree(child))]


def from_code(code: str, message: str) -> AtollError:
    """The error that a peer reported by `code`; an unknown code becomes a plain ProtocolError."""
    for cls in tree(AtollError):
        if cls.code == code:
            return cls(message)
    return ProtocolError(f"{message} (code {code!r})")
