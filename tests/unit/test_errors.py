"""The error contract: stable codes, one sentence, and the way back from the wire."""

import ast
from pathlib import Path

import pytest

import atoll
from atoll import errors
from atoll.errors import AtollError, ProtocolError

ALL = errors.tree(AtollError)
SOURCES = sorted(Path(atoll.__file__).parent.rglob("*.py"))
# Words that say nothing, or plead; `!r}` in a format is not an exclamation mark.
BANNED = ("invalid", "failed to", "please", "!", "oops", "something went wrong")

# The codes cross the wire and stand in counters: changing one is a change of the protocol.
CODES = {
    "ADDRESS_UNREACHABLE", "ATOLL", "AUTH", "BLOB_CHANGED", "BLOB_MISSING",
    "CONFIG", "CONFLICT", "CONTRIBUTION", "DATASET_MISMATCH", "DISK_FAILED", "DIVERGED",
    "EMPTY_SUM", "EVICTED", "EXHAUSTED", "FENCED", "FRAME", "GROUP_BROKEN", "INTERNAL",
    "LAYOUT_MISMATCH",
    "LEASE_LOST", "LEDGER_VERSION", "LEFT_OUT", "MISSING_RANKS", "MANIFEST_MISMATCH",
    "NOT_FINITE", "NOT_READY", "NOT_SUMMED", "OBJECT_CHANGED", "OBJECT_MISSING",
    "OBJECT_REFUSED", "OBJECT_SIZE", "OVERSIZED", "PERMISSION_DENIED", "PROTOCOL",
    "ROUND", "STALE", "STALE_GENERATION", "STALE_GROUP", "STATE_DAMAGED", "STATE_HELD",
    "STATE_UNSAFE",
    "STORAGE_FULL", "STORE", "STORE_AWAY", "STORE_LATE", "SUPERSEDED", "TOO_MANY_WORKERS",
    "UNAUTHENTICATED", "UNKNOWN_WORKER", "UNREACHABLE", "VERSION_MISMATCH", "WORK", "WORKER_TAKEN",
    "WRONG_BASE", "WRONG_ROUND",
}  # fmt: skip


def test_codes_are_the_released_ones():
    assert {cls.code for cls in ALL} == CODES


def test_every_class_has_a_code_of_its_own():
    assert len({cls.code for cls in ALL}) == len(ALL)


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.code)
def test_error_comes_back_from_its_code(cls):
    back = errors.from_code(cls.code, "what happened")

    assert type(back) is cls
    assert str(back) == "what happened"


def test_unknown_code_becomes_a_protocol_error_that_names_it():
    back = errors.from_code("NEWER", "what happened")

    assert type(back) is ProtocolError
    assert str(back) == "what happened (code 'NEWER')"


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.code)
def test_message_is_the_class_docstring_when_none_is_given(cls):
    assert str(cls()) == cls.__doc__ != ""


def test_only_what_can_succeed_later_is_to_be_retried():
    """An island repeats these and nothing else."""
    repeated = {cls.code for cls in ALL if cls.retry}

    assert repeated == {
        "DISK_FAILED", "EXHAUSTED", "INTERNAL", "NOT_READY", "STORAGE_FULL", "STORE_AWAY",
        "SUPERSEDED", "UNREACHABLE",
    }  # fmt: skip


def _sentences(path: Path) -> list[tuple[int, str]]:
    """The literal parts of everything a file raises, with their lines."""
    found = []
    for raised in ast.walk(ast.parse(path.read_text())):
        if isinstance(raised, ast.Raise) and raised.exc is not None:
            for node in ast.walk(raised.exc):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append((node.lineno, node.value))
    return found


def test_no_message_pleads_shouts_or_says_nothing():
    offending = [
        (path.name, line, text)
        for path in SOURCES
        if "proto" not in path.parts
        for line, text in _sentences(path)
        if any(word in text.lower() for word in BANNED)
    ]

    assert offending == []
