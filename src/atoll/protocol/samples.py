"""Telemetry in batches: what an island measured, kept for people and never used for the model."""

from typing import Annotated

from pydantic import Field

from atoll.protocol.exchange import Ask, Route
from atoll.protocol.fields import AtMost, Message, Natural, NotNegative, Number, OfQuery, Whole
from atoll.protocol.messages import Done, Identity

MAX_BATCH = 256
MAX_PAGE = 1_000
_BATCH_BYTES = 96 << 10  # the longest sample has 342, of which a batch has at most 256


class Sample(Message):
    """One moment of an island; `sequence` counts from 1 in each process, a gap was dropped."""

    sequence: Natural
    wall: NotNegative  # by the island's clock
    round: Whole
    step: Whole
    loss: Number | None = None
    tokens_per_second: NotNegative = 0.0
    memory_bytes: Whole = 0
    sent_per_second: NotNegative = 0.0
    received_per_second: NotNegative = 0.0


class SamplesRequest(
    Ask[Done],
    route=Route("POST", "/workers/{worker_id}/samples", leader_alone=True, body_bytes=_BATCH_BYTES),
):
    """Samples in order; one that came before is known by life and sequence and not kept twice.

    `life` is the incarnation under which the process first handed samples in. It stays when the
    process registers again, so that a batch whose answer was lost is known afterwards too.
    """

    identity: Identity
    life: Natural
    samples: Annotated[tuple[Sample, ...], AtMost(MAX_BATCH)]


class StoredSample(Sample):
    """A sample with whose it is and its place in the history."""

    position: Whole
    worker_id: str
    incarnation: Whole  # the life of the request that brought it


class SampleHistory(Message):
    """Samples after the position that was asked for, and where the next page starts."""

    samples: tuple[StoredSample, ...]
    after: Whole
    kept: Whole
    limit: Whole  # how many are kept at most


class HistoryRequest(Ask[SampleHistory], route=Route("GET", "/metrics/history", large=True)):
    """A page of the samples that are kept, of one worker or of all."""

    worker_id: Annotated[str, Field(max_length=64)] | None = None
    after: Annotated[Whole, OfQuery] = 0
    limit: Annotated[int, Field(strict=True, ge=1, le=MAX_PAGE), OfQuery] = MAX_PAGE
