"""Ten thousand malformed objects: none is taken, none crashes, memory stays, others go on."""

import random
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from itertools import repeat

import pytest

from atoll.gather import statement as statements
from atoll.gather import validate
from atoll.gather.validate import MAX_SENTENCE, Checked
from atoll.gather.words import Reason, Skip
from tests import gather_objects as objects
from tests import hostile_objects as hostile
from tests.gather_objects import KEY, expected, fed
from tests.hostile_objects import GOOD, GOOD_DOCUMENT, PAYLOAD, Hostile

pytestmark = pytest.mark.usefixtures("one_thread")

COUNT = 10_000
PUBLIC = KEY.public
TRACED = 500  # of each, with Python's memory counted: that takes its time
MEMORY_BYTES = 1 << 20  # a header of 64 KiB in JSON, taken apart


def verdict(one: Hostile, size: int) -> Checked | Skip:
    """What becomes of an object; any other error than a Skip passes through."""
    try:
        return fed(validate.begin(expected(), one.document, PUBLIC), one.data, size)
    except Skip as skip:
        return skip


def test_ten_thousand_malformed_objects_are_refused_each_with_a_reason():
    cuts = random.Random(1)
    kinds: Counter[str] = Counter()
    reasons: Counter[Reason] = Counter()
    wrong: list[tuple[Hostile, object]] = []

    for one in hostile.drawn(COUNT, seed=0):
        found = verdict(one, cuts.choice((61, 82, 1000, 1 << 18)))
        kinds[one.kind] += 1
        if isinstance(found, Skip) and found.reason.fault == "peer":
            reasons[found.reason] += 1
            wrong += [(one, found)] if len(found.sentence) > MAX_SENTENCE else []
        else:
            wrong.append((one, found))

    assert wrong == []
    assert kinds.total() == COUNT
    assert min(kinds.values()) >= 5, kinds
    met = {"SIZE", "SIGNATURE", "STATEMENT", "FRAME", "INDICES", "TABLE", "NORM"}
    assert {reason for reason, count in reasons.items() if count >= 10} == set(map(Reason, met))


def test_good_object_among_them_is_taken_as_if_alone():
    """The control: what is refused is what was changed; and nothing of it stays behind."""
    good = Hostile("good", GOOD_DOCUMENT, GOOD)
    alone = verdict(good, 1000)

    among = []
    for one in hostile.drawn(50, seed=2):
        verdict(one, 100)
        among.append(verdict(good, 77))

    assert isinstance(alone, Checked)
    assert among == [alone] * 50


def test_verdict_is_the_same_however_an_object_is_cut():
    def said(one: Hostile, size: int) -> tuple[Reason, str]:
        found = verdict(one, size)
        assert isinstance(found, Skip), one
        return found.reason, found.sentence

    drawn = [*hostile.drawn(150, seed=3)]

    whole = [said(one, 1 << 18) for one in drawn]

    assert [said(one, 7) for one in drawn] == whole
    assert [said(one, 83) for one in drawn] == whole


def test_well_formed_payloads_of_the_same_kind_are_taken():
    """The control of the reader of chunks in this test: what it calls sound is taken."""
    draw = random.Random(4)
    flips = (hostile.flipped(draw, PAYLOAD, 2) for _ in range(2000))
    sound = [payload for payload in flips if hostile.is_sound(payload)][:100]

    taken = [verdict(hostile.of_meaning("", objects.object_of(p)), 1000) for p in sound]

    assert len(sound) == 100
    assert all(isinstance(found, Checked) for found in taken)


def test_memory_is_bounded_whatever_they_hold():
    drawn = [*hostile.drawn(TRACED, seed=5)]
    verdict(drawn[0], 1000)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    peaks = []

    for one in drawn:
        tracemalloc.reset_peak()
        verdict(one, 1000)
        peaks.append(tracemalloc.get_traced_memory()[1] - before)

    tracemalloc.stop()
    assert max(peaks) < MEMORY_BYTES, max(peaks)


def test_endless_object_is_given_up_at_its_size():
    """A server that never stops: nothing is asked for after the piece that is too many."""
    validator = validate.begin(expected(), GOOD_DOCUMENT, PUBLIC)
    served: list[bytes] = []

    def endless() -> Iterator[bytes]:
        yield from (GOOD[start : start + 100] for start in range(0, len(GOOD), 100))
        yield from repeat(bytes(100), 10**6)

    def download() -> None:
        for piece in endless():
            served.append(piece)
            validator.feed(piece)

    with pytest.raises(Skip, match="goes on after"):
        download()

    assert sum(map(len, served)) == len(GOOD) + 100


def test_second_statement_of_the_same_window_names_another_object():
    """Both are good; which one counts is pinned by who read it first."""
    other = objects.object_of(PAYLOAD, loss_sum=1024.5)
    second = statements.signed(objects.stated(other), KEY)

    assert isinstance(verdict(Hostile("", second, other), 1000), Checked)
    found = verdict(Hostile("", second, GOOD), 1000)
    assert isinstance(found, Skip) and found.reason is Reason.FRAME
