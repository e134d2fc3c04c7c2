import hashlib
import math

import numpy as np
import pytest
import torch

from atoll.data import base, batches, registry, shuffle, text
from atoll.data.synthetic import SyntheticCorpus
from atoll.data.text import TextFiles
from atoll.data.tokens import TokenFile
from atoll.errors import ConfigError, StoreError
from atoll.rows import RowRange

SENTENCE = b"the quick brown fox jumps over the lazy dog"  # 43 bytes
CORPUS = SyntheticCorpus(seed=1, rows=10, held_out_rows=4, block=8)


def rows(start: int, stop: int) -> RowRange:
    return RowRange("d" * 16, start, stop)


@pytest.fixture
def sentence(tmp_path):
    path = tmp_path / "sentence.txt"
    path.write_bytes(SENTENCE)
    return path


def as_bytes(row):
    return bytes(row.tolist())


# Cutting


def test_training_rows_are_windows_that_share_one_token(sentence):
    dataset = TextFiles([sentence], block=10, held_out_rows=1)

    rows = [as_bytes(dataset.row(i)) for i in range(dataset.rows)]

    assert rows == [SENTENCE[0:11], SENTENCE[10:21], SENTENCE[20:31]]


def test_held_out_rows_are_the_last(sentence):
    dataset = TextFiles([sentence], block=10, held_out_rows=2)

    rows = [as_bytes(dataset.held_out(i)) for i in range(2)]

    assert rows == [SENTENCE[20:31], SENTENCE[30:41]]


def test_rows_read_across_borders_of_files(tmp_path):
    paths = [tmp_path / name for name in "abcde"]
    for path, part in zip(
        paths, [SENTENCE[:3], b"", SENTENCE[3:4], SENTENCE[4:30], SENTENCE[30:]], strict=True
    ):
        path.write_bytes(part)

    dataset = TextFiles(paths, block=10, held_out_rows=0)

    assert [as_bytes(dataset.row(i)) for i in (0, 2, 3)] == [
        SENTENCE[0:11],
        SENTENCE[20:31],
        SENTENCE[30:41],
    ]


def test_shortest_data_that_fits_is_taken(tmp_path):
    path = tmp_path / "short"
    path.write_bytes(SENTENCE[:21])

    assert TextFiles([path], block=10, held_out_rows=1).rows == 1


def test_data_one_token_too_short_is_refused(tmp_path):
    path = tmp_path / "short"
    path.write_bytes(SENTENCE[:20])

    with pytest.raises(ConfigError, match=r"holds 20 tokens.* need 21"):
        TextFiles([path], block=10, held_out_rows=1)


@pytest.mark.parametrize(
    ("block", "held_out_rows", "named"), [(0, 1, "block=0"), (4, -1, "held_out_rows=-1")]
)
def test_cut_that_makes_no_sense_is_refused(sentence, block, held_out_rows, named):
    with pytest.raises(ConfigError, match=named):
        TextFiles([sentence], block=block, held_out_rows=held_out_rows)


# Text


def test_text_identity_holds_the_hash_of_the_content(tmp_path):
    parts = [tmp_path / "one", tmp_path / "two"]
    content = b"x" * ((1 << 20) + 7), b"y" * 9
    for path, data in zip(parts, content, strict=True):
        path.write_bytes(data)

    identity = TextFiles(parts, block=10, held_out_rows=1).identity()

    assert identity["sha256"] == hashlib.sha256(b"".join(content)).hexdigest()


def test_changed_byte_changes_the_dataset_id(sentence):
    before = TextFiles([sentence], block=10, held_out_rows=1).identity()

    sentence.write_bytes(SENTENCE.replace(b"quick", b"quack"))

    after = TextFiles([sentence], block=10, held_out_rows=1).identity()
    assert base.first_difference(before, after) == ("sha256", before["sha256"], after["sha256"])


def test_missing_text_file_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.txt' does not exist"):
        TextFiles([tmp_path / "gone.txt"], block=10, held_out_rows=1)


def test_pattern_names_files_in_sorted_order(tmp_path):
    for name in ("b.txt", "a.txt", "c.md"):
        (tmp_path / name).touch()

    files = text.find_files(str(tmp_path / "*.txt"))

    assert [path.name for path in files] == ["a.txt", "b.txt"]


def test_file_whose_name_looks_like_a_pattern_is_itself(tmp_path):
    (tmp_path / "[1].txt").touch()

    assert text.find_files(str(tmp_path / "[1].txt")) == [tmp_path / "[1].txt"]


def test_pattern_without_files_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="names no file"):
        text.find_files(str(tmp_path / "*.txt"))


def test_text_file_that_shrinks_after_opening_is_refused_by_name(sentence):
    dataset = TextFiles([sentence], block=10, held_out_rows=1)
    sentence.write_bytes(SENTENCE[:25])

    with pytest.raises(StoreError, match=r"sentence\.txt' ends at byte 25"):
        dataset.row(2)


