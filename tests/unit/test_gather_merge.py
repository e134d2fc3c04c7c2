"""Partials of any number of ranks, in any order, with duplicates: one result, the same bits."""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll import canonical
from atoll.codecs.topk.chunks import CHUNK
from atoll.codecs.topk.codec import TopK
from atoll.errors import FrameError, ProtocolError
from atoll.gather import partial as partials
from atoll.gather.merge import merge, readable
from atoll.gather.partial import Accepted, Partial, Skipped
from atoll.gather.result import parts_of
from atoll.gather.spool import Spool, SpoolSlices
from atoll.gather.words import Reason
from atoll.layout import Layout

LAYOUT = Layout.of([("a", (5_000,), "float32"), ("b", (3,), "float32"), ("c", (9_000,), "float32")])
UIDS = [f"{k}" for k in range(8, 20)]  # "10" < "8"


def accepted(uid: str, rank: int = 0, *, content: str = "") -> Accepted:
    sha256 = canonical.sha256([uid, content])
    squares = (int(uid) / 3, 0.0, 1e-310)
    return Accepted(uid, sha256, 1000 + int(uid), squares, float(uid), 100, rank)


def skipped(uid: str, reason: Reason = Reason.MISSING) -> Skipped:
    return Skipped(uid, reason, f"{uid!r} is left out")


def one(uid: str, rank: int) -> Partial:
    """Every third peer fails."""
    if int(uid) % 3 == 0:
        return Partial(rank, (), (skipped(uid),))
    return Partial(rank, (accepted(uid, rank),))


def rates(uids: list[str]) -> float:
    """By counting, not by anything that the ranks said."""
    return sum(int(uid) % 3 != 0 for uid in uids) / len(uids)


@given(
    st.lists(st.tuples(st.sampled_from(UIDS), st.integers(0, 4)), max_size=30),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
)
def test_merge_is_the_same_at_any_number_of_ranks_order_and_repetition(again, ranks, random):
    """Each uid somewhere, some in several partials: the bits of one rank with one partial each."""
    parts = [one(uid, k % ranks) for k, uid in enumerate(UIDS)]
    parts += [one(uid, rank) for uid, rank in again]
    random.shuffle(parts)

    found = merge(parts, primaries=random.sample(UIDS, len(UIDS)), base_version=4, seconds=9.0)

    alone = merge([one(uid, 0) for uid in UIDS], primaries=UIDS, base_version=4)
    assert found == alone and found.digest == alone.digest
    assert canonical.dumps(found.plain()) == canonical.dumps(alone.plain())
    assert found.success_rate == rates(UIDS)
    assert list(found.uids) == sorted(uid for uid in UIDS if int(uid) % 3)
    assert found.download_bytes == sum(1000 + int(uid) for uid in found.uids)
    assert (found.upload_bytes, found.global_steps) == (0, (4,) * len(found.uids))
    assert parts_of(parts) == parts_of(found)


def test_digest_shows_every_part_of_a_result():
    """The control of the test above."""
    found = merge([one(uid, 0) for uid in UIDS], primaries=UIDS)

    others = [
        replace(found, accepted=found.accepted[1:]),
        replace(found, accepted=(replace(found.accepted[0], stamp=None), *found.accepted[1:])),
        replace(found, skipped=(skipped("9", Reason.SLOW), *found.skipped[1:])),
        replace(found, global_steps=(1,) * len(found.uids)),
        replace(found, primaries=found.primaries[1:]),
    ]
    assert found.digest not in {other.digest for other in others}
    assert all(other != found for other in others)
    assert replace(found, time=99.0).digest == found.digest


