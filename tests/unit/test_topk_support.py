"""What a topk payload sends, and its squares part by part, against Python's own arithmetic."""

import math
from bisect import bisect_right

import numpy as np
import pytest
import torch
from torch import Tensor

from atoll.codecs.topk.chunks import ABOVE, NEGATIVE
from atoll.codecs.topk.codec import TopK
from atoll.errors import FrameError
from atoll.layout import GROUP_ELEMENTS
from tests.contract.test_codecs import values_of
from tests.unit.test_topk import BAD, CASES, SHORT, described, encoded, magnitude_of, payload_of

every_case = pytest.mark.parametrize("values", CASES.values(), ids=CASES.keys())
SIZE = GROUP_ELEMENTS + 4096 + 300
# Parts smaller than a chunk, several in one, an edge on a chunk's, one over a group's, a short end.
ENDS = {
    "one part": [SIZE],
    "edges on chunks": [4096, 8192, GROUP_ELEMENTS, SIZE],
    "several in a chunk": [1, 7, 1000, 1001, 4095, 4097, 4100, SIZE],
    "over a group": [GROUP_ELEMENTS - 5, GROUP_ELEMENTS + 5, SIZE],
    "several in the short chunk": [SIZE - 299, SIZE - 200, SIZE - 1, SIZE],
    "many": [*range(97, SIZE, 97), SIZE],
}
every_ends = pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS.keys())


def uneven(size: int, *, seed: int = 0) -> Tensor:
    """Few chunks of large values among small ones: the order of a sum shows in its bits."""
    chunk = torch.arange(size) // 4096
    scales = torch.exp2(torch.where(chunk % 8 == 0, -9.0, -28.0 - chunk * 5 % 7))
    return values_of(size, seed=seed) * scales


def terms_of(values: Tensor, ends: list[int]) -> list[list[list[float]]]:
    """For every part, for every chunk in it: the two terms, by the definition."""
    found: list[list[list[float]]] = [[] for _ in ends]
    for chunk, piece in enumerate(values.split(4096)):
        said = described(piece.tolist())
        counts = [[0, 0] for _ in ends]
        for place, (above, _) in zip(said.places, said.flags, strict=True):
            counts[bisect_right(ends, 4096 * chunk + place)][above] += 1
        sizes = [magnitude_of(code) for code in said.codes]
        for part, pair in enumerate(counts):
            if any(pair):
                found[part].append([n * (s * s) for n, s in zip(pair, sizes, strict=True)])
    return found


def from_the_left(terms: list[float]) -> float:
    total = 0.0
    for term in terms:
        total = total + term
    return total


def squares_by_hand(values: Tensor, ends: list[int]) -> list[float]:
    return [from_the_left([t for pair in part for t in pair]) for part in terms_of(values, ends)]


def squares_of(values: Tensor, ends: list[int], *, cut: int | None = None) -> list[float]:
    """As the codec adds them, in payloads of `cut` elements."""
    found = np.zeros(len(ends))
    for first in range(0, values.numel(), cut or values.numel()):
        part = values[first : first + (cut or values.numel())]
        TopK().add_squares(
            encoded(part), part.numel(), first=first, ends=np.array(ends), squares=found
        )
    return found.tolist()


@every_case
def test_support_is_the_definition(values):
    support = TopK().support(encoded(values), values.numel())

    said = [described(piece.tolist()) for piece in values.split(4096)]
    places = [4096 * i + place for i, chunk in enumerate(said) for place in chunk.places]
    flags = [flag for chunk in said for flag in chunk.flags]
    assert support.indices.tolist() == places
    assert [(code & ABOVE, (code & NEGATIVE) // NEGATIVE) for code in support.codes] == flags
    assert [tuple(pair) for pair in support.magnitudes.tolist()] == [chunk.codes for chunk in said]


@every_case
def test_values_of_the_support_are_the_decoded_ones_to_the_bit(values):
    payload = encoded(values)

    support = TopK().support(payload, values.numel())

    dense = TopK().decode(payload, values.numel()).numpy()
    found = dense[support.indices]
    assert support.values().dtype == np.float32
    assert np.array_equal(support.values(), found, equal_nan=True)
    assert np.array_equal(np.signbit(support.values()), np.signbit(found)) or np.isnan(found).any()


def test_zero_that_was_sent_is_in_the_support():
    support = TopK().support(encoded(torch.zeros(5000)), 5000)

    assert support.indices.tolist() == [*range(64), *range(4096, 4096 + 15)]
    assert not support.values().any()


def test_nothing_sends_nothing():
    support = TopK().support(torch.empty(0, dtype=torch.uint8), 0)

    assert (support.indices.size, support.codes.size, support.magnitudes.shape) == (0, 0, (0, 2))


@pytest.mark.parametrize(("data", "rule"), BAD.values(), ids=BAD.keys())
def test_malformed_chunk_has_no_support_and_adds_nothing(data, rule):
    squares = np.full(1, 0.5)

    with pytest.raises(FrameError, match=rule):
        TopK().support(payload_of(data), SHORT)
    with pytest.raises(FrameError, match=rule):
        TopK().add_squares(
            payload_of(data), SHORT, first=0, ends=np.array([SHORT]), squares=squares
        )

    assert squares.tolist() == [0.5]


@every_ends
def test_squares_of_parts_are_the_definition_to_the_bit(ends):
    values = uneven(SIZE)

    assert squares_of(values, ends) == squares_by_hand(values, ends)


@pytest.mark.parametrize("cut", [4096, 3 * 4096, GROUP_ELEMENTS])
@pytest.mark.parametrize("ends", [ENDS["several in a chunk"], ENDS["over a group"]])
def test_squares_are_the_same_however_the_buffer_is_cut(ends, cut):
    values = uneven(SIZE)

    assert squares_of(values, ends, cut=cut) == squares_by_hand(values, ends)


OTHER_ORDERS = {
    "from the right": lambda terms: from_the_left([t for pair in terms[::-1] for t in pair[::-1]]),
    "second magnitude first": lambda terms: from_the_left([t for a, b in terms for t in (b, a)]),
    "a sum for each chunk": lambda terms: from_the_left([a + b for a, b in terms]),
    "in pairs": lambda terms: float(np.sum(terms)),
    "exactly": lambda terms: math.fsum(t for pair in terms for t in pair),
}


@pytest.mark.parametrize("other", OTHER_ORDERS.values(), ids=OTHER_ORDERS.keys())
def test_another_order_of_the_sum_would_show(other):
    """The control: the bits of these sums tell the order."""
    ends = [*range(9 * 4096, SIZE, 9 * 4096), SIZE]
    values = uneven(SIZE)

    found = squares_of(values, ends)

    assert found != [other(part) for part in terms_of(values, ends)]


def test_both_signs_count_alike():
    values = uneven(SIZE)

    assert (
        squares_of(values, [SIZE])
        == squares_of(-values, [SIZE])
        == squares_of(values.abs(), [SIZE])
    )