def test_text_file_that_vanishes_after_opening_is_refused_by_name(sentence):
    dataset = TextFiles([sentence], block=10, held_out_rows=1)
    sentence.unlink()

    with pytest.raises(StoreError, match=r"sentence\.txt' can no longer be read"):
        dataset.row(0)


# Token files


@pytest.fixture
def token_path(tmp_path):
    path = tmp_path / "tokens.bin"
    path.write_bytes(np.arange(100, dtype="<u2").tobytes())
    return path


def test_token_file_gives_its_little_endian_numbers(tmp_path):
    path = tmp_path / "tokens.bin"
    path.write_bytes(bytes.fromhex("01000200000103000000"))

    dataset = TokenFile(path, dtype="uint16", vocab=257, block=4, held_out_rows=0)

    assert dataset.row(0).tolist() == [1, 2, 256, 3, 0]


def test_token_at_vocab_is_refused_by_its_place_and_value(token_path):
    dataset = TokenFile(token_path, dtype="uint16", vocab=90, block=10, held_out_rows=1)

    with pytest.raises(ConfigError, match=r"token 90 of .*tokens\.bin' is 90; .* vocab=90"):
        dataset.held_out(0)


def test_row_whose_largest_token_is_just_below_vocab_is_read(token_path):
    dataset = TokenFile(token_path, dtype="uint16", vocab=81, block=10, held_out_rows=1)

    assert dataset.row(7).max() == 80


def test_token_file_of_an_odd_size_is_refused(tmp_path):
    path = tmp_path / "odd"
    path.write_bytes(bytes(101))

    with pytest.raises(ConfigError, match="101 bytes, not a multiple of 2"):
        TokenFile(path, dtype="uint16", vocab=9, block=10, held_out_rows=1)


def test_missing_token_file_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="gone' does not exist"):
        TokenFile(tmp_path / "gone", dtype="uint16", vocab=9, block=10, held_out_rows=1)


def test_empty_token_file_is_refused(tmp_path):
    (tmp_path / "empty").touch()

    with pytest.raises(ConfigError, match="holds 0 tokens"):
        TokenFile(tmp_path / "empty", dtype="uint16", vocab=9, block=10, held_out_rows=1)


def test_unknown_dtype_is_refused_with_the_known_ones(token_path):
    with pytest.raises(ConfigError, match=r"dtype='int8'.*\['uint16', 'uint32'\]"):
        TokenFile(token_path, dtype="int8", vocab=9, block=10, held_out_rows=1)


# Synthetic corpus


def test_synthetic_corpus_gives_its_golden_tokens():
    corpus = SyntheticCorpus(seed=1, rows=1000, held_out_rows=4, block=64)

    rows = np.stack([corpus.row(0), corpus.row(999), corpus.held_out(3)])

    assert hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest() == GOLDEN_SYNTHETIC


def test_synthetic_held_out_rows_are_not_training_rows():
    corpus = SyntheticCorpus(seed=1, rows=200, held_out_rows=50, block=64)
    training = {corpus.row(i).tobytes() for i in range(200)}

    held_out = {corpus.held_out(i).tobytes() for i in range(50)}

    assert not training & held_out


def test_synthetic_rows_depend_on_the_seed():
    other = SyntheticCorpus(seed=2, rows=10, held_out_rows=4, block=8)

    assert not np.array_equal(CORPUS.row(0), other.row(0))


@pytest.mark.parametrize("block", [1, 2, 3, 500])
def test_synthetic_rows_fill_any_block(block):
    corpus = SyntheticCorpus(seed=1, rows=200, held_out_rows=0, block=block)

    assert {corpus.row(i).shape for i in range(200)} == {(block + 1,)}


def test_synthetic_seed_may_use_all_64_bits():
    corpus = SyntheticCorpus(seed=2**64 - 1, rows=1, held_out_rows=0, block=8)

    assert corpus.row(0).shape == (9,)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**64}, "seed="),
        ({"rows": -1}, "rows=-1"),
        ({"vocab": 3}, "vocab=3"),
        ({"block": 0}, "block=0"),
    ],
)
def test_synthetic_corpus_refuses_a_setting_by_name(change, named):
    settings = {"seed": 1, "rows": 10, "held_out_rows": 4, "block": 8, **change}

    with pytest.raises(ConfigError, match=named):
        SyntheticCorpus(**settings)


def test_synthetic_corpus_has_structure_beyond_its_unigrams():
    corpus = SyntheticCorpus(seed=1, rows=2000, held_out_rows=0, block=64)
    pairs = np.zeros((corpus.vocab, corpus.vocab))
    for index in range(2000):
        row = corpus.row(index)
        np.add.at(pairs, (row[:-1], row[1:]), 1)

    joint = pairs[pairs > 0] / pairs.sum()
    before = pairs.sum(axis=1)[pairs.sum(axis=1) > 0] / pairs.sum()
    bigram_entropy = -(joint * np.log(joint)).sum() + (before * np.log(before)).sum()

    # One letter of context is worth a quarter of the entropy; word and chain are worth the rest.
    assert bigram_entropy < 0.75 * base.unigram_entropy(corpus)


# Identity and entropy


