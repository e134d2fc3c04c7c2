"""The signed record of one window, and the body that it names: all that a late joiner needs.

The record is canonical JSON, signed with a domain of its own, and names the sha256 of the record
before it. It carries the statement of every applied peer, and the body their frames regrouped by
tile, so nobody has to trust who signed it (`rebuild`). Neither depends on the number of ranks or
the memory budget.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from atoll import canonical
from atoll.errors import FrameError
from atoll.gather import body, clip, partial
from atoll.gather.keys import SIGNATURE_BYTES, PublicKey, SecretKey
from atoll.gather.merge import merge
from atoll.gather.partial import Accepted, Partial, Skipped
from atoll.gather.result import Merged
from atoll.layout import Layout
from atoll.wire import schema

MAX_BYTES = partial.LIMIT_BYTES
DOMAIN = b"atoll/gather/artifact/1\0"
FIRST = "0" * 64  # before the first record of a chain
_OF = "artifact"
_SIGNATURE = schema.matching(
    f"[0-9a-f]{{{2 * SIGNATURE_BYTES}}}", f"{2 * SIGNATURE_BYTES} lower-case hex digits"
)
_OBJECT = schema.Rule("a JSON object", lambda value: isinstance(value, dict))
_LIST = schema.Rule("a list", lambda value: isinstance(value, list))
_RULES: dict[str, schema.Rule] = {
    "base_digest": schema.SHA256,
    "body_bytes": schema.WHOLE,
    "body_sha256": schema.SHA256,
    "digest": schema.SHA256,
    "factors": _LIST,
    "findings": _OBJECT,
    "manifest_sha256": schema.SHA256,
    "peers": _OBJECT,
    "prev": schema.SHA256,
    "primaries": _LIST,
    "run_id": schema.RUN_ID,
    "weights": _LIST,
    "window": schema.WHOLE,
}


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """What a window came to. `accepted` are those that were applied, in uid order."""

    run_id: str
    manifest_sha256: str
    window: int
    prev: str  # sha256 of the record before; FIRST where there is none
    base_digest: str
    digest: str  # of the weights after it
    primaries: tuple[str, ...]
    accepted: tuple[Accepted, ...]
    skipped: tuple[Skipped, ...]
    weights: tuple[int, ...]  # aligned with `accepted`
    factors: tuple[tuple[float, ...], ...]  # fp32 as they are, aligned with `accepted`
    findings: Mapping[str, object] = field(default_factory=dict)  # for people; decides nothing
    body_bytes: int
    body_sha256: str

    def plain(self) -> dict[str, object]:
        """The fields as JSON has them."""
        told = {name: getattr(self, name) for name in _RULES if name not in ("peers", "factors")}
        return {
            **told,
            "factors": [list(row) for row in self.factors],
            "findings": dict(self.findings),
            "peers": self.partial.plain(),
            "primaries": list(self.primaries),
            "weights": list(self.weights),
        }

    @property
    def partial(self) -> Partial:
        """The peers as one rank's result, rank 0."""
        return Partial(0, self.accepted, self.skipped)

    @property
    def uids(self) -> tuple[str, ...]:
        return tuple(one.uid for one in self.accepted)

    def merged(self) -> Merged:
        """The window's result, as those got it who gathered it."""
        return merge(
            [self.partial],
            primaries=self.primaries,
            reserves=[*self.uids, *(one.uid for one in self.skipped)],
            base_version=self.window,
        )


def signed(artifact: Artifact, key: SecretKey) -> bytes:
    """The record; FrameError where it is larger than anybody reads."""
    plain = artifact.plain()
    signature = key.sign(_message(plain)).hex()
    return partial.bounded({"artifact": plain, "signature": signature})


def sha256_of(record: bytes) -> str:
    """What the next record names as `prev`."""
    return hashlib.sha256(record).hexdigest()


def read(data: bytes, public_key: PublicKey, *, layout: Layout) -> Artifact:
    """What the owner of `public_key` recorded; FrameError names the first thing that is off."""
    if len(data) > MAX_BYTES:
        raise FrameError(f"{_OF} has more than {MAX_BYTES} bytes")
    document = schema.object_of(data, of=_OF)
    schema.keys(document, known=("artifact", "signature"), of=_OF)
    _SIGNATURE.check("signature", document["signature"], of=_OF)
    _OBJECT.check("artifact", document["artifact"], of=_OF)
    table: Any = document["artifact"]  # of any type until each rule has held
    signature = bytes.fromhex(str(document["signature"]))
    if not public_key.verifies(signature, _message(table)):
        raise FrameError(
            f"{_OF} is not signed by the key {public_key.hex} that the run lists for its artifacts"
        )
    schema.keys(table, known=tuple(_RULES), of=_OF)
    for name, rule in _RULES.items():
        rule.check(name, table[name], of=_OF)
    found = _parsed(table, layout)
    if canonical.dumps({"artifact": found.plain(), "signature": signature.hex()}).encode() != data:
        raise FrameError(f"{_OF} is not in its canonical spelling; its writer is damaged")
    return found


def _message(plain: object) -> bytes:
    return DOMAIN + canonical.dumps(plain).encode("ascii")


def _parsed(table: dict[str, Any], layout: Layout) -> Artifact:
    peers = partial.parsed(table["peers"], layout=layout)
    for uid in table["primaries"]:
        schema.WORKER_ID.check("primaries entry", uid, of=_OF)
    for weight in table["weights"]:
        schema.NATURAL.check("weights entry", weight, of=_OF)
    for row in table["factors"]:
        _LIST.check("factors entry", row, of=_OF)
    told = {name: table[name] for name in _RULES if name != "peers"}
    found = Artifact(
        **{
            **told,
            "accepted": peers.accepted,
            "skipped": peers.skipped,
            "primaries": tuple(table["primaries"]),
            "weights": tuple(table["weights"]),
            "factors": tuple(tuple(row) for row in table["factors"]),
        }
    )
    wanted = clip.factors([one.squares for one in found.accepted])
    if [list(row) for row in found.factors] != wanted.astype(float).tolist():
        raise FrameError(f"{_OF} of window {found.window} has factors that its norms do not give")
    if len(found.weights) != len(found.accepted):
        raise FrameError(f"{_OF} of window {found.window} has not one weight for each peer")
    nbytes = body.nbytes_of(found.accepted, layout)
    if found.body_bytes != nbytes:
        raise FrameError(
            f"{_OF} of window {found.window} has body_bytes={found.body_bytes}; its "
            f"{len(found.accepted)} frames of this layout make {nbytes}"
        )
    return found
