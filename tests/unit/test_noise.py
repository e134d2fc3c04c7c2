import hashlib

import numpy as np
import pytest

from atoll.codecs.noise import HashedNoise, Noise
from atoll.layout import GROUP_ELEMENTS

NOISE = Noise(seed=1, round=2, lane="island-0")
MASK = 2**64 - 1


def philox4x64(key: list[int], counter: list[int]) -> list[int]:
    """Philox4x64-10 of Salmon et al. 2011, written out from the paper."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        p0, p1 = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (p1 >> 64) ^ c1 ^ k0, p1 & MASK, (p0 >> 64) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & MASK, (k1 + 0xBB67AE8584CAA73B) & MASK
    return [c0, c1, c2, c3]


def test_noise_is_philox_keyed_by_the_hash_with_the_group_in_its_counter():
    digest = hashlib.sha256(b'[1,2,"island-0"]').digest()
    key = [int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")]

    drawn = NOISE.bits16(5, 32)

    # numpy counts up before each block of four words.
    words = philox4x64(key, [1, 0, 5, 0]) + philox4x64(key, [2, 0, 5, 0])
    expected = [word >> shift & 0xFFFF for word in words for shift in (0, 16, 32, 48)]
    assert drawn.tolist() == expected


def test_noise_of_a_group_does_not_depend_on_how_much_is_drawn():
    long = NOISE.bits16(3, GROUP_ELEMENTS)

    short = NOISE.bits16(3, 1001)

    assert np.array_equal(short, long[:1001])


def test_noise_of_a_group_does_not_depend_on_what_was_drawn_before():
    first = NOISE.bits16(3, 100)

    NOISE.bits16(4, 100)

    assert np.array_equal(NOISE.bits16(3, 100), first)


@pytest.mark.parametrize(
    "other",
    [
        Noise(seed=2, round=2, lane="island-0"),
        Noise(seed=1, round=3, lane="island-0"),
        Noise(seed=1, round=2, lane="island-1"),
        Noise(seed=12, round=2, lane="island-0"),
    ],
)
def test_noise_differs_with_seed_round_and_lane(other):
    assert not np.array_equal(other.bits16(0, 64), NOISE.bits16(0, 64))


def test_noise_differs_between_groups():
    drawn = {NOISE.bits16(group, 64).tobytes() for group in range(200)}

    assert len(drawn) == 200


def test_noise_is_uniform_over_16_bits():
    drawn = NOISE.bits16(0, GROUP_ELEMENTS)

    # Six standard deviations of the mean of n uniform draws; and every bit about half the time.
    assert abs(drawn.mean() - 32767.5) < 6 * 2**16 / (12 * GROUP_ELEMENTS) ** 0.5
    shares = [float((drawn >> bit & 1).mean()) for bit in range(16)]
    assert max(abs(share - 0.5) for share in shares) < 6 * 0.5 / GROUP_ELEMENTS**0.5


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5])
def test_noise_gives_exactly_the_count_asked_for(count):
    drawn = NOISE.bits16(0, count)

    assert drawn.dtype == np.uint16
    assert drawn.shape == (count,)


# Hashed

HASHED = HashedNoise(seed=1, round=2, lane="reduce/0/3/1/0")


def mixed(x: int) -> int:
    """lowbias32, by Python's own integers."""
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


def test_hashed_noise_is_a_counter_hashed_between_two_words_of_its_group():
    digest = hashlib.sha256(b'[1,2,"reduce/0/3/1/0"]').digest()
    a, b = (int.from_bytes(digest[at : at + 4], "little") for at in (0, 8))
    first, second = mixed((a + 5 * 0x9E3779B9) % 2**32), mixed(b ^ mixed(5))

    drawn = HASHED.bits16(5, 40)

    expected = []
    for i in range(40):
        x = (i + first) % 2**32
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        x = (x ^ x >> 15 ^ second) * 0x846CA68B % 2**32
        expected.append(x >> 16)
    assert drawn.tolist() == expected


def test_hashed_noise_is_uniform_and_its_neighbours_do_not_go_together():
    drawn = np.stack([HASHED.bits16(group, GROUP_ELEMENTS) for group in range(16)]) / 65536

    count = drawn.size
    assert abs(drawn.mean() - 0.5) < 5 * np.sqrt(1 / 12 / count)  # 5 standard errors
    assert abs(drawn.var() - 1 / 12) < 5 * np.sqrt(1 / 180 / count)
    centred = (drawn - 0.5) * np.sqrt(12)
    for along in (centred[:, 1:] * centred[:, :-1], centred[1:] * centred[:-1]):
        assert abs(along.mean()) < 5 / np.sqrt(along.size)


@pytest.mark.parametrize(
    "other",
    [
        HashedNoise(seed=2, round=2, lane="reduce/0/3/1/0"),
        HashedNoise(seed=1, round=3, lane="reduce/0/3/1/0"),
        HashedNoise(seed=1, round=2, lane="reduce/0/3/1/1"),
    ],
)
def test_hashed_noise_differs_by_seed_round_lane_and_group(other):
    assert not np.array_equal(other.bits16(0, 64), HASHED.bits16(0, 64))
    assert len({HASHED.bits16(group, 64).tobytes() for group in range(200)}) == 200
