"""Compiled loops give the bits of torch's separate steps, on every value and every processor."""

import functools
import math
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from torch import Tensor

from atoll.codecs import feedback, finite
from atoll.codecs.base import Codec
from atoll.codecs.bf16.codec import Bf16
from atoll.codecs.int4.codec import Int4
from atoll.codecs.int8.codec import Int8
from atoll.codecs.noise import HashedNoise, Noise
from atoll.codecs.sign.codec import Sign
from atoll.codecs.topk import chunks
from atoll.codecs.topk import loops as topk_loops
from atoll.codecs.topk.codec import TopK
from atoll.compiled import base, jit
from atoll.compiled.base import FULL_TILE_ELEMENTS, LARGE_ELEMENTS, Compiled
from atoll.errors import FrameError, LayoutMismatch
from atoll.layout import GROUP_ELEMENTS, Layout
from atoll.optim import adam, delayed_nesterov, nesterov  # noqa: F401  compiled with the rest
from atoll.optim.base import OuterOptimizer
from atoll.optim.settings import OuterSettings
from atoll.optim.sgd import Sgd
from atoll.strategies.outer import OuterStep, fresh_state
from atoll.sums import digest
from tests import gather_objects as objects

DENSE: list[Codec] = [
    *(Int8(), Int8(block=16), Int8(block=GROUP_ELEMENTS)),
    *(Int4(), Int4(block=16), Int4(block=GROUP_ELEMENTS)),
    *(Sign(), Sign(block=16), Sign(block=GROUP_ELEMENTS)),
]
PIECES: list[Codec] = [*DENSE, TopK()]
LOSSY: list[Codec] = [*PIECES, Bf16()]
every_dense = pytest.mark.parametrize("codec", DENSE, ids=lambda c: c.format)
every_piece = pytest.mark.parametrize("codec", PIECES, ids=lambda c: c.format)
every_lossy = pytest.mark.parametrize("codec", LOSSY, ids=lambda c: c.format)
# A full tile; a short block at its end; more groups, the last one short.
SIZES = [FULL_TILE_ELEMENTS, FULL_TILE_ELEMENTS + 5, FULL_TILE_ELEMENTS + GROUP_ELEMENTS + 333]
OUTER = {
    "sgd": {"lr": 0.3},
    "nesterov": {"lr": 0.7, "momentum": 0.9},
    "delayed_nesterov": {"lr": 0.7, "momentum": 0.9, "delay": 2},
    "adam": {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8},
}
# Numbers at which a rounding, a scale or a class changes.
SPECIAL = [
    *(0.0, -0.0, 1e-45, -1e-45, 1e-43, 1.2e-38, -1.2e-38, 2.0**-110, 1.0, -1.0, 0.5, 1.5, 2.5),
    *(126.5, 127.0, 127.5, 3.3895e38, -3.3895e38, 3.4028234e38, -3.4028234e38, 1e38, 2.0**120),
]


