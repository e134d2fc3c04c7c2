"""All ranks go on, or all stop with the same sentence: what one met reaches every other by name.

A rank that met trouble still takes part in what the others wait for, and says so at the next vote.
So nobody waits out a deadline for a rank that lives. A rank that is gone is the collectives' to
name (MissingRanks).
"""

import json
from collections.abc import Callable
from typing import TypeVar

from atoll import canonical, errors
from atoll.collectives.base import Collectives, Key
from atoll.errors import AtollError, GroupBroken, ProtocolError
from atoll.gather.turns import Turns

T = TypeVar("T")
LIMIT_BYTES = 4_096  # of one rank's word
MAX_CHARACTERS = 500  # of its sentence: as ASCII a character takes at most 6 bytes


def vote(ranks: Collectives, key: Key, trouble: Exception | None) -> None:
    """Returns once every rank has said that all is well; else raises on every rank.

    The error is of the lowest troubled rank's kind and names all that met something. One that is no
    AtollError (a bug, a disk) becomes GroupBroken.
    """
    told: dict[str, str] = {}
    if trouble is not None:
        code = (isinstance(trouble, AtollError) and trouble.code) or GroupBroken.code
        sentence = str(trouble) or type(trouble).__name__
        told = {"code": code, "sentence": sentence[:MAX_CHARACTERS]}
    words = ranks.all_gather_bytes(key, canonical.dumps(told).encode(), limit=LIMIT_BYTES)
    found = [(rank, _read(word, rank)) for rank, word in enumerate(words)]
    troubled = [(rank, *word) for rank, word in found if word is not None]
    if troubled:
        sentences = "; ".join(f"rank {rank}: {sentence}" for rank, _, sentence in troubled)
        raise errors.from_code(troubled[0][1], sentences) from trouble


def on_all(ranks: Collectives, turns: Turns, work: Callable[[], T]) -> T:
    """`work` on every rank; what it raises on one reaches all."""
    trouble: Exception | None = None
    try:
        done = work()
    except Exception as exc:  # whatever it is, the others must hear of it
        trouble = exc
    vote(ranks, turns.next("control"), trouble)
    return done


def agree(ranks: Collectives, key: Key, flag: bool) -> bool:
    """Whether every rank gave the flag: the ready flag, or the skip flag turned round."""
    words = ranks.all_gather_bytes(key, b"\1" if flag else b"\0", limit=1)
    return all(word == b"\1" for word in words)


def _read(word: bytes, rank: int) -> tuple[str, str] | None:
    """A rank's code and sentence; None where all is well."""
    try:
        told = json.loads(word)
        if told == {}:
            return None
        code, sentence = told["code"], told["sentence"]
        if not (isinstance(code, str) and isinstance(sentence, str)):
            raise TypeError
    except (ValueError, KeyError, TypeError) as exc:
        raise ProtocolError(
            f"rank {rank} gave a word of {len(word)} bytes that is no vote; all ranks of a group "
            f"must run the same program"
        ) from exc
    return code, sentence
