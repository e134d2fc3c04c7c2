"""Parts of a sharded run's checkpoint on their way into the store and out of it."""

import threading

import pytest

from atoll.errors import (
    BlobMissing,
    ContributionError,
    FrameError,
    FrameTooLarge,
    ProtocolError,
    StaleGroup,
    WrongRound,
)
from atoll.proof import retention
from atoll.protocol.messages import Identity
from tests.hand_ranks import (
    Sea,
)

# Uploads of parts


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"group": 2}, StaleGroup, "group=2 is over"),
        ({"round": 2}, WrongRound, "round=2 of the part is not the one whose checkpoint comes"),
        ({"nbytes": 11}, FrameTooLarge, "nbytes=11 of the part of rank 0 in group 3"),
        ({"offset": 7}, FrameError, "offset=7 is not where an upload of this part stands"),
    ],
)
def test_part_that_is_not_wanted_is_refused_before_its_body(sea, trio, changes, error, says):
    with pytest.raises(error, match=says):
        sea.coordinator.begin_part(trio[0].request(1, **changes))

    assert list((sea.home / "blobs" / "tmp").iterdir()) == []


def test_broken_upload_resumes_where_it_was_and_the_older_stream_may_not_write(sea, trio):
    a, *_ = trio
    data, request = a.part(6), a.request(1)
    broken = sea.coordinator.begin_part(request)
    sea.coordinator.write_part(broken, data[:100])
    sea.ranks("d")  # a new generation in between

    assert sea.coordinator.part_offset(a.request(1)) == 100
    stream = sea.coordinator.begin_part(a.request(1, offset=100))
    with pytest.raises(FrameError, match="a later stream of this part has taken over"):
        sea.coordinator.write_part(broken, b"x")
    sea.coordinator.write_part(stream, data[100:])
    sea.coordinator.commit_part(stream)

    assert sea.coordinator.part_offset(a.request(1)) == len(data)
    assert sea.coordinator.begin_part(a.request(1)) is None
    assert sea.coordinator.checkpoints.uploads.in_flight() == {request.sha256}


def test_part_whose_group_ended_on_the_way_is_no_blob(sea, trio):
    sea.trained(trio, 1, upload=False)
    request = trio[0].request(1)
    stream = sea.coordinator.begin_part(request)
    sea.coordinator.write_part(stream, trio[0].part(6))
    trio[2].leave()

    with pytest.raises(StaleGroup):
        sea.coordinator.commit_part(stream)

    assert request.sha256 not in {ref.sha256 for ref in sea.blobs.stored()}
    assert sea.coordinator.checkpoints.uploads.in_flight() == frozenset()


def test_part_with_other_bytes_than_announced_is_dropped(sea, trio):
    a, *_ = trio
    data = bytearray(a.part(6))
    data[-1] ^= 1
    stream = sea.coordinator.begin_part(a.request(1))
    sea.coordinator.write_part(stream, bytes(data))

    with pytest.raises(FrameError, match="the part's sha256 is"):
        sea.coordinator.commit_part(stream)

    assert sea.coordinator.part_offset(a.request(1)) == 0
    a.save(6)
    with pytest.raises(BlobMissing, match="is not here; upload the part first"):
        a.tell_part(1)


def test_part_that_is_longer_than_announced_is_dropped(sea, trio):
    a, *_ = trio
    stream = sea.coordinator.begin_part(a.request(1))
    sea.coordinator.write_part(stream, a.part(6))

    with pytest.raises(FrameTooLarge, match="longer than the announced"):
        sea.coordinator.write_part(stream, b"x")

    assert list((sea.home / "blobs" / "tmp").iterdir()) == []


def test_part_of_a_step_that_does_not_end_the_round_is_refused(sea, trio):
    a, *_ = trio
    a.upload(1)
    before = sea.state_hash()

    with pytest.raises(WrongRound, match="step=3 of the part is not the last of round 1, 6"):
        a.tell_part(1, step=3)

    assert sea.state_hash() == before


# Ranges of blobs


def test_only_initial_weights_and_kept_checkpoints_can_be_fetched(sea, trio):
    a, *_ = trio
    a.upload(1)
    uploaded = a.request(1).sha256
    with pytest.raises(BlobMissing, match="neither the initial weights nor part of a checkpoint"):
        sea.coordinator.fetch(a.identity, uploaded, 0, 1)
    sea.trained(trio, 1)
    sea.settle()

    with sea.coordinator.fetch(a.identity, uploaded, 4, 8) as reader:
        assert reader.read(4, 8) == a.part(6)[4:12]
    with pytest.raises(ProtocolError, match="a range lies inside"):
        sea.coordinator.fetch(a.identity, uploaded, len(a.part(6)) - 3, 4)


