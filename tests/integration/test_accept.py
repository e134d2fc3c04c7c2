"""What happens to a contribution: accepted once, or refused with a code and without a trace."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from atoll.codecs.int8.codec import Int8
from atoll.coordinator.accept import uploads
from atoll.data import base
from atoll.errors import (
    AtollError,
    Conflict,
    ContributionError,
    Fenced,
    FrameError,
    NotFinite,
    StaleContribution,
)
from atoll.layout import Layout
from atoll.ledger.records import LeaseState
from atoll.ledger.tables.contributions import ContributionTable
from atoll.proof import retention
from atoll.protocol.messages import Assignment
from atoll.wire import frame
from tests import clusters
from tests.clusters import DATA_IDENTITY, Cluster, Frame, HandIsland
from tests.frames import ranges
from tests.ledgers import alone

DATASET_ID = base.dataset_id(DATA_IDENTITY)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def undisturbed_digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest after round 1 of a run that nobody disturbed."""
    cluster = Cluster(tmp_path_factory.mktemp("undisturbed"))
    cluster.rounds(1, *cluster.pair())
    cluster.close()
    return cluster.digest


# Retries


def test_contribution_sent_again_gets_the_first_receipt(cluster):
    """A lost reply and a retry must not count twice."""
    a, _ = cluster.pair()
    sent = a.frame()
    first = a.send(sent)
    before = cluster.coordinator.state_hash()

    again = a.send(sent)

    assert again == first
    assert cluster.coordinator.state_hash() == before


def test_contribution_sent_again_counts_once_in_the_weights(cluster, undisturbed_digest):
    """The weights are those of a run in which nothing was lost."""
    a, b = cluster.pair()
    sent = a.frame()
    a.send(sent)
    a.send(sent)
    b.contribute()

    cluster.settle()

    assert cluster.digest == undisturbed_digest
    assert len(alone(cluster.ledger).contributions.of_round(1)) == 2


def test_whole_body_sent_again_gets_the_first_receipt_when_two_streams_raced(cluster, monkeypatch):
    """Both streams passed the first check; the ledger decides."""
    a, _ = cluster.pair()
    sent = a.frame()
    stream = a.begin(sent, sent.data)
    accept = ContributionTable.accept
    others = []

    def accept_after_another(self, contribution):
        others.append(accept(self, replace(contribution, receipt="f" * 64)))
        return accept(self, contribution)

    monkeypatch.setattr(ContributionTable, "accept", accept_after_another)

    again = cluster.coordinator.commit_upload(stream)

    assert [again] == others


def test_retry_after_its_round_closed_with_it_gets_the_first_receipt(cluster):
    """The round moved on, the contribution is still in it."""
    a, b = cluster.pair()
    sent = a.frame()
    first = a.send(sent)
    b.contribute()
    cluster.settle()
    digest = cluster.digest

    again = a.send(sent)

    assert again == first
    assert (cluster.version, cluster.digest) == (1, digest)


def test_retry_by_a_later_incarnation_gets_the_first_receipt(cluster):
    """A restarted island resends the frame its earlier life persisted."""
    a, _ = cluster.pair()
    sent = a.frame()
    first = a.send(sent)
    a.join()

    again = a.send(sent)

    assert again == first


def test_frame_of_an_earlier_incarnation_is_accepted_from_the_later_one(cluster):
    """A death between persist and upload costs nothing."""
    a, _ = cluster.pair()
    sent = a.frame()
    a.join()

    record = a.send(sent)

    assert (record.sha256, record.incarnation) == (sent.sha256, 2)


def test_offset_of_an_accepted_frame_is_its_end(cluster):
    a, _ = cluster.pair()
    sent = a.frame()
    a.send(sent)

    offset = cluster.coordinator.upload_offset(a.request(sent))

    assert offset == sent.nbytes