def test_rates_are_not_means_of_rates():
    parts = [
        Partial(0, tuple(accepted(uid) for uid in ("10", "11", "8")), ()),
        Partial(1, (), (skipped("9"),)),
    ]

    found = merge(parts, primaries=["10", "11", "8", "9"])

    assert [part.success_rate_part for part in parts] == [1.0, 0.0]
    assert found.success_rate == 0.75


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_other_object_of_a_uid_is_a_conflict_on_whatever_rank(order):
    parts = [
        Partial(0, (accepted("10"),)),
        Partial(1, (accepted("10", 1, content="other"), accepted("11", 1))),
        Partial(2, (), (skipped("10"),)),
    ]

    found = merge([parts[k] for k in order], primaries=["10", "11"])

    assert found.uids == ("11",)
    assert found.reasons == {"10": Reason.CONFLICT}
    assert found == merge(parts, primaries=["10", "11"])


def test_uid_that_is_accepted_somewhere_is_not_skipped_unless_for_a_conflict():
    taken = Partial(0, (accepted("10"),))

    once = merge([taken, Partial(1, (), (skipped("10", Reason.SLOW),))], primaries=["10"])
    conflict = merge([taken, Partial(1, (), (skipped("10", Reason.CONFLICT),))], primaries=["10"])

    assert (once.uids, once.skipped_uids) == (("10",), ())
    assert (conflict.uids, conflict.reasons) == ((), {"10": Reason.CONFLICT})


def test_of_two_reasons_the_peers_own_stands():
    parts = [
        Partial(0, (), (skipped("10", Reason.DEADLINE),)),
        Partial(1, (), (skipped("10", Reason.INDICES),)),
    ]

    found = [merge(turned, primaries=["10"]).reasons for turned in (parts, parts[::-1])]

    assert found == [{"10": Reason.INDICES}] * 2


def test_server_that_answered_any_rank_was_not_away():
    away = Skipped("10", Reason.SERVER_AWAY, "away", "main", Reason.SLOW)

    alone = merge([Partial(0, (), (away,)), Partial(1)], primaries=["10"])
    answered = merge([Partial(0, (), (away,)), Partial(1, answered=("main",))], primaries=["10"])

    assert alone.reasons == {"10": Reason.SERVER_AWAY}
    assert answered.reasons == {"10": Reason.SLOW}


def test_rank_whose_peers_all_fail_reports_them_and_nobody_valid_is_an_empty_result():
    parts = [Partial(0, (), (skipped("10"),)), Partial(1, (), (skipped("11"),)), Partial(2)]

    found = merge(parts, primaries=["10", "11"])

    assert (found.uids, found.skipped_uids) == ((), ("10", "11"))
    assert (found.success_rate, found.download_bytes, found.missing) == (0.0, 0, 2)
    assert merge([Partial(0)], primaries=[]).success_rate == 0.0


@pytest.mark.parametrize("uid", ["10", "12"], ids=["lost", "stranger"])
def test_peer_that_nobody_reports_and_one_that_nobody_was_given_are_refused(uid):
    wanted = ["10", "11"] if uid == "10" else []

    with pytest.raises(ProtocolError, match=uid):
        merge([Partial(0, (accepted("12"),) if uid == "12" else ())], primaries=wanted)


# JSON


def whole() -> Partial:
    away = Skipped("13", Reason.SERVER_AWAY, "away", "main", Reason.SLOW)
    untimed = replace(accepted("11", 3), stamp=None)
    return Partial(3, (accepted("10", 3), untimed), (skipped("12"), away), ("main", "other"))


def test_partial_comes_back_from_its_json_to_the_bit():
    data = whole().dumps()

    found = partials.loads(data, layout=LAYOUT)

    assert found == whole()
    assert [a.rank for a in found.accepted] == [3, 3]
    assert found.dumps() == data


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"rank":3', b'"rank":-1'),
        (b'"rank":3', b'"rank":3,"more":1'),
        (b'"rank":3', b'"rank":3,"rank":3'),
        (b'"MISSING"', b'"GONE"'),
        (b'"10"', b'"../x"'),
        (b'["main","other"]', b'["other","main"]'),
        (b"1010,", b"1e3,"),
        (b"[3.3333333333333335,", b"[NaN,"),
        (b"[3.3333333333333335,", b"[-1.0,"),
        (b"[3.3333333333333335,", b"["),
        (b"10.0,100", b"10,100"),
        (b'"10"', b'"12"'),
    ],
)
def test_partial_with_anything_off_is_refused(old, new):
    data = whole().dumps()
    assert old in data

    with pytest.raises(FrameError):
        partials.loads(data.replace(old, new, 1), layout=LAYOUT)