def test_stranger_fetches_nothing(sea, trio):
    a, *_ = trio
    known = a.identity.model_dump()
    stranger = Identity(**{**known, "island_key": "9" * 64})

    with pytest.raises(Exception, match="belongs to another island key"):
        sea.coordinator.fetch(stranger, sea.coordinator.run.initial_sha256, 0, 1)


# What a rank tells with its part


def test_part_that_is_not_the_senders_save_is_refused_and_changes_nothing(sea, trio):
    sea.trained(trio, 1, upload=False)
    a, b, _ = trio
    a.upload(1)
    before = sea.state_hash()

    with pytest.raises(ContributionError, match=r"part='ffff.* of 'a' is not its save of step 6"):
        a.tell_part(1, part="f" * 64)
    with pytest.raises(ContributionError, match="of 'a' is not its save of step 6"):
        a.tell_part(1, part=b.root(6))  # another's

    assert sea.state_hash() == before
    assert not a.tell_part(1).committed


def test_part_whose_save_was_not_reported_is_refused(sea, trio):
    a, *_ = trio
    a.save(3)
    a.upload(1)

    with pytest.raises(ContributionError, match=r"step 6, which was not reported; report the save"):
        a.tell_part(1)


@pytest.mark.parametrize("tokens", [119, 121])
def test_other_tokens_than_the_leased_rows_hold_are_refused(sea, trio, tokens):
    sea.trained(trio, 1, upload=False)
    a, *_ = trio
    a.upload(1)
    before = sea.state_hash()

    refusal = rf"tokens={tokens} of 'a' for round 1, .* hold 120"
    with pytest.raises(ContributionError, match=refusal):
        a.tell_part(1, tokens=tokens)

    assert sea.state_hash() == before
    a.tell_part(1, tokens=120)


@pytest.mark.parametrize(
    "odd",
    [
        {"loss_sum": -1e-9},
        {"loss_sum": 1e6 * 120 + 1.0},
        {"evaluation_loss": -1.0},
        {"evaluation_loss": 1.0, "evaluation_tokens": 0},
    ],
)
def test_part_with_a_loss_that_no_model_has_is_refused(sea, trio, odd):
    a, *_ = trio
    a.save(3)
    a.save(6)
    before = sea.coordinator.state_hash()

    with pytest.raises(ContributionError, match="for each token"):
        a.tell_part(1, **odd)

    assert sea.coordinator.state_hash() == before


# Parts that are stored already


def test_part_that_a_rank_was_told_is_stored_is_not_swept(sea, trio):
    """It came in with an earlier life of the coordinator, which did not live to hear of it."""
    sea.trained(trio, 1, upload=False)
    a, *_ = trio
    a.upload(1)
    sea.restart()
    request = a.request(1)

    assert sea.coordinator.part_offset(request) == request.nbytes
    sweep(sea)

    assert not a.tell_part(1).committed
    assert request.sha256 in {ref.sha256 for ref in sea.blobs.stored()}


def test_part_that_nobody_was_told_of_is_swept(sea, trio):
    sea.trained(trio, 1, upload=False)
    a, *_ = trio
    a.upload(1)
    sea.restart()
    sweep(sea)

    assert sea.coordinator.part_offset(a.request(1)) == 0
    assert sea.coordinator.checkpoints.uploads.in_flight() == frozenset()


def test_nobody_is_told_that_a_part_is_stored_while_it_is_being_swept(sea, trio):
    sea.trained(trio, 1, upload=False)
    a, *_ = trio
    a.upload(1)
    sea.restart()
    request, told = a.request(1), []
    asking = threading.Thread(target=lambda: told.append(sea.coordinator.part_offset(request)))
    with sea.coordinator.checkpoints.uploads.sweeping():
        asking.start()
        asking.join(0.1)
        assert told == []
        sea.blobs.delete(request.sha256)
    asking.join()

    assert told == [0]


def sweep(sea: Sea) -> None:
    """As after a checkpoint."""
    uploads = sea.coordinator.checkpoints.uploads
    with uploads.sweeping():
        retention.prune(sea.ledger, sea.blobs, sea.manifest.storage, in_flight=uploads.in_flight)
