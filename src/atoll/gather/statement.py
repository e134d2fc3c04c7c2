"""A peer's signed statement of what it published for a window.

The document is canonical JSON of at most 4 KiB:

    {"signature":"<128 hex digits>","statement":{"base_digest":…,"manifest_sha256":…,"nbytes":…,
     "run_id":…,"sample_digest":…,"sha256":…,"uid":…,"window":…}}

The signature is over b"atoll/gather/statement/1\\0" and the canonical JSON of the inner object, so
nothing else that the key signs can pass for a statement. One statement by one key has one spelling.
Whether it is the one that a window expects is the validator's question.
"""

from dataclasses import dataclass, fields
from typing import Annotated, Any, get_type_hints

from atoll import canonical
from atoll.errors import FrameError
from atoll.gather.keys import SIGNATURE_BYTES, PublicKey, SecretKey
from atoll.gather.words import Reason, Skip
from atoll.wire import schema
from atoll.wire.schema import Natural, Sha256, Whole

MAX_BYTES = 4096
DOMAIN = b"atoll/gather/statement/1\0"
_OF = "statement"
_DOCUMENT = ("signature", "statement")
_SIGNATURE = schema.matching(
    f"[0-9a-f]{{{2 * SIGNATURE_BYTES}}}", f"{2 * SIGNATURE_BYTES} lower-case hex digits"
)
_OBJECT = schema.Rule("a JSON object", lambda value: isinstance(value, dict))


@dataclass(frozen=True, kw_only=True, slots=True)
class Statement:
    """What a peer says of its object, every field checked; FrameError names the first that is off.

    `nbytes` and `sha256` are those of the whole frame; `window` is the round.
    """

    run_id: Annotated[str, schema.RUN_ID]
    manifest_sha256: Sha256
    uid: Annotated[str, schema.WORKER_ID]
    window: Whole
    base_digest: Sha256  # the published weights that the contribution started from
    sample_digest: Sha256  # of the rows that it was trained on
    nbytes: Natural
    sha256: Sha256

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            rule.check(name, getattr(self, name), of=_OF)

    def plain(self) -> dict[str, object]:
        """The fields as JSON has them."""
        return {name: getattr(self, name) for name in FIELDS}

    def message(self) -> bytes:
        """The bytes that are signed."""
        return DOMAIN + canonical.dumps(self.plain()).encode("ascii")


FIELDS = tuple(field.name for field in fields(Statement))
_RULES: dict[str, schema.Rule] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(Statement, include_extras=True).items()
}


def signed(statement: Statement, key: SecretKey) -> bytes:
    """The document that a peer publishes."""
    return _document(statement, key.sign(statement.message()).hex())


def read(data: bytes, public_key: PublicKey) -> Statement:
    """What the owner of `public_key` stated in `data`.

    Skip(STATEMENT) when it is no statement in its one spelling, Skip(SIGNATURE) when the key did
    not sign it.
    """
    try:
        statement, signature = _parsed(data)
    except FrameError as exc:
        raise Skip(Reason.STATEMENT, str(exc)) from exc
    if not public_key.verifies(bytes.fromhex(signature), statement.message()):
        raise Skip(
            Reason.SIGNATURE,
            f"the statement of {statement.uid!r} for window {statement.window} is not signed by "
            f"the key {public_key.hex} that the run lists for its peer",
        )
    return statement


def unverified(data: bytes) -> Statement:
    """What `data` states, whoever signed it; FrameError. For a peer's look at its own bucket."""
    return _parsed(data)[0]


def _document(statement: Statement, signature: str) -> bytes:
    whole = {"signature": signature, "statement": statement.plain()}
    return canonical.dumps(whole).encode("ascii")


def _parsed(data: bytes) -> tuple[Statement, str]:
    if len(data) > MAX_BYTES:
        raise FrameError(f"{_OF} has {len(data)} bytes or more; at most {MAX_BYTES} are allowed")
    document = schema.object_of(data, of=_OF)
    schema.keys(document, known=_DOCUMENT, of=_OF)
    _SIGNATURE.check("signature", document["signature"], of=_OF)
    _OBJECT.check("statement", document["statement"], of=_OF)
    # Of any type until the rules have held each field, and the spelling the whole document.
    found: Any = document["statement"]
    schema.keys(found, known=FIELDS, of=_OF)
    statement, signature = Statement(**found), str(document["signature"])
    if _document(statement, signature) != data:
        raise FrameError(
            f"{_OF} is not in its canonical spelling; "
            f"write ASCII JSON with sorted keys and no spaces"
        )
    return statement, signature