def test_partial_is_bounded_both_ways(monkeypatch):
    data = whole().dumps()
    monkeypatch.setattr(partials, "LIMIT_BYTES", len(data) - 1)

    with pytest.raises(FrameError, match="larger"):
        whole().dumps()
    with pytest.raises(FrameError, match="at most"):
        partials.loads(data, layout=LAYOUT)


def test_hostile_sentence_is_shortened_and_fits():
    told = partials.shortened("ü\n" * 5_000)

    part = Partial(0, (), (Skipped("10", Reason.FRAME, told),))
    assert partials.loads(part.dumps(), layout=LAYOUT) == part


# Payloads


def test_state_dict_is_decoded_when_read_and_aligned_with_uids(tmp_path):
    values = {
        u: torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(int(u)))
        for u in ("10", "9")
    }
    codec, spool = TopK(), Spool(tmp_path)
    payloads = {u: codec.encode(v, noise=None, first_group=0) for u, v in values.items()}
    found = []
    for uid, payload in payloads.items():
        data = b"head" + payload.numpy().tobytes() + b"tail"
        entry = replace(accepted(uid), nbytes=len(data), payload_start=4)
        with spool.draft(uid, len(data)) as part:
            part.write(memoryview(data))
            spool.finish(part, entry.sha256)
        found.append(entry)
    merged = merge([Partial(0, tuple(found))], primaries=["10", "9"])
    places = {a.uid: (a.sha256, a.payload_start) for a in merged.accepted}

    with SpoolSlices(spool, places) as source:
        lists: Mapping[str, list[Any]] = readable(
            merged, layout=LAYOUT, codec=codec, source=source
        ).state_dict
        assert sorted(lists) == sorted(
            p + s for p in "abc" for s in ("idxs", "vals", "quant_params")
        )
        for row, uid in enumerate(merged.uids):
            dense = codec.decode(payloads[uid], LAYOUT.size)
            whole_support = codec.support(payloads[uid], LAYOUT.size)
            for spec in LAYOUT.tensors:
                own = spec.span.of(dense)
                places_found = torch.from_numpy(lists[f"{spec.name}idxs"][row].astype("int64"))
                inside = (whole_support.indices >= spec.span.start) & (
                    whole_support.indices < spec.span.stop
                )
                assert (
                    whole_support.indices[inside] - spec.span.start
                ).tolist() == places_found.tolist()
                assert (
                    whole_support.codes[inside].tolist() == lists[f"{spec.name}vals"][row].tolist()
                )
                assert set(own.nonzero().flatten().tolist()) <= set(places_found.tolist())
                table = lists[f"{spec.name}quant_params"][row]
                assert table.offset == spec.span.start % CHUNK
        refs = merged.parts[0].payloads(LAYOUT, codec)
        assert [(r.uid, r.start, r.stop) for r in refs["b"]] == [("10", 82, 164), ("9", 82, 164)]
    with pytest.raises(KeyError):
        lists["nobody"]


def test_object_that_two_ranks_have_is_served_by_the_lowest_and_has_its_earliest_time():
    """Who looked later must not make a peer the later one of two that are alike."""
    late, soon = replace(accepted("10", 2), stamp=9.0), replace(accepted("10", 1), stamp=4.0)
    unknown = replace(accepted("10", 3), stamp=None)

    for parts in itertools.permutations(Partial(a.rank, (a,)) for a in (late, soon, unknown)):
        [found] = merge(parts, primaries=["10"]).accepted
        assert (found.rank, found.stamp) == (1, 4.0)
