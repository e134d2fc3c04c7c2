"""Statements: one spelling, every field checked, signed for this purpose alone."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import FrameError
from atoll.gather import statement as statements
from atoll.gather.keys import SecretKey
from atoll.gather.statement import Statement
from atoll.gather.words import Reason, Skip

KEY = SecretKey(bytes(range(32)))
STATEMENT = Statement(
    run_id="run-1",
    manifest_sha256="a" * 64,
    uid="island.b",
    window=7,
    base_digest="b" * 64,
    sample_digest="c" * 64,
    nbytes=82,
    sha256="d" * 64,
)
DOCUMENT = statements.signed(STATEMENT, KEY)
DOMAIN = b"atoll/gather/statement/1\0"


def spelled(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def forged(change: Callable[[dict[str, Any]], object], *, domain: bytes = DOMAIN) -> bytes:
    """A statement with a change, signed as the owner of the key would, by other code."""
    inner = json.loads(DOCUMENT)["statement"]
    change(inner)
    signature = Ed25519PrivateKey.from_private_bytes(KEY.seed).sign(domain + spelled(inner))
    return spelled({"signature": signature.hex(), "statement": inner})


def refused(data: bytes) -> Reason:
    with pytest.raises(Skip) as raised:
        statements.read(data, KEY.public)
    assert raised.value.sentence
    return raised.value.reason


def test_statement_is_read_as_it_was_signed() -> None:
    assert statements.read(DOCUMENT, KEY.public) == STATEMENT


def test_document_is_what_other_code_makes_of_the_format() -> None:
    """The control of every forgery below: unchanged, it is accepted."""
    assert forged(lambda _: None) == DOCUMENT


@pytest.mark.parametrize("name", statements.FIELDS)
def test_field_that_lacks_is_refused_though_signed(name: str) -> None:
    assert refused(forged(lambda inner: inner.pop(name))) is Reason.STATEMENT


def test_field_that_is_unknown_is_refused_though_signed() -> None:
    assert refused(forged(lambda inner: inner.update(extra=1))) is Reason.STATEMENT


WRONG = [
    ("run_id", ""), ("run_id", "a b"), ("run_id", "r" * 129), ("run_id", 1), ("run_id", None),
    ("manifest_sha256", "A" * 64), ("manifest_sha256", "a" * 63), ("base_digest", "g" * 64),
    ("sample_digest", None), ("sha256", "d" * 65), ("sha256", ["d"]),
    ("uid", ""), ("uid", "../x"), ("uid", "a\n"), ("uid", "a" * 65), ("uid", "é"),
    ("window", -1), ("window", True), ("window", 7.0), ("window", "7"), ("window", 2**63),
    ("nbytes", 0), ("nbytes", -82), ("nbytes", 82.0), ("nbytes", False), ("nbytes", 10**30),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_field_that_breaks_its_rule_is_refused_though_signed(name: str, value: object) -> None:
    assert refused(forged(lambda inner: inner.update({name: value}))) is Reason.STATEMENT


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_statement_that_breaks_a_rule_is_never_made(name: str, value: Any) -> None:
    with pytest.raises(FrameError, match=f"statement {name}="):
        replace(STATEMENT, **{name: value})


SPELLINGS = {
    "space": DOCUMENT.replace(b":7", b": 7"),
    "newline": DOCUMENT + b"\n",
    "byte order mark": b"\xef\xbb\xbf" + DOCUMENT,
    "escape": DOCUMENT.replace(b"run-1", b"run\\u002d1"),
    "order": b'{"statement":'
    + spelled(json.loads(DOCUMENT)["statement"])
    + b',"signature":'
    + spelled(json.loads(DOCUMENT)["signature"])
    + b"}",
    "exponent": DOCUMENT.replace(b'"window":7', b'"window":7e0'),
    "upper-case signature": DOCUMENT.replace(
        json.loads(DOCUMENT)["signature"].encode(),
        json.loads(DOCUMENT)["signature"].upper().encode(),
    ),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_other_spelling_is_refused(name: str) -> None:
    assert SPELLINGS[name] != DOCUMENT
    assert refused(SPELLINGS[name]) is Reason.STATEMENT


def swapped(old: bytes, new: bytes) -> bytes:
    assert old in DOCUMENT
    return DOCUMENT.replace(old, new)


SHAPES = {
    "nothing": b"",
    "no json": b"statement",
    "list": b"[]",
    "number": b"1",
    "null": b"null",
    "cut": DOCUMENT[:-1],
    "two": DOCUMENT * 2,
    "duplicate key": swapped(b'"uid"', b'"uid":"x","uid"'),
    "duplicate outer key": swapped(b'"signature"', b'"signature":"","signature"'),
    "NaN": swapped(b'"window":7', b'"window":NaN'),
    "Infinity": swapped(b'"nbytes":82', b'"nbytes":Infinity'),
    "digits": swapped(b'"nbytes":82', b'"nbytes":' + b"1" * 3000),
    "deep": b"[" * 4096,
    "not ascii": swapped(b"run-1", "rün-1".encode()),
    "inner list": b'{"signature":"' + b"0" * 128 + b'","statement":[]}',
    "no signature": spelled({"statement": json.loads(DOCUMENT)["statement"]}),
    "unknown outer": spelled({**json.loads(DOCUMENT), "extra": 1}),
    "short signature": spelled({**json.loads(DOCUMENT), "signature": "00"}),
}


@pytest.mark.parametrize("name", SHAPES)
def test_document_of_another_shape_is_refused(name: str) -> None:
    assert refused(SHAPES[name]) is Reason.STATEMENT


def test_document_beyond_its_limit_is_refused_before_it_is_parsed() -> None:
    long = forged(lambda inner: inner.update(run_id="r" * 4096))

    with pytest.raises(Skip, match="at most 4096") as raised:
        statements.read(long, KEY.public)
    assert raised.value.reason is Reason.STATEMENT


def test_longest_statement_fits_its_limit() -> None:
    longest = replace(STATEMENT, run_id="r" * 128, uid="u" * 64, window=2**63 - 1, nbytes=2**63 - 1)

    assert statements.read(statements.signed(longest, KEY), KEY.public) == longest


def test_signature_of_another_domain_is_refused() -> None:
    other = forged(lambda _: None, domain=b"atoll/gather/statement/2\0")
    none = forged(lambda _: None, domain=b"")

    assert (refused(other), refused(none)) == (Reason.SIGNATURE, Reason.SIGNATURE)


CHANGES: dict[str, Any] = {
    "run_id": "run-2",
    "manifest_sha256": "e" * 64,
    "uid": "island.c",
    "window": 8,
    "base_digest": "e" * 64,
    "sample_digest": "e" * 64,
    "nbytes": 83,
    "sha256": "e" * 64,
}


@pytest.mark.parametrize("name", statements.FIELDS)
def test_signature_of_another_statement_is_refused_whatever_field_differs(name: str) -> None:
    other = statements.signed(replace(STATEMENT, **{name: CHANGES[name]}), KEY)
    stolen = json.loads(DOCUMENT)["signature"]

    assert refused(spelled({**json.loads(other), "signature": stolen})) is Reason.SIGNATURE


def test_signature_of_another_key_is_refused() -> None:
    other = SecretKey(bytes(32))

    assert refused(statements.signed(STATEMENT, other)) is Reason.SIGNATURE


@given(st.integers(0, len(DOCUMENT) - 1), st.integers(1, 255))
def test_changed_byte_is_always_refused(place: int, change: int) -> None:
    data = bytearray(DOCUMENT)
    data[place] ^= change

    assert refused(bytes(data)) in (Reason.STATEMENT, Reason.SIGNATURE)


@given(st.binary(max_size=200))
def test_bytes_of_any_kind_are_refused_with_a_reason(data: bytes) -> None:
    assert refused(data) is Reason.STATEMENT


def test_unverified_reads_what_another_signed() -> None:
    data = statements.signed(STATEMENT, SecretKey(bytes(32)))

    assert statements.unverified(data) == STATEMENT
