"""A seeded corpus with structure to learn, computed row by row: nothing is stored or downloaded.

Words of a small lexicon follow one another in a first-order Markov chain and are separated by
spaces and sentence stops. Every decision is integer arithmetic on raw Philox words (a stream numpy
keeps stable), so every machine computes the same tokens.
"""

from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from atoll.data import base
from atoll.data.base import Identity, Row
from atoll.errors import ConfigError

GENERATOR = 1  # part of the identity; goes up whenever the same parameters give other tokens

SPACE = 0
STOP = 1
FIRST_LETTER = 2
MAX_LETTERS = 30
MIN_VOCAB = FIRST_LETTER + 2

WORDS = 200
MIN_WORD_LETTERS = 2
MAX_WORD_LETTERS = 7
FOLLOWERS = 8
# One in eight words ends its sentence; one in eight is not one of its predecessor's followers.
# Measured: 300 steps of batch 8 x block 64 (AdamW, lr 3e-3) bring a 2-layer model of width 64 to
# 1.54 and one of width 128 to 1.09 nats per token on held-out rows; the unigram entropy is 3.20.
CHANCE_BITS = 3

_LEXICON_STREAM = 2**64 - 1  # rows are streams 0, 1, …; no corpus has this many
MAX_ROWS = 2**62
_HELD_OUT_OF_ENDLESS = 2**63  # past every training row


def _zipf_slots(ranks: int, scale: int) -> NDArray[np.int64]:
    """int64 [slots]: rank r stands in `scale // (r + 1)` of them.

    So a uniform draw of a slot is a draw of a rank by Zipf's law, in integers alone.
    """
    return np.repeat(np.arange(ranks), [scale // (rank + 1) for rank in range(ranks)])


_COMMON_WORDS: list[int] = _zipf_slots(WORDS, 2520).tolist()
_COMMON_FOLLOWERS: list[int] = _zipf_slots(FOLLOWERS, 840).tolist()


@dataclass(frozen=True)
class Lexicon:
    """The words of a corpus and, for each, the words that usually follow it, commonest first."""

    spellings: tuple[tuple[int, ...], ...]
    followers: tuple[tuple[int, ...], ...]


def _draws(seed: int, stream: int, count: int) -> list[int]:
    key = np.array([seed, stream], dtype=np.uint64)
    draws: list[int] = np.random.Philox(key=key).random_raw(count).tolist()
    return draws


def _make_lexicon(seed: int, letters: int) -> Lexicon:
    each = 1 + MAX_WORD_LETTERS + FOLLOWERS
    draws = _draws(seed, _LEXICON_STREAM, WORDS * each)
    spellings: list[tuple[int, ...]] = []
    followers: list[tuple[int, ...]] = []
    for start in range(0, len(draws), each):
        size, *rest = draws[start : start + each]
        length = MIN_WORD_LETTERS + size % (MAX_WORD_LETTERS - MIN_WORD_LETTERS + 1)
        spellings.append(tuple(FIRST_LETTER + draw % letters for draw in rest[:length]))
        followers.append(
            tuple(_COMMON_WORDS[draw % len(_COMMON_WORDS)] for draw in rest[MAX_WORD_LETTERS:])
        )
    return Lexicon(tuple(spellings), tuple(followers))


@dataclass(frozen=True, kw_only=True)
class SyntheticCorpus:
    """`rows` training rows and, after them, `held_out_rows` held-out ones, each its own stream.

    With `rows` 0 there is no last one: a stream of data.
    """

    seed: int
    rows: int
    held_out_rows: int
    block: int
    vocab: int = FIRST_LETTER + MAX_LETTERS

    def __post_init__(self) -> None:
        base.check_cut(block=self.block, held_out_rows=self.held_out_rows)
        if not 0 <= self.seed < 2**64:
            raise ConfigError(f"data.seed={self.seed!r} must be from 0 to 2**64 - 1")
        if not 0 <= self.rows <= MAX_ROWS:
            raise ConfigError(f"data.rows={self.rows!r} must be from 1 to 2**62, or 0 without end")
        if self.vocab < MIN_VOCAB:
            raise ConfigError(
                f"data.vocab={self.vocab!r} must be at least {MIN_VOCAB}: space, stop, two letters"
            )

    @cached_property
    def _lexicon(self) -> Lexicon:
        return _make_lexicon(self.seed, min(self.vocab - FIRST_LETTER, MAX_LETTERS))

    def identity(self) -> Identity:
        return {"kind": "synthetic", "generator": GENERATOR, **asdict(self)}

    def row(self, index: int) -> Row:
        return self._generate(base.check_index(index, self.rows or MAX_ROWS, what="row"))

    def held_out(self, index: int) -> Row:
        checked = base.check_index(index, self.held_out_rows, what="held-out row")
        return self._generate((self.rows or _HELD_OUT_OF_ENDLESS) + checked)

    def _generate(self, stream: int) -> Row:
        lexicon, length = self._lexicon, self.block + 1
        # The shortest word and its space are three tokens, so this many draws always suffice.
        first, *draws = _draws(self.seed, stream, length // (MIN_WORD_LETTERS + 1) + 2)
        word = _COMMON_WORDS[first % len(_COMMON_WORDS)]
        tokens: list[int] = []
        for draw in draws:
            tokens += lexicon.spellings[word]
            ends_sentence = not draw % (1 << CHANCE_BITS)
            draw >>= CHANCE_BITS
            jumps = not draw % (1 << CHANCE_BITS)
            draw >>= CHANCE_BITS
            tokens += (STOP, SPACE) if ends_sentence else (SPACE,)
            if ends_sentence or jumps:
                word = _COMMON_WORDS[draw % len(_COMMON_WORDS)]
            else:
                rank = _COMMON_FOLLOWERS[draw % len(_COMMON_FOLLOWERS)]
                word = lexicon.followers[word][rank]
        return np.array(tokens[:length], dtype=np.int64)
