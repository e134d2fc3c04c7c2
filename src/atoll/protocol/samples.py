"""Telemetry in batches: what an island measured, kept for people and never used for the model."""

from typing import Annotated

from pydantic import Field

from atoll.protocol.message import Message, NotNegative, Number, Whole
from atoll.protocol.messages import Identity

MAX_BATCH = 256
MAX_PAGE = 10_000


class Sample(Message):
    """One moment of an island; `sequence` counts from 1 in each incarnation."""

    sequence: Annotated[int, Field(ge=1, le=2**53)]
    wall: NotNegative  # by the island's clock
    round: Whole
    step: Whole
    loss: Number | None = None
    tokens_per_second: NotNegative = 0.0
    memory_bytes: Whole = 0
    sent_per_second: NotNegative = 0.0
    received_per_second: NotNegative = 0.0


class SamplesRequest(Message):
    """Samples in order; one that came before is known by its sequence and not kept twice."""

    identity: Identity
    samples: Annotated[tuple[Sample, ...], Field(max_length=MAX_BATCH)]
    dropped: Whole = 0  # lost on the island since it started, because its queue was full


class StoredSample(Sample):
    """A sample with whose it is and its place in the history."""

    position: Whole
    worker_id: str
    incarnation: Whole


class SampleHistory(Message):
    """Samples after the position that was asked for, and where the next page starts."""

    samples: tuple[StoredSample, ...]
    after: Whole
    kept: Whole
    limit: Whole  # how many are kept at most