def test_other_bytes_under_the_same_key_conflict_and_the_first_stand(cluster, undisturbed_digest):
    """What was accepted stays accepted."""
    a, b = cluster.pair()
    a.contribute()
    before = cluster.coordinator.state_hash()
    other = a.header(_planned(a))
    forged = clusters.make_frame(other, bytes(other.payload_bytes))

    with pytest.raises(Conflict, match="the first one stands"):
        a.send(forged)

    assert cluster.coordinator.state_hash() == before
    b.contribute()
    cluster.settle()
    assert cluster.digest == undisturbed_digest


def test_receipt_is_different_for_every_contribution(cluster):
    a, b = cluster.pair()

    receipts = {a.contribute().receipt, b.contribute().receipt}

    assert len(receipts) == 2


# Stale


@pytest.fixture
def late(tmp_path: Path) -> Iterator[tuple[Cluster, HandIsland, Frame]]:
    """A run whose round 1 closed without island c, and c's frame for it."""
    cluster = Cluster(tmp_path, {"membership.quorum": 2, "membership.min_workers": 2})
    a, b, c = cluster.trio()
    sent = c.frame()
    for island in (a, b):
        island.contribute()
    cluster.settle()
    yield cluster, c, sent
    cluster.close()


def test_contribution_to_a_round_closed_without_it_is_stale(late):
    """It is refused by name, and nothing of it stays behind."""
    cluster, c, sent = late
    before = cluster.coordinator.state_hash()

    with pytest.raises(StaleContribution, match="round=2 closed without this contribution"):
        c.send(sent)

    assert cluster.coordinator.state_hash() == before
    assert cluster.drafts() == []


def test_stale_contribution_is_counted_and_shown(late):
    cluster, c, sent = late

    with pytest.raises(StaleContribution):
        c.send(sent)

    assert cluster.coordinator.status().stale_contributions == 1
    assert cluster.coordinator.status().refusals == {"STALE": 1}


def test_rows_of_a_stale_contribution_are_planned_again_once(late):
    """Nothing is lost by a slow island, and nothing is trained twice."""
    cluster, c, _ = late
    [lost] = [x for x in cluster.leases() if x.worker_id == "c" and x.round == 2]
    c.contribute()  # round 3, planned before its rows of round 2 were reopened
    for name in ("a", "b"):
        HandIsland(cluster, name).join().contribute()

    cluster.settle()

    covering = [
        lease
        for lease in cluster.leases()
        if lease.state is not LeaseState.TAKEN and lease.start <= lost.start < lease.stop
    ]
    assert lost.state is LeaseState.REOPENED
    assert [lease.round for lease in covering] == [4]


def test_island_goes_on_with_the_next_round_after_a_stale_one(late):
    _, c, sent = late
    with pytest.raises(StaleContribution):
        c.send(sent)

    record = c.contribute()

    assert record.round == 3


def test_upload_that_the_round_overtakes_is_stale(tmp_path):
    """An upload half on its way when the round closes learns why."""
    cluster = Cluster(tmp_path, {"membership.quorum": 2})
    a, b, c = cluster.trio()
    sent = c.frame()
    stream = c.begin(sent, sent.data[:500])
    cluster.rounds(1, a, b)

    with pytest.raises(StaleContribution):
        cluster.coordinator.write_upload(stream, sent.data[500:])

    assert cluster.drafts() == []


def test_frame_is_stale_from_the_freeze_on_before_a_byte_is_read(tmp_path):
    """Between freeze and publish nobody sends a body in vain."""
    cluster = Cluster(tmp_path, {"membership.quorum": 2})
    a, b, c = cluster.trio()
    sent = c.frame()
    a.contribute()
    b.contribute()
    cluster.freeze()

    with pytest.raises(StaleContribution):
        cluster.coordinator.begin_upload(c.request(sent))

    assert c.assignment().action == "wait"


# Attacks


@dataclass(frozen=True)
class Attack:
    """Something b sends instead of its contribution, and the code it must get."""

    code: str
    send: Callable[[HandIsland, HandIsland], object]
    reads_body: bool = False


