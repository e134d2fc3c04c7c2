import struct

import pytest
import torch
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.errors import ConfigError, LayoutMismatch
from atoll.layout import GROUP_ELEMENTS, LEAF_ELEMENTS, Layout, cut
from atoll.sums.digest import RunningDigest, composed, digest, first_difference
from atoll.sums.digest import cut as cut_digest

# No deadline and no health check of speed: a busy machine must not fail a claim about values.
quick = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


def three() -> Layout:
    return Layout.of([("a", (3, 2), "float32"), ("b", (), "float32"), ("c", (5,), "float32")])


def hash_of(values: list[float]) -> bytes:
    return blake3(struct.pack(f"<{len(values)}f", *values)).digest()


def test_leaves_are_the_hashes_of_each_tensors_little_endian_bytes():
    flat = torch.arange(12, dtype=torch.float32) / 4
    values = flat.tolist()

    leaves = digest(three(), flat).leaves

    assert leaves == hash_of(values[:6]) + hash_of(values[6:7]) + hash_of(values[7:])


def test_root_is_the_hash_of_the_leaves():
    params = digest(three(), torch.arange(12, dtype=torch.float32))

    assert params.root == blake3(params.leaves).hexdigest()


def test_digest_is_a_known_value():
    # Leaves of 6, 1 and 5 zeros: computed once with blake3 alone.
    params = digest(three(), three().zeros())

    assert params.root == "40aa97273f5226b52b19e52ae4c6e93f9eae7dd3b1163ee868dca1e1e1959677"


@pytest.mark.parametrize("threads", [2, 3, 16])
def test_digest_is_the_same_for_every_thread_count(threads):
    model = Layout.of((f"t{i}", (1000 + i,), "float32") for i in range(40))
    flat = torch.arange(model.size, dtype=torch.float32)

    assert digest(model, flat, threads=threads) == digest(model, flat)


def test_digest_cuts_a_large_tensor_into_leaves():
    model = Layout.of([("w", (LEAF_ELEMENTS + 1,), "float32")])
    flat = model.zeros()
    flat[-1] = 2.5

    leaves = digest(model, flat, threads=2).leaves

    assert leaves == blake3(bytes(4 * LEAF_ELEMENTS)).digest() + hash_of([2.5])


def test_digest_tells_the_zeros_apart():
    plus, minus = torch.zeros(12), -torch.zeros(12)

    assert digest(three(), plus).root != digest(three(), minus).root


@quick
@given(st.integers(0, 11), st.integers(0, 31))
def test_one_flipped_bit_is_found_in_its_tensor(element, bit):
    flat = torch.arange(12, dtype=torch.float32)
    other = flat.clone()
    other.view(torch.int32)[element] ^= torch.tensor(-(2**31) if bit == 31 else 2**bit).int()

    named = first_difference(three(), digest(three(), flat).leaves, digest(three(), other).leaves)

    assert named == three().name_at(element)


def test_first_difference_names_the_first_of_several():
    mine = digest(three(), three().zeros()).leaves
    other = three().zeros()
    other[6:] = 1.0

    assert first_difference(three(), mine, digest(three(), other).leaves) == "b"


def test_first_difference_is_none_when_all_leaves_agree():
    leaves = digest(three(), three().zeros()).leaves

    assert first_difference(three(), leaves, bytes(leaves)) is None


def test_first_difference_names_the_tensor_of_a_later_leaf():
    model = Layout.of([("w", (LEAF_ELEMENTS + 1,), "float32"), ("x", (1,), "float32")])

    assert first_difference(model, bytes(96), bytes(32) + b"\x01" + bytes(63)) == "w"


@pytest.mark.parametrize(
    ("mine", "theirs", "side"),
    [(bytes(95), bytes(96), "mine"), (bytes(96), bytes(128), "theirs"), (bytes(96), b"", "theirs")],
)
def test_first_difference_refuses_digests_of_another_layout(mine, theirs, side):
    with pytest.raises(LayoutMismatch, match=f"'{side}' have .* 3 leaves"):
        first_difference(three(), mine, theirs)


