"""topk: its bytes against a reference written out by hand, and what it refuses."""

import math
import re
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from atoll.codecs.topk import chunks, magnitudes
from atoll.codecs.topk.codec import TopK
from atoll.errors import FrameError
from atoll.layout import GROUP_ELEMENTS
from tests.contract.test_codecs import values_of

DOCS = Path(__file__).parents[2] / "docs" / "wire-format.md"
LARGEST = torch.finfo(torch.float32).max


# --- the format by its definition: Python's integers and floats, one chunk at a time ---


class Chunk(NamedTuple):
    """What a chunk says: places ascending, a pair (above, negative) for each, two codes."""

    places: list[int]
    flags: list[tuple[int, int]]
    codes: tuple[int, int]

    def written(self) -> bytes:
        kept = len(self.places)
        low = sum(place % 64 << 6 * i for i, place in enumerate(self.places))
        high = sum(1 << place // 64 + i for i, place in enumerate(self.places))
        values = sum(above + 2 * minus << 2 * i for i, (above, minus) in enumerate(self.flags))
        sizes = [math.ceil(bits * kept / 8) for bits in (6, 2, 2)]
        parts = zip((low, high, values), sizes, strict=True)
        return b"".join(n.to_bytes(size, "little") for n, size in parts) + bytes(self.codes)


def code_of(mean: float) -> int:
    """The byte of a magnitude, by the table in the wire format."""
    octave = math.frexp(mean)[1] - 1  # mean is 1 to 2 times 2^octave
    if mean >= 64.0:
        return 239 + (octave - 6) // 9
    if mean >= 2.0**-22:
        step = math.floor(mean / 2.0**octave * 8 + 0.5)
        return min(15 + 8 * (octave + 22) + step - 8, 238)
    if mean >= 2.0**-139:
        return 2 + (octave + 139) // 9
    return 1 if mean >= 2.0**-149 else 0


def magnitude_of(code: int) -> float:
    if code in (0, 1, 255):
        return {0: 0.0, 1: 2.0**-149, 255: math.nan}[code]
    if code < 15:
        return 2.0 ** (-139 + 9 * (code - 2))
    if code < 239:
        return (8 + (code - 15) % 8) / 8 * 2.0 ** ((code - 15) // 8 - 22)
    return 2.0 ** (6 + 9 * (code - 239))


def tree_sum(terms: list[float]) -> float:
    """Upper half onto lower half, from 64 terms on."""
    terms = terms + [0.0] * (64 - len(terms))
    while len(terms) > 1:
        half = len(terms) // 2
        terms = [a + b for a, b in zip(terms[:half], terms[half:], strict=True)]
    return terms[0]


def described(values: list[float]) -> Chunk:
    """What the encoder has to say about one chunk."""
    kept = math.ceil(len(values) / 64)
    # Python sorts without changing the order of equals; a NaN counts as the largest.
    size = [math.inf if math.isnan(v) else abs(v) for v in values]
    places = sorted(sorted(range(len(values)), key=lambda i: -size[i])[:kept])
    sizes = [size[i] for i in places]
    minus = [int(values[i] < 0) for i in places]
    if math.inf in sizes:
        return Chunk(places, [(0, m) for m in minus], (255, 0))
    mean = tree_sum(sizes) / kept
    above = [int(s > mean) for s in sizes]
    lower = tree_sum([0.0 if a else s for s, a in zip(sizes, above, strict=True)])
    upper = tree_sum([s if a else 0.0 for s, a in zip(sizes, above, strict=True)])
    codes = code_of(lower / (kept - sum(above))), code_of(upper / max(sum(above), 1))
    return Chunk(places, list(zip(above, minus, strict=True)), codes)


def reference(values: Tensor) -> bytes:
    pieces = values.split(4096)
    return b"".join(described(piece.tolist()).written() for piece in pieces)


def decoded_reference(values: Tensor) -> list[float]:
    found: list[float] = []
    for piece in values.split(4096):
        said = described(piece.tolist())
        out = [0.0] * len(piece)
        for place, (above, minus) in zip(said.places, said.flags, strict=True):
            out[place] = magnitude_of(said.codes[above]) * (-1 if minus else 1)
        found += out
    return found


def encoded(values: Tensor) -> Tensor:
    return TopK().encode(values, noise=None, first_group=0)


def sparse(size: int, **places: float) -> Tensor:
    """Zeros but for `at<place>`."""
    values = torch.zeros(size)
    for place, value in places.items():
        values[int(place[2:])] = value
    return values


def order_of_adds() -> Tensor:
    """Kept values whose lower mean is 17/16, where the code changes, only if the tree adds them.

    16 large ones at even places sum to 34 - 2^-47; 16 tiny ones behind them, at odd places, to
    2^-47. One by one, each tiny one is lost.
    """
    large = [2.0] * 13 + [8 - 2.0**-20, 2.0**-20 - 2.0**-43, 2.0**-43 - 2.0**-47]
    values = torch.zeros(4096)
    values[:64] = 100.0
    values[0:32:2] = torch.tensor(large, dtype=torch.float64).float()
    values[33:64:2] = 2.0**-51
    return values


CASES: dict[str, Tensor] = {
    "order of adds": order_of_adds(),
    "one": torch.tensor([-2.5]),
    "a row": values_of(64),
    "more than a row": values_of(65),
    "three kept": values_of(191),
    "almost a chunk": values_of(4095),
    "a chunk": values_of(4096),
    "a chunk and one": values_of(4097),
    "groups": values_of(GROUP_ELEMENTS + 4096 + 300),
    "zeros": torch.zeros(5000),
    "negative zeros": torch.full((5000,), -0.0),
    "all equal": torch.full((5000,), 0.37),
    "equal but for the sign": torch.tensor([0.5, -0.5] * 2048),
    "ties at the end": torch.cat([torch.full((4000,), 1.0), torch.full((96,), -1.0)]),
    "larger ones late": torch.arange(4096, dtype=torch.float32),
    "one of many": sparse(4096, at4095=-3.0),
    "few of many": sparse(4096, at7=-3.0, at8=1e-3, at4000=2.0),
    "subnormal": values_of(5000) * 2.0**-150,
    "smallest": torch.full((4096,), 2.0**-149),
    "tiny": values_of(5000) * 2.0**-120,
    "huge": values_of(5000) * 2.0**113,
    "largest": torch.full((4096,), -LARGEST),
    "of all sizes": values_of(4096) * torch.exp2(torch.arange(4096) % 200 - 120.0),
    "infinite": sparse(4096, at9=math.inf, at3000=1.0),
    "not a number": sparse(5000, at4999=math.nan, at1=-1.0),
}
every_case = pytest.mark.parametrize("values", CASES.values(), ids=CASES.keys())


@every_case
def test_payload_is_the_definition(values):
    assert encoded(values).numpy().tobytes() == reference(values)


@every_case
def test_decoded_values_are_the_definition(values):
    decoded = TopK().decode(encoded(values), values.numel())

    assert np.array_equal(decoded.numpy(), decoded_reference(values), equal_nan=True)


@pytest.mark.parametrize(
    ("elements", "nbytes"),
    [(0, 0), (1, 5), (64, 5), (65, 6), (256, 7), (257, 10), (4095, 82), (4096, 82), (4097, 87)],
)
def test_size_follows_from_the_number_of_values(elements, nbytes):
    assert TopK().encoded_bytes(elements) == nbytes


def test_chunk_has_82_bytes_and_a_group_sixteen_of_them():
    assert TopK().encoded_bytes(GROUP_ELEMENTS) == 16 * 82


def test_equal_magnitudes_are_kept_from_the_front():
    decoded = TopK().decode(encoded(CASES["equal but for the sign"]), 4096)

    assert torch.equal(decoded[:64], torch.tensor([0.5, -0.5] * 32))
    assert not decoded[64:].any()


def test_order_of_equal_magnitudes_shows_in_the_bytes():
    """The control: kept from the back, they would be other bytes."""
    values = CASES["equal but for the sign"]

    assert encoded(values).numpy().tobytes() != encoded(values.flip(0)).numpy().tobytes()
    assert described(values.tolist()).places == list(range(64))


def test_sum_in_another_order_would_show():
    """The control of the tree: added one by one, these have a lower mean with another code."""
    below = [v for v in order_of_adds()[:64].tolist() if v < 100]

    *_, one_by_one = accumulate(below)

    assert code_of(one_by_one / 32) == code_of(1.0)
    assert described(order_of_adds().tolist()).codes == (code_of(1.125), code_of(100.0))


def test_mean_in_fp64_is_between_the_sizes_it_is_the_mean_of():
    """So at least one kept value is not above it, whatever the values."""
    above = torch.from_numpy(np.nextafter(np.float32(1), np.float32(2), dtype=np.float32)[None])
    values = torch.cat([torch.ones(4095), above])

    said = described(values.tolist())

    assert sum(a for a, _ in said.flags) == 1
    assert encoded(values).numpy().tobytes() == reference(values)


# --- magnitudes ---


def test_every_code_is_the_documented_one():
    assert [magnitude_of(c) for c in range(253)] == magnitudes.VALUES[:253].tolist()
    assert np.isnan(magnitudes.VALUES[253:]).all()


def test_codes_rise_with_the_magnitude_and_each_decodes_to_itself():
    values = magnitudes.VALUES[:253].astype(np.float64)

    assert (np.diff(values) > 0).all()
    assert magnitudes.codes(values).tolist() == list(range(253))


@pytest.mark.parametrize("toward", [-1.0, 1.0])
def test_code_changes_exactly_at_its_limit(toward):
    beside = np.nextafter(magnitudes.LIMITS, magnitudes.LIMITS + toward)

    assert magnitudes.codes(beside).tolist() == [code_of(m) for m in beside.tolist()]
    assert magnitudes.codes(magnitudes.LIMITS).tolist() == list(range(1, 253))


def test_fine_codes_are_off_by_at_most_a_sixteenth():
    means = np.exp2(np.linspace(-22, 5.9, 10_000))

    decoded = magnitudes.VALUES[magnitudes.codes(means)]

    assert np.abs(decoded / means - 1).max() <= 1 / 16


def test_coarse_codes_never_send_more_than_there_is():
    means = np.exp2(np.concatenate([np.linspace(-149, -22.01, 5000), np.linspace(6, 127.99, 5000)]))

    assert (magnitudes.VALUES[magnitudes.codes(means)] <= means).all()


# --- what is refused ---

SHORT = 300  # of its five rows the last has 44 values
KEPT = 5
GOOD = Chunk([3, 64, 65, 200, 299], [(0, 1), (1, 0), (0, 0), (0, 1), (1, 1)], (100, 120))


def payload_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def changed(at: int, value: int) -> bytes:
    """GOOD's bytes with one of them set: 4 low, 2 high, 2 values, 2 codes."""
    data = bytearray(GOOD.written())
    data[at] = value
    return bytes(data)


def placed(*places: int) -> bytes:
    return GOOD._replace(places=list(places)).written()


def coded(first: int, second: int, *, above: bool = True) -> bytes:
    flags = GOOD.flags if above else [(0, minus) for _, minus in GOOD.flags]
    return GOOD._replace(flags=flags, codes=(first, second)).written()


BAD = {
    "unsorted in a row": (placed(3, 65, 64, 200, 299), "do not ascend"),
    "repeated": (placed(3, 64, 64, 200, 299), "do not ascend"),
    "beyond the end": (placed(3, 64, 65, 200, 300), "beyond its last value"),
    "in a row that is not there": (placed(3, 64, 65, 200, 320), "beyond its last value"),
    "too few": (changed(4, 0x09), "not name as many places"),
    "too many": (changed(4, 0x3F), "not name as many places"),
    "none": (changed(4, 0), "not name as many places"),
    "stray low bits": (changed(3, 0x40 | GOOD.written()[3]), "bits set where none belong"),
    "stray high bits": (changed(5, 0x04 | GOOD.written()[5]), "bits set where none belong"),
    "stray value bits": (changed(7, 0x04 | GOOD.written()[7]), "bits set where none belong"),
    "code 253": (coded(253, 0, above=False), "magnitudes that no encoder writes"),
    "code 254": (coded(254, 0, above=False), "magnitudes that no encoder writes"),
    "above and not finite": (coded(100, 255), "magnitudes that no encoder writes"),
    "not finite below": (coded(255, 120), "magnitudes that no encoder writes"),
    "above is less": (coded(121, 120), "magnitudes that no encoder writes"),
    "above is nothing": (coded(0, 0), "magnitudes that no encoder writes"),
    "two for one": (coded(100, 120, above=False), "magnitudes that no encoder writes"),
}


def test_good_chunk_is_taken():
    """The control: it is the change that is refused."""
    decoded = TopK().decode(payload_of(GOOD.written()), SHORT)

    assert torch.nonzero(decoded).flatten().tolist() == GOOD.places


@pytest.mark.parametrize(("data", "rule"), BAD.values(), ids=BAD.keys())
def test_malformed_chunk_is_refused_before_anything_is_written(data, rule):
    out = torch.full((SHORT,), 5.0)

    with pytest.raises(FrameError, match=rule):
        TopK().decode(payload_of(data), SHORT, out=out)

    assert torch.equal(out, torch.full((SHORT,), 5.0))


def test_noise_is_refused():
    payload = np.random.default_rng(1).integers(0, 256, 16 * 82, np.uint8)

    assert not accepts(payload.tobytes(), GROUP_ELEMENTS)


def test_refusal_names_the_chunk_behind_full_ones():
    values = values_of(GROUP_ELEMENTS + 4096 + SHORT)
    payload = encoded(values).clone()
    payload[-10:] = payload_of(placed(3, 64, 64, 200, 299))

    with pytest.raises(FrameError, match=r"^chunk 17 of a topk payload of 69932 elements names"):
        TopK().decode(payload, values.numel())


def test_without_the_check_a_repeated_place_would_be_taken(monkeypatch):
    """The control: the check is what refuses it."""
    monkeypatch.setattr(TopK, "check", lambda *_: None)

    decoded = TopK().decode(payload_of(BAD["repeated"][0]), SHORT)

    assert torch.count_nonzero(decoded) == KEPT - 1


def is_sound(data: bytes, elements: int) -> bool:
    """Whether a chunk of less than 4096 values is well formed, read bit by bit."""
    kept = math.ceil(elements / 64)
    cut = [math.ceil(kept * 6 / 8)]
    cut += [cut[0] + math.ceil(kept / 4), cut[0] + 2 * math.ceil(kept / 4)]
    low, high, values = (
        int.from_bytes(data[a:b], "little") for a, b in zip([0, *cut], cut, strict=False)
    )
    first, second = data[cut[2] :]
    set_bits = [bit for bit in range(high.bit_length()) if high >> bit & 1]
    places = [(bit - i) * 64 + (low >> 6 * i & 63) for i, bit in enumerate(set_bits)]
    is_above = any(values >> 2 * i & 1 for i in range(kept))
    # The only spelling: sorted, all different, in range, as many as are kept, nothing besides.
    flags = [(values >> 2 * i & 1, values >> 2 * i + 1 & 1) for i in range(kept)]
    is_one = (
        len(places) == kept
        and places == sorted(set(places))
        and places[-1] < elements
        and Chunk(places, flags, (first, second)).written() == data
    )
    ordered = 1 <= second <= 252 and first <= second
    return is_one and (ordered if is_above else second == 0 and first not in (253, 254))


def accepts(data: bytes, elements: int) -> bool:
    try:
        TopK().decode(payload_of(data), elements)
    except FrameError:
        return False
    return True


def flipped(random: np.random.Generator, data: bytes) -> bytes:
    bits = int.from_bytes(data, "little")
    for bit in random.integers(0, 8 * len(data), random.integers(1, 4)).tolist():
        bits ^= 1 << bit
    return bits.to_bytes(len(data), "little")


def test_every_flip_of_bits_is_taken_exactly_when_the_chunk_is_well_formed():
    random = np.random.default_rng(0)
    tries = [flipped(random, GOOD.written()) for _ in range(2000)]

    taken = [accepts(data, SHORT) for data in tries]

    assert taken == [is_sound(data, SHORT) for data in tries]
    assert 100 < sum(taken) < 1900


def fault_of(data: bytes) -> int:
    rows = np.frombuffer(data, np.uint8).reshape(1, -1)
    return int(chunks.Chunks(rows, SHORT).faults()[0])


def test_each_fault_has_a_number_of_its_own():
    found = {fault_of(data) for data, _ in BAD.values()}

    assert found == set(range(1, len(chunks.FAULTS)))


# --- what it is for ---


def relative_error(draw: Callable[[np.random.Generator], np.ndarray]) -> float:
    """Squared error of the kept values, as a share of their squares."""
    values = torch.from_numpy(draw(np.random.default_rng(1)).astype(np.float32))
    decoded = TopK().decode(encoded(values), values.numel())
    sent = decoded != 0
    return float((values - decoded)[sent].square().sum() / values[sent].square().sum())


def test_kept_values_are_close():
    """Two levels and a byte for each lose little of what the kept values carry."""
    size = 64 * 4096

    gauss = relative_error(lambda rng: rng.standard_normal(size))
    laplace = relative_error(lambda rng: rng.laplace(size=size))
    unequal = relative_error(
        lambda rng: rng.standard_normal(size) * 10 ** rng.uniform(-5, 0, (64, 1)).repeat(4096)
    )

    assert max(gauss, unequal) < 0.006
    assert laplace < 0.017


# --- the documents ---


def test_docs_example_is_what_the_code_writes():
    example = re.search(r"```bytes\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert example is not None
    values = sparse(70, at3=-0.5, at69=0.25)

    assert encoded(values).numpy().tobytes() == bytes.fromhex(example[1])
