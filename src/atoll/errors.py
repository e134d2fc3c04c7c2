"""Every failure Atoll names, as one tree.

    AtollError
      ConfigError                 a run file, flag or argument; NotSummed
      AuthError                   Unauthenticated, Forbidden
      ProtocolError               FrameError, VersionMismatch, ContributionError,
                                  ManifestMismatch (DatasetMismatch)
      StoreError                  BlobMissing, BlobChanged, ObjectMissing, ObjectChanged,
                                  ObjectSize, ObjectRefused, StorageFull (Exhausted), StoreAway,
                                  StoreLate, DiskFailed, LedgerVersion, StateHeld, StateUnsafe,
                                  Superseded,
                                  StateDamaged
      RoundError                  NotReady, WrongRound, StaleContribution (LeftOut), Conflict,
                                  EmptySum, Diverged
      WorkError                   UnknownWorker (Evicted), WorkerTaken, TooManyWorkers, Fenced,
                                  LeaseLost, StaleGeneration, MissingRanks, AddressUnreachable
      GroupBroken                 a rank of this island is gone or late
      RanksFailed                 a rank of a check raised, died or was late
      GradientsWrong              a check of gradients has not come out right
      CoordinatorUnreachable      the network, a dead or restarting coordinator; Accident

`code` is stable and crosses the wire; `retry` tells the sender whether the same message can succeed
later; where the sender met the error on its own machine it is set to False. Statuses of HTTP and
gRPC are assigned in `wire/statuses.py`, never here.
"""

from collections.abc import Sequence
from typing import ClassVar


class AtollError(Exception):
    """Something Atoll refuses; the subclass and its code say what."""

    code: ClassVar[str] = "ATOLL"
    retry: bool = False

    def __init_subclass__(cls, *, code: str | None, retry: bool = False) -> None:
        """`code=None`: never sent by this name; whoever is told of it learns the class above."""
        super().__init_subclass__()
        cls.code, cls.retry = code or cls.code, retry

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or "").strip())


class ConfigError(AtollError, code="CONFIG"):
    """A setting breaks its rule."""


class NotSummed(ConfigError, code="NOT_SUMMED"):
    """Gradients do not cross ranks as their plain sum."""


class AuthError(AtollError, code="AUTH"):
    """A credential does not open this door."""


class Unauthenticated(AuthError, code="UNAUTHENTICATED"):
    """The request carries no known bearer token; use the one that `atoll serve` printed."""


class Forbidden(AuthError, code="PERMISSION_DENIED"):
    """The token's role does not allow this call."""


class ProtocolError(AtollError, code="PROTOCOL"):
    """A message breaks the protocol."""


class FrameError(ProtocolError, code="FRAME"):
    """A frame is damaged or not what its header says."""


class FrameTooLarge(FrameError, code="OVERSIZED"):
    """A frame or body is larger than what the run's layout and codec allow."""


class VersionMismatch(ProtocolError, code="VERSION_MISMATCH"):
    """The two sides speak different versions."""


class ManifestMismatch(ProtocolError, code="MANIFEST_MISMATCH"):
    """The message was made under another run or manifest."""


class DatasetMismatch(ManifestMismatch, code="DATASET_MISMATCH"):
    """A dataset is known by another length."""


class ContributionError(ProtocolError, code="CONTRIBUTION"):
    """A contribution's values break the run's rules."""


class LayoutMismatch(ContributionError, code="LAYOUT_MISMATCH"):
    """Names, shapes or dtypes differ from the run's layout."""


class NotFinite(ContributionError, code="NOT_FINITE"):
    """A contribution holds NaN or infinity."""


class WrongBase(ContributionError, code="WRONG_BASE"):
    """A contribution was computed from other weights than the published ones."""


class StoreError(AtollError, code="STORE"):
    """Durable state could not be read or written."""


class BlobMissing(StoreError, code="BLOB_MISSING"):
    """No blob of that name is stored."""


class BlobChanged(StoreError, code="BLOB_CHANGED"):
    """A stored blob's bytes no longer match its name."""


class ObjectMissing(StoreError, code="OBJECT_MISSING"):
    """A bucket has no object of that key."""


class ObjectChanged(StoreError, code="OBJECT_CHANGED"):
    """An object of a bucket is another one than was looked up."""


class ObjectSize(StoreError, code="OBJECT_SIZE"):
    """A bucket's server sent more or fewer bytes than were asked for."""


class ObjectRefused(StoreError, code="OBJECT_REFUSED"):
    """A bucket's server refuses a request or points elsewhere; asking again does not help."""


class StorageFull(StoreError, code="STORAGE_FULL", retry=True):
    """The disk has no room for this upload; free some and the sender's retry will pass."""


class Exhausted(StorageFull, code="EXHAUSTED", retry=True):
    """No more files can be opened, or there is no memory for one; the same call passes later."""

    # Waited for like room on a disk: nothing is damaged and nothing was recorded.