def numbers(size: int, *, seed: int = 0) -> Tensor:
    """Signs, mantissas and exponents of all kinds, and quiet stretches; all finite."""
    rng = np.random.default_rng(seed)
    values = np.ldexp(rng.standard_normal(size), rng.integers(-20, 20, size)).astype(np.float32)
    values[: size // 4] *= np.float32(1e-40)  # subnormal scales
    values[size // 4 : size // 4 + 70_000] = 0.0
    places = rng.integers(0, size, 40 * len(SPECIAL))
    values[places] = np.tile(np.array(SPECIAL, np.float32), 40)
    return torch.from_numpy(values)


@pytest.fixture(autouse=True, scope="module")
def ready() -> None:
    prepared()


def prepared() -> None:
    base.compiled.prepare(LARGE_ELEMENTS)
    base.compiled.wait()


def bits(values: Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.fixture
def both(monkeypatch):
    """Runs a computation twice: with the loops, and with torch's steps alone."""

    def run(computation):
        assert base.compiled.ready(FULL_TILE_ELEMENTS)
        fast = computation()
        with monkeypatch.context() as patch:
            patch.setattr(base.compiled, "ready", lambda _: False)
            patch.setattr(base.compiled, "ready_for_any", lambda: False)
            return fast, computation()

    return run


# --- the same bits as without them ---


@every_piece
@pytest.mark.parametrize("size", SIZES)
def test_values_are_encoded_to_the_same_bytes(both, codec, size):
    values = numbers(size)

    fast, plain = both(lambda: codec.encode(values, noise=None, first_group=0))

    assert bits(fast) == bits(plain)


@pytest.mark.parametrize("block", [16, 256, GROUP_ELEMENTS])
@pytest.mark.parametrize("size", [1, 300, GROUP_ELEMENTS + 7, *SIZES])
def test_hashed_draws_round_to_the_same_bytes(both, block, size):
    """Also the small tiles, for which no other loop is taken."""
    codec, noise = Int8(block, "stochastic"), HashedNoise(1, 2, "lane")
    values = numbers(size)

    fast, plain = both(lambda: codec.encode(values, noise=noise, first_group=3))

    assert bits(fast) == bits(plain)
    assert bits(fast) != bits(codec.encode(values, noise=noise, first_group=4)) or size == 1


@every_piece
@pytest.mark.parametrize("size", SIZES)
def test_what_was_encoded_is_decoded_to_the_same_bits(both, codec, size):
    payload = codec.encode(numbers(size), noise=None, first_group=0)

    fast, plain = both(lambda: codec.decode(payload, size))

    assert bits(fast) == bits(plain)


@pytest.mark.parametrize("size", [1, 300, 4097, GROUP_ELEMENTS + 7, *SIZES])
def test_sparse_values_and_their_squares_are_the_same(both, size):
    """Also of small tiles: loops are taken for them, too."""
    codec, ends = TopK(), np.unique([1, 2, 299, 4000, 4096, 5000, 9000, 9001, size // 2 + 1, size])
    payload = codec.encode(numbers(size), noise=None, first_group=0)

    def sent():
        squares = np.full(len(ends), 0.1)
        codec.add_squares(payload, size, first=0, ends=ends, squares=squares)
        support = codec.support(payload, size)
        return [part.tobytes() for part in (support.indices, support.codes, squares)]

    fast, plain = both(sent)

    assert fast == plain


@pytest.mark.parametrize("broken", [None, 0, 70, 100, 140])
def test_validator_has_the_same_verdict_and_norms(both, broken):
    payload = bytearray(objects.payload_of(objects.values_for(objects.LARGE)))
    if broken is not None:
        payload[82 * broken + 70] ^= 0xFF  # of the values: the table then fits them, or not
        payload[82 * broken + 81] = 0
    data = objects.object_of(bytes(payload), objects.LARGE)

    fast, plain = both(lambda: objects.verdict(data, objects.LARGE))

    assert fast == plain
    assert isinstance(fast, tuple) == (broken is not None)


@every_dense
@pytest.mark.parametrize("size", SIZES)
def test_any_payload_is_decoded_to_the_same_bits(both, codec, size):
    """Also scales that no encoder writes, and the levels -128 and -8."""
    payload = np.random.default_rng(1).integers(0, 256, codec.encoded_bytes(size), np.uint8)
    payload[-1] = 0  # bits behind the last value are refused

    fast, plain = both(lambda: codec.decode(torch.from_numpy(payload), size))

    sound = ~torch.isnan(plain)  # which NaN it is, is the processor's choice
    assert bits(torch.isnan(fast)) == bits(torch.isnan(plain))
    assert bits(fast[sound]) == bits(plain[sound])


@every_lossy
@pytest.mark.parametrize(("size", "decay"), [*zip(SIZES, (0.95, 0.3, 1.0), strict=True)])
def test_feedback_gives_the_same_payload_and_residual(both, codec, size, decay):
    values = numbers(size).clamp(-1e37, 1e37)

    def fed():
        residual = (numbers(size, seed=2) * 1e-3).clamp(-1e30, 1e30).bfloat16()
        payload = feedback.encode_with_feedback(
            codec, values, residual, noise=None, first_group=0, decay=decay
        )
        return bits(payload), bits(residual.view(torch.uint16))

    fast, plain = both(fed)

    assert fast == plain


@pytest.mark.parametrize(
    ("optimizer", "codec"),
    [*product(OUTER, [Int8(), Int8(block=16), Bf16()]), *(("nesterov", codec) for codec in PIECES)],
    ids=str,
)
def test_outer_step_gives_the_same_weights_and_payloads(both, codec, optimizer):
    layout = Layout.of([("a", (2 * FULL_TILE_ELEMENTS + GROUP_ELEMENTS + 77,), "float32")])
    start = numbers(layout.size).clamp(-1e3, 1e3)
    deltas = [numbers(layout.size, seed=s).clamp(-1e3, 1e3) for s in (3, 4)]

    fast, plain = both(lambda: stepped(layout, start, deltas, codec=codec, optimizer=optimizer))

    assert fast == plain


class Whole:
    """A displacement that lies in memory."""

    def __init__(self, values: Tensor, weight: int, factor: float = 1.0) -> None:
        self._values = values
        self.weight = weight
        self.factor = factor

    def tile(self, span):
        return self._values[span.start : span.stop]

    def raw(self, span):
        return self.tile(span).view(torch.uint8)


def outer(name: str) -> OuterOptimizer:
    return OuterSettings.model_validate({"optimizer": name, **OUTER[name]}).build()


def stepped(layout, start, deltas, *, codec, optimizer, parts=1):
    """Digests and payload after two steps; with several parts they are made from the last on."""
    rule = outer(optimizer)
    state = fresh_state(layout, start.clone(), optimizer=rule, download=codec)
    sources = [Whole(delta, weight) for weight, delta in enumerate(deltas, start=1)]
    payloads = {}
    for number in (1, 2):
        step = OuterStep(rule, codec, None, number)
        for part in reversed(layout.parts(parts, step.tile_bytes)):
            step.apply(
                state,
                sources,
                lambda span, payload, number=number: payloads.update(
                    {(number, span.start): bits(payload)}
                ),
                part=part,
            )
    buffers = [*state.buffers, *state.slots.values()]
    return [digest.digest(layout, buffer).root for buffer in buffers], payloads


@pytest.mark.parametrize("parts", [2, 3, 5])
def test_outer_step_by_parts_in_any_order_is_that_of_the_whole(parts):
    layout = Layout.of([("a", (3 * FULL_TILE_ELEMENTS + 77,), "float32")])
    start, delta = (numbers(layout.size, seed=s).clamp(-1e3, 1e3) for s in (0, 3))

    whole = stepped(layout, start, [delta], codec=Int8(), optimizer="nesterov")

    assert stepped(layout, start, [delta], codec=Int8(), optimizer="nesterov", parts=parts) == whole


# --- what is not finite ---


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 7, FULL_TILE_ELEMENTS - 1])
def test_first_value_that_is_not_finite_is_found(both, bad, place):
    values = numbers(FULL_TILE_ELEMENTS)
    values[place] = bad

    assert both(lambda: finite.first_not_finite(values)) == (place, place)


def test_values_that_are_all_finite_are_found_so(both):
    values = numbers(FULL_TILE_ELEMENTS)

    assert both(lambda: finite.first_not_finite(values)) == (None, None)


@every_piece
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_value_that_is_not_finite_makes_the_same_bytes(both, codec, bad):
    values = torch.ones(FULL_TILE_ELEMENTS + 5)
    values[[300, FULL_TILE_ELEMENTS + 3]] = bad

    fast, plain = both(lambda: codec.encode(values, noise=None, first_group=0))

    assert bits(fast) == bits(plain)
    decoded = codec.decode(fast, values.numel())
    assert decoded[[300, FULL_TILE_ELEMENTS + 3]].isnan().all()


@pytest.mark.parametrize(("codec", "block"), [(Int8(), 256), (Int4(), 128), (Sign(), 256)])
def test_block_with_a_value_that_is_not_finite_is_nan_whole(codec, block):
    values = torch.ones(FULL_TILE_ELEMENTS)
    values[300] = math.nan

    decoded = codec.decode(
        codec.encode(values, noise=None, first_group=0), FULL_TILE_ELEMENTS
    ).isnan()

    assert bool(decoded[256 : 256 + block].all())
    assert int(decoded.sum()) == block


@every_lossy
def test_nan_stays_in_residual_and_payload(codec):
    values = torch.ones(FULL_TILE_ELEMENTS)
    values[5] = math.nan
    residual = torch.zeros(FULL_TILE_ELEMENTS, dtype=torch.bfloat16)

    payload = feedback.encode_with_feedback(codec, values, residual, noise=None, first_group=0)

    assert math.isnan(float(codec.decode(payload, FULL_TILE_ELEMENTS)[5]))
    assert math.isnan(float(residual[5]))


def int8_payload(*, scale: float, level: int) -> Tensor:
    """A full tile of zeros but for one block of 256."""
    payload = torch.zeros(Int8().encoded_bytes(FULL_TILE_ELEMENTS), dtype=torch.uint8)
    payload[:4] = torch.tensor([scale]).view(torch.uint8)
    cut = GROUP_ELEMENTS // 256 * 4
    payload[cut : cut + 256] = torch.tensor([level], dtype=torch.int8).view(torch.uint8)
    return payload


@pytest.mark.parametrize("size", [*SIZES, FULL_TILE_ELEMENTS + GROUP_ELEMENTS // 2 + 7])
def test_norm_of_a_residual_has_the_same_bits(both, size):
    """Frames state it, and the chain covers frames; a last group may end in either half."""
    residual = numbers(size).clamp(-3e38, 3e38).bfloat16()  # beyond it bf16 is infinite

    fast, plain = both(lambda: feedback.residual_norm(residual))

    assert fast == plain
    assert math.isfinite(fast)


def test_norm_of_a_residual_with_a_nan_is_one_too(both):
    residual = torch.zeros(FULL_TILE_ELEMENTS, dtype=torch.bfloat16)
    residual[-1] = math.nan

    assert all(map(math.isnan, both(lambda: feedback.residual_norm(residual))))


def square_sum(payload: Tensor) -> float | None:
    fused = Int8().fused(payload, FULL_TILE_ELEMENTS)
    assert fused is not None
    return fused.square_sum(payload, FULL_TILE_ELEMENTS)


@every_piece
@pytest.mark.parametrize("size", SIZES)
def test_square_sum_of_a_payload_is_that_of_its_values(codec, size):
    payload = codec.encode(numbers(size).clamp(-1e6, 1e6), noise=None, first_group=0)
    expected = codec.decode(payload, size).double().square().sum()

    found = codec.fused(payload, size).square_sum(payload, size)

    assert found == pytest.approx(float(expected), rel=1e-6)


@every_piece
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_square_sum_is_not_finite_when_a_value_is_not(codec, bad):
    values = numbers(FULL_TILE_ELEMENTS).clamp(-1e6, 1e6)
    values[-1] = bad
    payload = codec.encode(values, noise=None, first_group=0)

    found = codec.fused(payload, FULL_TILE_ELEMENTS).square_sum(payload, FULL_TILE_ELEMENTS)

    assert not math.isfinite(found)


@pytest.mark.parametrize("level", [0, 1, 7, -8])
@pytest.mark.parametrize("scale", [math.nan, math.inf, 3e38, 6e37])
def test_square_sum_of_int4_is_finite_exactly_when_every_value_is(scale, level):
    payload = torch.zeros(Int4().encoded_bytes(FULL_TILE_ELEMENTS), dtype=torch.uint8)
    payload[:4] = torch.tensor([scale]).view(torch.uint8)
    payload[GROUP_ELEMENTS // 128 * 4] = level % 16 << 4
    values = Int4().decode(payload, FULL_TILE_ELEMENTS)
    fused = Int4().fused(payload, FULL_TILE_ELEMENTS)
    assert fused is not None

    found = fused.square_sum(payload, FULL_TILE_ELEMENTS)

    assert math.isfinite(found) == bool(torch.isfinite(values).all())


@pytest.mark.parametrize("level", [0, 1, -1, 2, 127, -128])
@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, 3e38, 2.6e36])
def test_square_sum_is_finite_exactly_when_every_value_is(scale, level):
    payload = int8_payload(scale=scale, level=level)
    values = Int8().decode(payload, FULL_TILE_ELEMENTS)

    found = square_sum(payload)

    assert found is not None and math.isfinite(found) == bool(torch.isfinite(values).all())


@pytest.mark.parametrize("cut", [1, 100_000])
def test_square_sum_of_a_payload_of_another_size_is_refused(cut):
    payload = int8_payload(scale=1.0, level=1)

    with pytest.raises(FrameError, match="the header and the payload must agree"):
        square_sum(payload[:-cut])


# --- what topk refuses ---


def topk_faults(payloads: np.ndarray, elements: int) -> tuple[list[int], list[int]]:
    """What is wrong with each payload of one chunk: by the loop, and by numpy."""
    fast = [topk_loops.first_fault(row, elements)[1] for row in payloads]
    return fast, chunks.Chunks(payloads, elements).faults().tolist()


@pytest.mark.parametrize("elements", [1, 64, 300, 1000, 4096])
def test_topk_refuses_the_same_chunks_for_the_same_reason(elements):
    rng = np.random.default_rng(3)
    good = TopK().encode(numbers(elements), noise=None, first_group=0).numpy()
    payloads = np.tile(good, (500, 1))
    # One to three bits flipped in most of them, only noise in the last.
    for _ in range(3):
        places = rng.integers(0, good.size, 450)
        payloads[np.arange(450), places] ^= np.left_shift(1, rng.integers(0, 8, 450)).astype(
            np.uint8
        )
    payloads[450:] = rng.integers(0, 256, payloads[450:].shape)

    fast, plain = topk_faults(payloads, elements)

    assert fast == plain
    assert len(set(fast)) >= 4


def test_topk_names_the_same_chunk_in_a_large_payload(both):
    payload = TopK().encode(numbers(SIZES[2]), noise=None, first_group=0)
    payload[82 * 50 + 60] ^= 1  # a high bit of chunk 50

    def refusal() -> str:
        with pytest.raises(FrameError) as refused:
            TopK().decode(payload, SIZES[2])
        return str(refused.value)

    fast, plain = both(refusal)

    assert fast == plain
    assert fast.startswith("chunk 50 of a topk payload of ")


def test_topk_payload_that_names_no_values_has_no_square_sum():
    payload = TopK().encode(numbers(FULL_TILE_ELEMENTS), noise=None, first_group=0)
    fused = TopK().fused(payload, FULL_TILE_ELEMENTS)
    assert fused is not None
    payload[60] ^= 1

    with pytest.raises(FrameError, match="chunk 0"):
        fused.square_sum(payload, FULL_TILE_ELEMENTS)


# --- every processor: operations are neither joined nor regrouped ---


def digests() -> dict[str, str]:
    """What the loops make of the same numbers; `test_bits.py` compares two processors."""
    values, other = numbers(FULL_TILE_ELEMENTS + 77), numbers(FULL_TILE_ELEMENTS + 77, seed=9)
    layout = Layout.of([("a", (FULL_TILE_ELEMENTS + 77,), "float32")])
    found = {}
    for optimizer in OUTER:
        start, delta = values.clamp(-1e3, 1e3), other.clamp(-1e3, 1e3)
        made, _ = stepped(layout, start, [delta], codec=Int8(), optimizer=optimizer)
        found[optimizer] = " ".join(made)
    for codec in LOSSY:
        residual = other.clamp(-1e37, 1e37).bfloat16()
        sent = feedback.encode_with_feedback(
            codec, values.clamp(-1e37, 1e37), residual, noise=None, first_group=0, decay=0.95
        )
        found[codec.format] = digest.root_of(bits(sent) + bits(residual))
    return found


def is_wide() -> bool:
    """Whether the loops were compiled for vectors of 256 bits, which not every x86-64 has."""
    asm = nesterov.move_tile.machine_code.inspect_asm()
    return any("ymm" in text for text in asm.values())


def test_loops_use_the_vectors_that_this_processor_has(skip):
    if "avx2" not in Path("/proc/cpuinfo").read_text().split():
        skip("this CPU has no avx2")
    digests()

    assert is_wide()


def test_joined_multiply_and_add_give_other_bits(skip):
    """The control of the test above: what it would find if operations were joined."""
    if "fma" not in Path("/proc/cpuinfo").read_text().split():
        skip("this CPU has no fused multiply-add")
    compile_joined: Any = functools.partial(numba.njit, fastmath={"contract"})
    joined = compile_joined(nesterov.move_tile.machine_code.py_func)

    def moved(rule):
        values = [numbers(5000, seed=s).clamp(-1e3, 1e3).numpy() for s in (0, 1, 2)]
        rule(*values, np.float32(0.7), np.float32(0.9))
        return [array.tobytes() for array in values]

    assert moved(joined) != moved(nesterov.move_tile)


# --- where there are none ---


def test_small_tiles_do_without():
    assert base.compiled.ready(FULL_TILE_ELEMENTS)
    assert not base.compiled.ready(FULL_TILE_ELEMENTS - 1)


def test_small_models_compile_nothing():
    mine = Compiled()

    mine.prepare(LARGE_ELEMENTS - 1)
    mine.wait()

    assert not mine.ready(FULL_TILE_ELEMENTS)


class Watched:
    """A loop that tells when it is compiled."""

    def __init__(self, told: Callable[[], object]) -> None:
        self._told = told

    @property
    def machine_code(self) -> object:
        return self._told()


def test_large_model_compiles_once(monkeypatch):
    mine, begun = Compiled(), []
    monkeypatch.setattr(jit, "LOOPS", [Watched(lambda: begun.append(1))])

    mine.prepare(LARGE_ELEMENTS)
    mine.prepare(LARGE_ELEMENTS)
    mine.wait()

    assert (begun, mine.ready(FULL_TILE_ELEMENTS)) == ([1], True)


def test_loops_that_are_imported_later_are_compiled_too(monkeypatch):
    """A run may change to another codec: until its loops are there, torch does the work."""
    mine, begun = Compiled(), []
    known = [Watched(lambda: begun.append(1))]
    monkeypatch.setattr(jit, "LOOPS", known)
    mine.prepare(LARGE_ELEMENTS)
    mine.wait()

    known.append(Watched(lambda: begun.append(2)))

    assert not mine.ready(FULL_TILE_ELEMENTS)
    mine.wait()
    assert (begun, mine.ready(FULL_TILE_ELEMENTS)) == ([1, 2], True)


def test_until_all_are_compiled_there_are_none(monkeypatch):
    mine, seen = Compiled(), []
    look = Watched(lambda: seen.append(mine.ready(FULL_TILE_ELEMENTS)))
    monkeypatch.setattr(jit, "LOOPS", [look] * 2)

    mine.prepare(LARGE_ELEMENTS)
    mine.wait()

    assert seen == [False, False]


def test_without_numba_there_are_none(monkeypatch):
    monkeypatch.setattr(base, "find_spec", lambda _: None)
    mine = Compiled()

    mine.prepare(LARGE_ELEMENTS)
    mine.wait()

    assert not mine.ready(FULL_TILE_ELEMENTS)


def test_numba_that_cannot_be_used_is_told_once_and_torch_goes_on(monkeypatch, caplog):
    """It refuses a numpy that is newer than it knows."""

    def refuse():
        raise ImportError("Numba needs NumPy 2.5 or less")

    monkeypatch.setattr(jit, "LOOPS", [Watched(refuse)])
    mine = Compiled()

    mine.prepare(LARGE_ELEMENTS)
    mine.wait()
    mine.prepare(LARGE_ELEMENTS)

    assert not mine.ready(FULL_TILE_ELEMENTS)
    assert [r.message for r in caplog.records] == ["tile loops cannot be compiled; torch goes on"]


def test_process_that_ends_does_not_wait_for_all_of_them():
    """Nor does it die of a thread that still compiles."""
    program = (
        "from atoll.compiled import base, jit\n"
        "first = __import__('threading').Event()\n"
        "ran = []\n"
        "class Loop:\n"
        "    @property\n"
        "    def machine_code(self):\n"
        "        ran.append(1); first.set()\n"
        "        __import__('threading').main_thread().join(); print(len(ran))\n"
        "jit.LOOPS = [Loop(), Loop(), Loop()]\n"
        "base.compiled.prepare(base.LARGE_ELEMENTS)\n"
        "assert first.wait(60)\n"
    )

    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert (made.returncode, made.stdout, made.stderr) == (0, "1\n", "")


@pytest.mark.parametrize("optimizer", OUTER)
def test_tiles_that_are_not_flat_are_refused(optimizer):
    """A loop would run beyond their end."""
    rule = outer(optimizer)
    square = torch.zeros(512, 512)
    slots = {name: torch.zeros(512, 512) for name in rule.slots}

    with pytest.raises(LayoutMismatch, match="must be flat"):
        rule.update(square, torch.ones(512, 512), slots, step=1)


@pytest.mark.parametrize(
    "codec", [Int8(), Int4(), Sign(), Bf16()], ids=["int8", "int4", "sign", "bf16"]
)
@pytest.mark.parametrize("shift", [1, 2, 3])
def test_payload_at_an_odd_place_goes_through_torch(codec, shift):
    values = numbers(FULL_TILE_ELEMENTS).clamp(-1e37, 1e37)
    nbytes = codec.encoded_bytes(FULL_TILE_ELEMENTS)
    residuals = [torch.zeros(FULL_TILE_ELEMENTS, dtype=torch.bfloat16) for _ in range(2)]
    even = feedback.encode_with_feedback(codec, values, residuals[0], noise=None, first_group=0)
    odd = torch.empty(nbytes + 4, dtype=torch.uint8)[shift : shift + nbytes]
    assert codec.fused(even, FULL_TILE_ELEMENTS) is not None

    assert codec.fused(odd, FULL_TILE_ELEMENTS) is None
    feedback.encode_with_feedback(codec, values, residuals[1], noise=None, first_group=0, out=odd)

    assert bits(odd) == bits(even)
    assert bits(residuals[0]) == bits(residuals[1])


def test_payload_at_an_even_address_of_an_odd_storage_goes_through_torch():
    """torch sees no wider numbers there, whatever the address."""
    values = numbers(FULL_TILE_ELEMENTS).clamp(-1e37, 1e37)
    nbytes = Bf16().encoded_bytes(FULL_TILE_ELEMENTS)
    whole = torch.empty(nbytes + 8, dtype=torch.uint8)
    odd = torch.from_numpy(whole.numpy()[3:])
    place = odd[1 : 1 + nbytes]
    residual = torch.zeros(FULL_TILE_ELEMENTS, dtype=torch.bfloat16)

    feedback.encode_with_feedback(Bf16(), values, residual, noise=None, first_group=0, out=place)

    assert bits(place) == bits((values + 0.0).bfloat16())  # a residual of 0 makes -0 a 0


@pytest.mark.parametrize(
    "codec",
    [kind(rounding="stochastic") for kind in (Bf16, Int8, Int4)],
    ids=lambda codec: codec.name,
)
def test_stochastic_rounding_is_not_done_by_a_loop(codec):
    noise = Noise(seed=5, round=1, lane="a")
    layout = Layout.of([("a", (FULL_TILE_ELEMENTS,), "float32")])
    values = numbers(FULL_TILE_ELEMENTS).clamp(-1e3, 1e3)
    rule = Sgd(1.0)
    state = fresh_state(layout, values.clone(), optimizer=rule, download=codec)
    residual = torch.zeros(FULL_TILE_ELEMENTS, dtype=torch.bfloat16)
    payloads: list[Tensor] = []

    fed = feedback.encode_with_feedback(codec, values, residual, noise=noise, first_group=0)
    OuterStep(rule, codec, noise, 1).apply(
        state, [Whole(values, 1)], lambda _, payload: payloads.append(payload)
    )

    assert bits(fed) == bits(codec.encode(values + 0.0, noise=noise, first_group=0))
    difference = state.master - values
    assert bits(payloads[0]) == bits(codec.encode(difference, noise=noise, first_group=0))
