"""Messages of a gather run: what lies in whose bucket, and what a round took of it.

An island publishes its contribution into a bucket of the run and announces it; the coordinator
pulls it from there. Where an island publishes follows from the run and its name, never from what it
says.
"""

import base64
import binascii
from collections.abc import Iterable
from typing import Annotated

from pydantic import Field, field_validator

from atoll import canonical
from atoll.protocol.exchange import Ask, Route, Waiting
from atoll.protocol.fields import Message, Whole, WorkerName
from atoll.protocol.manifest import Sha256, Word
from atoll.protocol.messages import Identity, PublicKey
from atoll.rows import RowRange

MAX_STATEMENT = 4096
# Base64 of the longest preamble of a frame, which the schema refuses before it is decoded.
MAX_PREAMBLE = 4 * ((12 + (64 << 10)) // 3 + 1)
MAX_PEERS = 10_000
_ANNOUNCED_BYTES = 128 << 10  # a preamble and a statement, each letter of which may be escaped


def prefix_of(run_id: str, worker_id: str) -> str:
    """The folder of a worker in its bucket; a key of every bucket, whatever the names are."""
    return f"run-{run_id}/{worker_id}"


def sample_digest(ranges: Iterable[RowRange]) -> str:
    """What a statement says of the rows that a contribution was trained on."""
    return canonical.sha256([[rows.dataset_id, rows.start, rows.stop] for rows in ranges])


class AnnounceReply(Message):
    """`receipt` once the contribution is accepted; without one, announce again.

    `waits_for` says why there is none yet: a reserve that is not needed, no free place to pull it
    with, or a bucket that does not answer.
    """

    receipt: str = ""
    waits_for: str = ""


class AnnounceRequest(
    Waiting[AnnounceReply],
    route=Route("POST", "/workers/{worker_id}/announcement", body_bytes=_ANNOUNCED_BYTES),
):
    """The sender's contribution lies in its bucket: the header of its frame, and its statement.

    The answer comes when the coordinator has pulled and accepted it, up to `wait_seconds` later or
    after the pull that is under way by then. LEFT_OUT and STALE say that the round goes on without
    it: its rows are open again, and the sender goes on with the next assignment.
    """

    identity: Identity
    preamble: Annotated[str, Field(max_length=MAX_PREAMBLE)]  # base64, as `of` writes it
    sha256: Sha256  # of the whole frame
    nbytes: Whole
    statement: Annotated[str, Field(max_length=MAX_STATEMENT)]  # the signed document

    @field_validator("preamble")
    @classmethod
    def _is_base64(cls, value: str) -> str:
        try:
            base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError) as exc:
            raise ValueError(f"preamble is not base64 ({exc})") from exc
        return value

    @classmethod
    def of(
        cls,
        identity: Identity,
        *,
        preamble: bytes,
        sha256: str,
        nbytes: int,
        statement: bytes,
        wait_seconds: float = 0.0,
    ) -> "AnnounceRequest":
        """The announcement of a frame that begins with `preamble`."""
        return cls(
            identity=identity,
            preamble=base64.b64encode(preamble).decode("ascii"),
            sha256=sha256,
            nbytes=nbytes,
            statement=statement.decode("ascii"),
            wait_seconds=wait_seconds,
        )

    def preamble_bytes(self) -> bytes:
        """The first bytes of the frame, up to its payload."""
        return base64.b64decode(self.preamble)

    def document(self) -> bytes:
        """The statement as it was signed; what is not ASCII is no statement, and no error here."""
        return self.statement.encode("utf-8", "replace")

    def is_answered(self, reply: AnnounceReply) -> bool:
        """Whether the contribution is in."""
        return bool(reply.receipt)


class GatheredPeer(Message):
    """One contribution of a round, and where its island published it."""

    worker_id: WorkerName
    key: PublicKey
    bucket: Word
    sha256: Sha256
    nbytes: Whole
    weight: Whole


class WindowReply(Message):
    """What a published round folded, by worker_id: every one of them, and no other."""

    round: Whole
    base_digest: Sha256  # of the published weights before it
    result_digest: Sha256  # and after it
    peers: Annotated[tuple[GatheredPeer, ...], Field(max_length=MAX_PEERS)]


class WindowRequest(Ask[WindowReply], route=Route("POST", "/windows/{round}", large=True)):
    """What did a round fold? WRONG_ROUND for one that is not published."""

    identity: Identity
    round: Whole