def test_dataset_id_is_the_start_of_the_hash_of_canonical_json():
    expected = hashlib.sha256(b'{"block":8,"kind":"text"}').hexdigest()[:16]

    assert base.dataset_id({"kind": "text", "block": 8}) == expected


def test_first_difference_is_none_for_the_same_data():
    assert base.first_difference(CORPUS.identity(), CORPUS.identity()) is None


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        ({"kind": "text", "block": 9, "vocab": 4}, ("block", 8, 9)),
        ({"kind": "tokens", "block": 9, "vocab": 4}, ("kind", "text", "tokens")),
        ({"kind": "text", "block": 8}, ("vocab", 4, None)),
        ({"kind": "text", "block": 8, "vocab": 4, "seed": 1}, ("seed", None, 1)),
    ],
)
def test_first_difference_names_field_and_both_values(theirs, expected):
    mine = {"kind": "text", "block": 8, "vocab": 4}

    assert base.first_difference(mine, theirs) == expected


def test_unigram_entropy_of_even_tokens_is_the_log_of_their_number(tmp_path):
    path = tmp_path / "even"
    path.write_bytes(b"abcd" * 64 + b"a")
    dataset = TextFiles([path], block=8, held_out_rows=0)

    assert base.unigram_entropy(dataset) == pytest.approx(math.log(4), rel=1e-12)


def test_unigram_entropy_samples_the_whole_length_of_the_data(tmp_path):
    path = tmp_path / "halves"
    path.write_bytes(b"a" * 801 + b"b" * 800)
    dataset = TextFiles([path], block=8, held_out_rows=0)

    assert base.unigram_entropy(dataset, rows=20) == pytest.approx(math.log(2), rel=1e-12)


# Registry


def test_unknown_kind_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'video'.*\['synthetic', 'text', 'tokens'\]"):
        registry.open_dataset({"kind": "video"})


def test_unknown_key_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"data\.path.*\['block', 'held_out_rows'\]"):
        registry.open_dataset({"kind": "text", "path": "/x", "block": 1, "held_out_rows": 1})


def test_missing_key_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"data\.held_out_rows is missing"):
        registry.open_dataset({"kind": "text", "block": 1}, location="x")


@pytest.mark.parametrize("block", ["8", 8.0, True, None])
def test_value_of_another_type_is_refused(block):
    with pytest.raises(ConfigError, match=r"data\.block=.* whole number"):
        registry.open_dataset({"kind": "text", "block": block, "held_out_rows": 1}, location="x")


def test_files_without_a_location_are_refused():
    with pytest.raises(ConfigError, match="no location was given"):
        registry.open_dataset({"kind": "text", "block": 8, "held_out_rows": 1})


def test_location_of_computed_data_is_refused():
    definition = {"kind": "synthetic", "seed": 1, "rows": 9, "held_out_rows": 1, "block": 8}

    with pytest.raises(ConfigError, match="drop it"):
        registry.open_dataset(definition, location="x")


# Batches


def row_indices(tensor):
    """Which rows of CORPUS a batch holds."""
    known = {CORPUS.row(i).tobytes(): i for i in range(CORPUS.rows)}
    return [known[row.numpy().tobytes()] for row in tensor]


def test_batches_are_int64_tensors_of_the_batch_size():
    made = list(batches.batches(CORPUS, [rows(0, 8)], batch=4, seed=1))

    assert [(b.dtype, tuple(b.shape)) for b in made] == [(torch.int64, (4, 9))] * 2


def test_batches_hold_the_rows_that_the_permutation_names():
    ranges = [rows(3, 6), rows(17, 21)]

    made = list(batches.batches(CORPUS, ranges, batch=4, seed=1))

    positions = np.array([3, 4, 5, 17, 18, 19, 20])  # 20 is the first of the third epoch
    assert row_indices(torch.cat(made)) == shuffle.rows_at(positions, rows=10, seed=1).tolist()


def test_last_batch_is_smaller_when_rows_do_not_divide():
    made = list(batches.batches(CORPUS, [rows(0, 3), rows(5, 9)], batch=4, seed=1))

    assert [len(b) for b in made] == [4, 3]


def test_one_epoch_of_batches_holds_every_row_once():
    made = list(batches.batches(CORPUS, [rows(10, 20)], batch=3, seed=1))

    assert sorted(row_indices(torch.cat(made))) == list(range(10))


def test_held_out_batches_hold_the_rows_asked_for():
    made = list(batches.held_out_batches(CORPUS, [1, 2, 3], batch=2))

    expected = np.stack([CORPUS.held_out(i) for i in (1, 2, 3)])
    assert [len(b) for b in made] == [2, 1]
    assert np.array_equal(torch.cat(made).numpy(), expected)


def test_batch_below_one_row_is_refused_before_the_first_batch():
    with pytest.raises(ConfigError, match="batch=0"):
        batches.batches(CORPUS, [rows(0, 8)], batch=0, seed=1)


GOLDEN_SYNTHETIC = "1f191a5d87adc4ccf51b2a4dfc2f0e776fac3b53f7da7d1bef56157e8c9dcece"