class StoreAway(StoreError, code="STORE_AWAY", retry=True):
    """The server that keeps the ledger or the blobs does not answer; nothing can be recorded."""

    # Retried by the islands: once the server, and with it the coordinator, is back.


class StoreLate(StoreError, code="STORE_LATE"):
    """A bucket's server had not sent everything at the deadline; the request was cancelled."""


class DiskFailed(StoreError, code="DISK_FAILED", retry=True):
    """A disk did not confirm what was written; the process that met this stops and starts again."""

    # Retried by a sender, once the coordinator is back; a sync is never repeated.


class LedgerVersion(StoreError, code="LEDGER_VERSION"):
    """The ledger's tables are of another release than this program's."""


class StateHeld(StoreError, code="STATE_HELD"):
    """Another process holds this state directory."""


class StateUnsafe(StoreError, code="STATE_UNSAFE"):
    """A state directory is another user's, open to others, or holds a link."""


class Superseded(StoreError, code="SUPERSEDED", retry=True):
    """Another coordinator has taken this ledger over; this one writes nothing more and stops."""

    # Retried by the islands: the new coordinator may take what this one refuses.


class StateDamaged(StoreError, code="STATE_DAMAGED"):
    """What the ledger says and what is stored disagree."""


class RoundError(AtollError, code="ROUND"):
    """A round does not take this now."""


class NotReady(RoundError, code="NOT_READY", retry=True):
    """The coordinator cannot answer this yet."""


class WrongRound(RoundError, code="WRONG_ROUND"):
    """The message names a round that is not open."""


class StaleContribution(RoundError, code="STALE"):
    """The round closed without this contribution; its rows are open again."""


class LeftOut(StaleContribution, code="LEFT_OUT"):
    """The round goes on without this contribution, which is not what it must be."""


class Conflict(RoundError, code="CONFLICT"):
    """Other bytes were accepted under the same key before."""


class EmptySum(RoundError, code="EMPTY_SUM"):
    """No contribution was accepted; the model is unchanged."""


class Diverged(RoundError, code="DIVERGED"):
    """The outer step gives NaN or infinity; nothing of it was published."""


class WorkError(AtollError, code="WORK"):
    """A worker may not do this."""


class UnknownWorker(WorkError, code="UNKNOWN_WORKER"):
    """The coordinator does not know this worker_id; register first."""


class Evicted(UnknownWorker, code="EVICTED"):
    """The coordinator took this worker for dead; register again, the work done so far counts."""


class WorkerTaken(WorkError, code="WORKER_TAKEN"):
    """A live process with another island key holds this worker_id."""


class TooManyWorkers(WorkError, code="TOO_MANY_WORKERS"):
    """The run knows as many worker names as it takes; use one that has left."""


class Fenced(WorkError, code="FENCED"):
    """A later incarnation of this worker_id has taken over; this process must stop."""


class LeaseLost(WorkError, code="LEASE_LOST"):
    """The rows of this contribution are not leased to this worker."""


class StaleGeneration(WorkError, code="STALE_GENERATION"):
    """The message was made in a generation that is over; adopt the present one and repeat it."""

    def __init__(self, message: str | None = None, *, present: int = 0) -> None:
        super().__init__(message)
        self.present = present  # the number to repeat the message with


class StaleGroup(WorkError, code="STALE_GROUP"):
    """The rank group that the message is of is over, or the sender is not in it; ask for one."""


class MissingRanks(WorkError, code="MISSING_RANKS"):
    """Values of other ranks did not come in time; the step is given up and nothing is filled in."""

    def __init__(self, message: str | None = None, *, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class AddressUnreachable(WorkError, code="ADDRESS_UNREACHABLE"):
    """The coordinator could not connect to the address that a worker advertises."""


class GroupBroken(AtollError, code="GROUP_BROKEN"):
    """A rank of this island is gone or late; start its group again and it continues."""


class RanksFailed(AtollError, code=None):
    """A rank that this process started raised, died or was late; all of its group are ended."""


class GradientsWrong(AtollError, code=None):
    """The gradients of ranks are not those of one process, or nothing proves that they are."""


class CoordinatorUnreachable(AtollError, code="UNREACHABLE", retry=True):
    """The coordinator does not answer."""


class Accident(CoordinatorUnreachable, code="INTERNAL", retry=True):
    """The coordinator met an error of its own; its log says which; send the message again."""

    # Stands for an exception that nobody expected, whose text stays in the log.


def tree(root: type[AtollError]) -> list[type[AtollError]]:
    """`root` and every class below it that has a code, each before its own children."""
    coded = [child for child in root.__subclasses__() if child.code != root.code]
    return [root, *(leaf for child in coded for leaf in tree(child))]


def from_code(code: str, message: str) -> AtollError:
    """The error that a peer reported by `code`; an unknown code becomes a plain ProtocolError."""
    for cls in tree(AtollError):
        if cls.code == code:
            return cls(message)
    return ProtocolError(f"{message} (code {code!r})")