def _planned(island: HandIsland):
    """The assignment of an island that may have contributed already."""
    version = island.cluster.version
    return Assignment(
        action="train",
        version=version,
        digest=island.cluster.published_digest,
        round=version + 1,
        ranges=tuple(
            lease.row_range
            for lease in alone(island.cluster.ledger).leases.of_round(version + 1)
            if lease.worker_id == island.name
        ),
    )


def _delta(**at: float) -> torch.Tensor:
    delta = clusters.displacement(clusters.SMALL, "b", 1)
    for place, value in at.items():
        delta[int(place.removeprefix("at"))] = value
    return delta


def _header(**changes) -> Callable[[HandIsland, HandIsland], object]:
    return lambda _, b: b.send(b.frame(**changes))


def _announced(**changes) -> Callable[[HandIsland, HandIsland], object]:
    return lambda _, b: b.send(b.frame(), **changes)


def _with_body(change: Callable[[bytes], bytes]) -> Callable[[HandIsland, HandIsland], object]:
    def send(_: HandIsland, b: HandIsland) -> object:
        sent = b.frame()
        return b.send(sent, body=change(sent.data))

    return send


def _identified(**changes) -> Callable[[HandIsland, HandIsland], object]:
    def send(_: HandIsland, b: HandIsland) -> object:
        sent = b.frame()
        return b.send(sent, identity=b.identity.model_copy(update=changes))

    return send


def _other_layout(*entries: tuple[str, tuple[int, ...]]) -> Callable[..., object]:
    layout = Layout.of((name, shape, "float32") for name, shape in entries)

    def send(_: HandIsland, b: HandIsland) -> object:
        mine = b.header(b.assignment())
        table = tuple((t.name, t.dtype, t.shape) for t in layout.tensors)
        header = replace(
            mine,
            tensors=table,
            layout_digest=layout.digest,
            elements=layout.size,
            payload_bytes=layout.nbytes,
        )
        return b.send(clusters.make_frame(header, bytes(layout.nbytes)))

    return send