@pytest.mark.parametrize(
    "flat",
    [
        torch.zeros(11),
        torch.zeros(13),
        torch.zeros(3, 4),
        torch.zeros(12).double(),
        torch.zeros(24)[::2],
    ],
    ids=["short", "long", "rank", "dtype", "strided"],
)
def test_digest_refuses_a_buffer_that_is_not_the_layouts(flat):
    with pytest.raises(LayoutMismatch, match=r"12 contiguous torch\.float32 values"):
        digest(three(), flat)


@pytest.mark.parametrize("threads", [0, -1])
def test_digest_refuses_less_than_one_thread(threads):
    with pytest.raises(ConfigError, match=f"threads={threads} must be at least 1"):
        digest(three(), three().zeros(), threads=threads)


def test_running_digest_hashes_a_leaf_once_it_is_final_and_not_before():
    model = Layout.of([("a", (LEAF_ELEMENTS + 7,), "float32"), ("b", (5,), "float32")])
    flat = torch.zeros(model.size)
    running = RunningDigest(model, flat)

    flat[:LEAF_ELEMENTS] = 1.0
    running.reached(LEAF_ELEMENTS)
    flat[LEAF_ELEMENTS:] = 2.0
    running.reached(LEAF_ELEMENTS + 3)  # inside the second leaf
    flat[LEAF_ELEMENTS + 3 :] = 3.0

    assert running.finish() == digest(model, flat)


@pytest.mark.parametrize("edge", [0, 100, LEAF_ELEMENTS, 2 * LEAF_ELEMENTS + 1])
def test_digests_of_parts_join_to_that_of_the_whole(edge):
    """Also where a leaf lies over the edge of two parts."""
    model = Layout.of([("a", (3 * LEAF_ELEMENTS + 7,), "float32"), ("b", (5,), "float32")])
    flat = torch.arange(model.size, dtype=torch.float32)
    parts = [RunningDigest(model, flat), RunningDigest(model, flat, first=edge)]
    parts[1].reached(model.size)
    parts[0].reached(edge)

    assert parts[0].joined(parts[1:]) == digest(model, flat)


def test_part_hashes_nothing_before_it():
    model = Layout.of([("a", (2 * LEAF_ELEMENTS,), "float32")])
    flat = torch.zeros(model.size)
    later = RunningDigest(model, flat, first=LEAF_ELEMENTS)
    later.reached(model.size)
    flat[:LEAF_ELEMENTS] = 1.0  # another thread's part, made after it

    assert RunningDigest(model, flat).joined([later]) == digest(model, flat)


def test_leaf_over_the_edge_of_two_parts_is_hashed_when_both_are_final():
    model = Layout.of([("a", (2 * LEAF_ELEMENTS,), "float32")])
    flat = torch.zeros(model.size)
    edge = LEAF_ELEMENTS // 2
    later = RunningDigest(model, flat, first=edge)
    later.reached(model.size)
    flat[:edge] = 1.0
    earlier = RunningDigest(model, flat)
    earlier.reached(edge)

    assert earlier.joined([later]) == digest(model, flat)


# --- fragments ---

sizes = st.lists(
    st.one_of(st.integers(1, 50), st.integers(1, 2 * GROUP_ELEMENTS), st.just(LEAF_ELEMENTS + 7)),
    min_size=1,
    max_size=5,
)


@quick
@given(sizes, st.data())
def test_digests_of_fragments_compose_to_the_runs_and_are_cut_out_of_it(tensor_sizes, data):
    model = Layout.of((f"t{i}", (n,), "float32") for i, n in enumerate(tensor_sizes))
    names = [t.name for t in model.tensors]
    edge = data.draw(st.integers(1, len(names)))
    parts = [part for part in (names[:edge], names[edge:]) if part]
    flat = torch.arange(model.size, dtype=torch.float32)

    fragments = cut(model, parts)
    apart = [digest(f.layout, f.of(flat)) for f in fragments]

    assert composed(apart) == digest(model, flat)
    assert cut_digest(digest(model, flat), [f.layout for f in fragments]) == apart


def test_fragments_in_another_order_compose_to_another_root():
    flat = torch.arange(12, dtype=torch.float32)
    apart = [digest(f.layout, f.of(flat)) for f in cut(three(), [["a"], ["b", "c"]])]

    assert composed(reversed(apart)).root != digest(three(), flat).root
