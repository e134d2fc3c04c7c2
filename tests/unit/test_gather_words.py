"""The reasons for which a peer is skipped, and the error that carries one."""

from atoll import errors
from atoll.errors import AtollError
from atoll.gather.words import Reason, Skip

# They stand in results and metrics: changing one changes what a run says of its past.
PEERS = {
    "MISSING", "LATE", "SLOW", "SIZE", "SIGNATURE", "STATEMENT", "FRAME", "INDICES", "TABLE",
    "NORM", "CHANGED", "CONFLICT", "COPY",
}  # fmt: skip
OURS = {"SERVER_AWAY", "DISK_FULL", "DEADLINE"}


def test_reasons_are_the_released_words_with_their_fault():
    assert {str(reason) for reason in Reason if reason.fault == "peer"} == PEERS
    assert {str(reason) for reason in Reason if reason.fault == "ours"} == OURS


def test_skip_carries_its_reason_and_reads_as_its_sentence():
    skip = Skip(Reason.SIZE, "the object of 'b' has 3 bytes, 82 were stated")

    assert (skip.reason, skip.sentence) == (Reason.SIZE, str(skip))


def test_skip_told_to_another_process_is_a_plain_error_with_its_sentence():
    back = errors.from_code(Skip(Reason.SIZE, "too large").code, "too large")

    assert type(back) is AtollError
    assert str(back) == "too large"