def _flip(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def _preamble(change: Callable[[bytes], bytes]) -> Callable[[HandIsland, HandIsland], object]:
    def send(_: HandIsland, b: HandIsland) -> object:
        sent = b.frame()
        return b.send(sent, preamble=change(sent.preamble))

    return send


def _weights_frame(_: HandIsland, b: HandIsland) -> object:
    header = replace(
        b.header(b.assignment()),
        kind="weights",
        worker_id=None,
        incarnation=None,
        base_digest=None,
        result_digest="0" * 64,
        ranges=(),
    )
    return b.send(clusters.make_frame(header, bytes(header.payload_bytes)))


def _other_codec(_: HandIsland, b: HandIsland) -> object:
    header = replace(b.header(b.assignment()), codec="bf16", payload_bytes=clusters.SMALL.size * 2)
    return b.send(clusters.make_frame(header, bytes(header.payload_bytes)))


def _larger_payload(_: HandIsland, b: HandIsland) -> object:
    header = b.header(b.assignment())
    header = replace(header, payload_bytes=header.payload_bytes + 4)
    return b.send(clusters.make_frame(header, bytes(header.payload_bytes)))


OTHER = "f" * 64
HEAD, NORM, EMBEDDING = ("head", (20, 40)), ("norm", (20,)), ("embedding", (40, 20))

ATTACKS = {
    "NaN": Attack("NOT_FINITE", lambda _, b: b.contribute(_delta(at7=float("nan"))), True),
    "+Inf": Attack("NOT_FINITE", lambda _, b: b.contribute(_delta(at0=float("inf"))), True),
    "-Inf last": Attack("NOT_FINITE", lambda _, b: b.contribute(_delta(at1619=-torch.inf)), True),
    "larger than an outer step takes": Attack(
        "CONTRIBUTION", lambda _, b: b.contribute(_delta(at7=3e38)), True
    ),
    "shape transposed": Attack(
        "LAYOUT_MISMATCH", _other_layout(EMBEDDING, NORM, ("head", (40, 20)))
    ),
    "shape broadcastable": Attack(
        "LAYOUT_MISMATCH", _other_layout(EMBEDDING, ("norm", (1,)), HEAD)
    ),
    "tensor missing": Attack("LAYOUT_MISMATCH", _other_layout(EMBEDDING, NORM)),
    "tensor renamed": Attack("LAYOUT_MISMATCH", _other_layout(EMBEDDING, ("Norm", (20,)), HEAD)),
    "tensors reordered": Attack("LAYOUT_MISMATCH", _other_layout(NORM, EMBEDDING, HEAD)),
    "layout digest alone": Attack("LAYOUT_MISMATCH", _header(tensors=None, layout_digest=OTHER)),
    "round in the future": Attack("WRONG_ROUND", _header(round=2)),
    "round far away": Attack("WRONG_ROUND", _header(round=2**40)),
    "round zero": Attack("WRONG_ROUND", _header(round=0)),
    "other base": Attack("WRONG_BASE", _header(base_digest=OTHER)),
    "unknown worker": Attack("UNKNOWN_WORKER", _identified(worker_id="nobody")),
    "incarnation to come": Attack("FENCED", _identified(incarnation=2)),
    "incarnation zero": Attack("FENCED", _identified(incarnation=0)),
    "other island key": Attack("FENCED", _identified(island_key=OTHER)),
    "other manifest": Attack("MANIFEST_MISMATCH", _identified(manifest_sha256=OTHER)),
    "other run": Attack("MANIFEST_MISMATCH", _identified(run_id="another")),
    "frame of another manifest": Attack("MANIFEST_MISMATCH", _header(manifest_sha256=OTHER)),
    "frame of another run": Attack("MANIFEST_MISMATCH", _header(run_id="another")),
    "frame of another worker": Attack("PERMISSION_DENIED", lambda a, b: b.send(a.frame())),
    "frame from the future": Attack("PERMISSION_DENIED", _header(incarnation=2)),
    "weights instead": Attack("PERMISSION_DENIED", _weights_frame),
    "rows of another worker": Attack(
        "LEASE_LOST", _header(ranges=ranges((0, 6), dataset_id=DATASET_ID))
    ),
    "rows never leased": Attack(
        "LEASE_LOST", _header(ranges=ranges((600, 606), dataset_id=DATASET_ID))
    ),
    "fewer rows": Attack("LEASE_LOST", _header(ranges=ranges((6, 11), dataset_id=DATASET_ID))),
    "rows miscounted": Attack("CONTRIBUTION", _header(rows=7)),
    "tokens miscounted": Attack("CONTRIBUTION", _header(tokens=2**40)),
    "weight raised": Attack("CONTRIBUTION", _header(weight=1000)),
    "table left out": Attack("FRAME", _header(tensors=None)),
    "loss below 0": Attack("CONTRIBUTION", _header(loss_sum=-1e-300)),
    "loss of no model": Attack("CONTRIBUTION", _header(loss_sum=1e6 * 24 + 1.0)),
    "loss near the largest float": Attack("CONTRIBUTION", _header(loss_sum=1.7e308)),
    "weight zero": Attack("CONTRIBUTION", _header(weight=0)),
    "other codec": Attack("FRAME", _other_codec),
    "other block": Attack("FRAME", _header(codec="int8_128")),
    "payload larger than the layout": Attack("OVERSIZED", _larger_payload),
    "size announced too large": Attack("OVERSIZED", _announced(nbytes=2**50)),
    "size announced too small": Attack("FRAME", _announced(nbytes=100)),
    "body too long": Attack("OVERSIZED", _with_body(lambda data: data + b"\0"), True),
    "body much too long": Attack("OVERSIZED", _with_body(lambda data: data + data), True),
    "body cut": Attack("FRAME", _with_body(lambda data: data[:-1]), True),
    "body cut in the payload": Attack("FRAME", _with_body(lambda data: data[:2000]), True),
    "body empty": Attack("FRAME", _with_body(lambda _: b"")),
    "bit flipped in the payload": Attack("FRAME", _with_body(lambda d: _flip(d, 3000)), True),
    "bit flipped in the checksum": Attack(
        "FRAME", _with_body(lambda d: _flip(d, len(d) - 1)), True
    ),
    "header other than announced": Attack("FRAME", _with_body(lambda d: _flip(d, 40))),
    "other sha256 announced": Attack("FRAME", _announced(sha256=OTHER), True),
    "resumed where nothing is": Attack("FRAME", _announced(offset=100)),
    "header is noise": Attack("FRAME", _preamble(lambda p: p[:12] + b"{" * (len(p) - 12))),
    "header cut": Attack("FRAME", _preamble(lambda p: p[:-1])),
    "header with a tail": Attack("FRAME", _preamble(lambda p: p + b" ")),
    "magic": Attack("FRAME", _preamble(lambda p: b"GGUF" + p[4:])),
    "version": Attack("VERSION_MISMATCH", _preamble(lambda p: p[:4] + b"\x02\x00" + p[6:])),
    "flag of published weights": Attack("FRAME", _preamble(lambda p: p[:6] + b"\x01\x00" + p[8:])),
}


@pytest.fixture
def attacked(cluster: Cluster) -> tuple[Cluster, HandIsland, HandIsland]:
    return cluster, *cluster.pair()


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
def test_bad_contribution_is_refused_with_its_code_and_leaves_no_trace(
    attacked, attack, undisturbed_digest
):
    """What the header shows is refused before any byte of the body is read."""
    cluster, a, b = attacked
    state, blobs = cluster.coordinator.state_hash(), cluster.blob_names()

    with pytest.raises(AtollError) as refused:
        attack.send(a, b)

    status = cluster.coordinator.status()
    assert (refused.value.code, status.refusals) == (attack.code, {attack.code: 1})
    assert (status.bytes_received > 0) == attack.reads_body
    assert cluster.coordinator.state_hash() == state
    assert cluster.blob_names() == blobs
    assert cluster.drafts() == []
    cluster.rounds(1, a, b)
    assert cluster.digest == undisturbed_digest


def test_fenced_incarnation_contributes_nothing(cluster):
    """A fenced incarnation is the earlier life of an island that was started again."""
    _, b = cluster.pair()
    sent, old = b.frame(), b.identity
    b.join()
    before = cluster.coordinator.state_hash()

    with pytest.raises(Fenced, match="incarnation=1 of worker_id='b' was followed by 2"):
        b.send(sent, identity=old)

    assert cluster.coordinator.state_hash() == before


def test_incarnation_fenced_during_its_upload_contributes_nothing(cluster):
    """The check is repeated when the body is in."""
    _, b = cluster.pair()
    sent = b.frame()
    stream = b.begin(sent, sent.data)
    b.join()
    before = cluster.coordinator.state_hash()

    with pytest.raises(Fenced):
        cluster.coordinator.commit_upload(stream)

    assert cluster.coordinator.state_hash() == before
    assert cluster.drafts() == []


def test_loss_at_either_end_of_its_bound_is_accepted(cluster):
    """The control: 0, and 1e6 for each of the 24 tokens."""
    a, b = cluster.pair()

    assert a.send(a.frame(loss_sum=0.0)).loss_sum == 0.0
    assert b.send(b.frame(loss_sum=1e6 * 24)).loss_sum == 2.4e7


# The layout has 1620 values: 7 blocks of 256, the last one short, then their levels.
SCALES = 4 * 7


@pytest.mark.parametrize(
    ("codec", "change", "rule"),
    [
        ("int8", lambda p: p[:SCALES] + b"\x80" + p[SCALES + 1 :], "level -128"),
        ("int8", lambda p: p[:-1] + b"\x80", "level -128"),
        ("int8", lambda p: p[:3] + bytes([p[3] | 0x80]) + p[4:], "scale below 0"),
        (
            "int8",
            lambda p: p[: SCALES - 1] + bytes([p[SCALES - 1] | 0x80]) + p[SCALES:],
            "scale below 0",
        ),
        ("int4", lambda p: p[:-1] + bytes([p[-1] & 15 | 0x80]), "level -8"),
        ("int4", lambda p: p[:-1] + bytes([p[-1] & 0xF0 | 8]), "level -8"),
        ("int4", lambda p: p[:3] + bytes([p[3] | 0x80]) + p[4:], "scale below 0"),
        ("sign", lambda p: p[:3] + bytes([p[3] | 0x80]) + p[4:], "scale below 0"),
    ],
)
def test_payload_in_a_spelling_that_no_encoder_writes_is_refused_and_leaves_no_trace(
    tmp_path, codec, change, rule
):
    cluster = Cluster(tmp_path, {"upload.codec": codec})
    _, b = cluster.pair()
    header = b.header(b.assignment())
    payload = b.frame().data[-32 - header.payload_bytes : -32]
    bad = clusters.make_frame(header, change(payload))
    state = cluster.coordinator.state_hash()

    with pytest.raises(FrameError, match=rule):
        b.send(bad)

    assert cluster.coordinator.state_hash() == state
    assert cluster.drafts() == []
    b.send(clusters.make_frame(header, payload))  # the control: the same bytes unchanged
    cluster.close()


def test_spelling_that_was_accepted_once_is_folded_as_it_was():
    """Stricter rules of accepting change no replay: what decodes has decoded before."""
    payload = torch.tensor([0, 0, 128, 191, 128, 127], dtype=torch.uint8)  # -1.0; -128, 127

    assert Int8(256).decode(payload, 2).tolist() == [128.0, -127.0]
    with pytest.raises(FrameError, match="scale below 0"):
        Int8(256).check_spelling(payload, 2)


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4", "sign", "topk"])
def test_nan_is_refused_in_every_codec(tmp_path, codec):
    """Codecs without a NaN of their own have a scale that can be one."""
    cluster = Cluster(tmp_path, {"upload.codec": codec})
    _, b = cluster.pair()
    delta = _delta(at7=float("nan"))

    with pytest.raises(NotFinite):
        b.contribute(delta)

    assert alone(cluster.ledger).contributions.of_round(1) == []


def test_weight_of_a_contribution_is_its_tokens_when_the_run_weighs_by_tokens(tmp_path):
    cluster = Cluster(tmp_path, {"weighting": "tokens"})
    a, b = cluster.pair()

    record = a.contribute()

    assert record.weight == record.tokens == record.rows * clusters.BLOCK == 24
    with pytest.raises(AtollError) as refused:
        b.send(b.frame(weight=1))
    assert refused.value.code == "CONTRIBUTION"


def test_weight_counts_no_tokens_that_earlier_contributions_have_counted(tmp_path):
    """A `first` before its round claims the rows of rounds that have been folded already."""
    cluster = Cluster(tmp_path, {"weighting": "tokens"})
    a, b = cluster.pair()
    cluster.rounds(2, a, b)

    with pytest.raises(ContributionError, match="first=1 of the contribution to round 3"):
        a.send(a.frame(first=1, weight=3 * 24))

    assert a.contribute().weight == 24


def test_norm_of_a_contribution_is_recorded(cluster):
    a, _ = cluster.pair()
    delta = clusters.displacement(cluster.layout, "a", 1)

    record = a.contribute(delta)

    assert record.norm == pytest.approx(torch.linalg.vector_norm(delta.double()).item(), rel=1e-6)


# Streams


def test_broken_upload_resumes_at_its_offset(cluster, undisturbed_digest):
    a, b = cluster.pair()
    sent = a.frame()
    a.begin(sent, sent.data[:3000])
    offset = cluster.coordinator.upload_offset(a.request(sent))

    second = a.begin(sent, sent.data[offset:], offset=offset)
    cluster.coordinator.commit_upload(second)

    assert offset == 3000
    b.contribute()
    cluster.settle()
    assert cluster.digest == undisturbed_digest


def test_stream_that_was_followed_by_another_may_not_write(cluster):
    a, _ = cluster.pair()
    sent = a.frame()
    stream = a.begin(sent, sent.data[:3000])
    later = a.begin(sent, offset=3000)

    with pytest.raises(FrameError, match="a later stream"):
        cluster.coordinator.write_upload(stream, sent.data[3000:])

    cluster.coordinator.write_upload(later, sent.data[3000:])
    assert cluster.coordinator.commit_upload(later).sha256 == sent.sha256


@pytest.mark.parametrize("refused", ["write_upload", "commit_upload"])
def test_earlier_of_two_streams_that_resume_at_the_same_offset_is_refused(cluster, refused):
    """Both hold their stream before either writes: the number is bound where it is given out."""
    a, _ = cluster.pair()
    sent = a.frame()
    a.begin(sent, sent.data[:3000])
    earlier, later = (a.begin(sent, offset=3000) for _ in range(2))
    message = {"write_upload": (earlier, sent.data[3000:]), "commit_upload": (earlier,)}[refused]

    with pytest.raises(FrameError, match="a later stream"):
        getattr(cluster.coordinator, refused)(*message)

    cluster.coordinator.write_upload(later, sent.data[3000:])
    assert cluster.coordinator.commit_upload(later).sha256 == sent.sha256


def test_upload_from_the_start_replaces_the_one_under_way(cluster):
    a, _ = cluster.pair()
    sent = a.frame()
    a.begin(sent, sent.data[:3000])

    record = a.send(sent)

    assert record.sha256 == sent.sha256
    assert cluster.drafts() == []


def test_upload_that_cannot_be_checked_leaves_no_draft(cluster, monkeypatch):
    a, _ = cluster.pair()
    sent = a.frame()

    def refused(*_: object) -> None:
        raise MemoryError("no room for a tile")

    with monkeypatch.context() as patch:
        patch.setattr(uploads, "PayloadCheck", refused)
        with pytest.raises(MemoryError):
            a.begin(sent)

    assert cluster.drafts() == []
    assert a.send(sent).sha256 == sent.sha256


def test_upload_resumes_only_where_it_stands(cluster):
    a, _ = cluster.pair()
    sent = a.frame()
    a.begin(sent, sent.data[:3000])

    with pytest.raises(FrameError, match="offset=2000 is not where"):
        cluster.coordinator.begin_upload(a.request(sent, offset=2000))

    assert cluster.coordinator.upload_offset(a.request(sent)) == 3000


def test_replaced_upload_is_dropped_only_after_its_running_write(cluster):
    """A closed file's number may belong to another file by the time a late write uses it."""
    a, _ = cluster.pair()
    sent = a.frame()
    stream = a.begin(sent)
    dropped = threading.Event()

    def replace_it() -> None:
        cluster.coordinator.begin_upload(a.request(sent))
        dropped.set()

    replacing = threading.Thread(target=replace_it)

    with stream.upload.lock:  # as a write of the earlier stream holds it
        replacing.start()
        was_dropped = dropped.wait(0.05)
    replacing.join()

    assert not was_dropped
    assert dropped.is_set()


def test_blob_of_a_refused_commit_is_garbage_that_pruning_removes(cluster):
    """The ledger refused what was already stored: nothing references it."""
    _, b = cluster.pair()
    sent = b.frame()
    stream = b.begin(sent, sent.data)
    ledger = alone(cluster.ledger)
    ledger.members.register("b", ledger.members.workers()[1].key_sha256, wall=0.0)
    with pytest.raises(Fenced):
        cluster.coordinator.commit_upload(stream)
    assert sent.sha256 in cluster.blob_names()

    removed = retention.prune(cluster.ledger, cluster.blobs, cluster.manifest.storage)

    assert removed == 1
    assert sent.sha256 not in cluster.blob_names()


def test_announced_size_is_what_the_frame_takes(cluster):
    a, _ = cluster.pair()

    sent = a.frame()

    header, _ = frame.parse_preamble(sent.preamble)
    assert sent.nbytes == frame.frame_bytes(header)
