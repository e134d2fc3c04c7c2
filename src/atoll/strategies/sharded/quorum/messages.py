"""What ranks say to each other's servers in a quorum, and how it is written.

add/<group>/<step>/<micro>/<reduce|control>/<unit>/<start>/<stop>/<tokens>    values
arrived | fold | update | over                                                JSON
reached/<group>/<step>                                                        nothing
parameters/<group>/<version>/<unit>/<dtype>                                   a ranged read
"""

from typing import TypeVar

import torch
from pydantic import ConfigDict, ValidationError

from atoll.collectives.base import Key, Label, Op
from atoll.collectives.mailbox import Bytes
from atoll.errors import BlobMissing, ProtocolError
from atoll.layout import Span
from atoll.protocol.fields import Message, NotNegative, Whole
from atoll.protocol.sharded import Rank
from atoll.strategies.sharded.commit import Folded, Outcome

ADD, ARRIVED, FOLD, UPDATE, OVER = "add", "arrived", "fold", "update", "over"
REACHED, PARAMETERS = "reached", "parameters"
_OPS: dict[str, Op] = {"reduce": "reduce", "control": "control"}
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
}
MAX_DIGITS = 18
M = TypeVar("M", bound="Said")


class Said(Message):
    """Numbers come back with the bits that they had; a norm may be no number."""

    model_config = ConfigDict(ser_json_inf_nan="constants")


class ArrivedRequest(Said):
    """Who is whole with you? Answered when all are, or after so many seconds."""

    group: Whole
    step: Whole
    seconds: NotNegative


class ArrivedReply(Said):
    senders: tuple[Rank, ...]


class FoldRequest(Said):
    """Add up over these senders and no other."""

    group: Whole
    step: Whole
    senders: tuple[Rank, ...]


class FoldReply(Said):
    squares: float
    loss_sum: float
    tokens: Whole
    lr: float

    @classmethod
    def of(cls, found: Folded) -> "FoldReply":
        return cls(squares=found.squares, loss_sum=found.loss_sum, tokens=found.tokens, lr=found.lr)

    def folded(self) -> Folded:
        return Folded(self.squares, self.loss_sum, self.tokens, self.lr)


class UpdateRequest(Said):
    """Step your shard, and publish it."""

    group: Whole
    step: Whole
    senders: tuple[Rank, ...]
    excluded: tuple[Rank, ...]
    loss_sum: float
    tokens: Whole
    lr: float
    norm: float

    @classmethod
    def of(cls, group: int, outcome: Outcome) -> "UpdateRequest":
        return cls(
            group=group,
            step=outcome.step,
            senders=tuple(sorted(outcome.senders)),
            excluded=tuple(sorted(outcome.excluded)),
            loss_sum=outcome.loss_sum,
            tokens=outcome.tokens,
            lr=outcome.lr,
            norm=outcome.norm,
        )

    def outcome(self) -> Outcome:
        return Outcome(
            self.step,
            frozenset(self.senders),
            frozenset(self.excluded),
            self.loss_sum,
            self.tokens,
            self.lr,
            self.norm,
        )


class OverRequest(Said):
    """The step cannot be committed, and nothing after it."""

    group: Whole
    step: Whole
    code: str
    message: str
    ranks: tuple[Rank, ...] = ()


class Done(Said):
    """It is done, now or before."""


def written(message: Said) -> bytes:
    """As it travels."""
    return message.model_dump_json().encode()


def read(kind: type[M], body: Bytes) -> M:
    """ProtocolError for what no rank says."""
    try:
        return kind.model_validate_json(bytes(body))
    except ValidationError as exc:
        raise ProtocolError(f"{len(body)} bytes are no {kind.__name__}: {exc}") from exc


def add_name(label: Label, tokens: int) -> str:
    """Under which a part is added."""
    key, span = label.key, label.span
    numbers = (key.unit, span.start, span.stop, tokens)
    return "/".join(map(str, (ADD, key.group, key.step, key.micro, key.op, *numbers)))


def added(name: str) -> tuple[Label, int]:
    """What is added, and how many tokens it counts; ProtocolError for what no rank adds."""
    found = name.split("/")
    if len(found) != 9 or found[4] not in _OPS:
        raise ProtocolError(f"name={name[:80]!r} says of no part what it is")
    numbers = [_number(text, name) for text in (*found[1:4], *found[5:])]
    group, step, micro, unit, start, stop, tokens = numbers
    if start > stop:
        raise ProtocolError(f"elements [{start}, {stop}) of a part end before they start")
    key = Key(group, step, _OPS[found[4]], micro, unit)
    return Label(key, 0, Span(start, stop)), tokens


def reached_name(group: int, step: int) -> str:
    """Under which a rank says that it has come to the end of a round."""
    return f"{REACHED}/{group}/{step}"


def reached(name: str) -> tuple[int, int]:
    """Group and step; ProtocolError for another name."""
    found = name.split("/")
    if len(found) != 3:
        raise ProtocolError(f"name={name[:80]!r} says of no step that it is reached")
    group, step = (_number(text, name) for text in found[1:])
    return group, step


def parameters_name(group: int, version: int, unit: int, dtype: torch.dtype) -> str:
    """Under which an owner's part of a unit is read."""
    return f"{PARAMETERS}/{group}/{version}/{unit}/{str(dtype).removeprefix('torch.')}"


def parameters(name: str) -> tuple[int, int, int, torch.dtype]:
    """Group, version, unit and dtype; BlobMissing for another name."""
    found = name.split("/")
    if len(found) != 5 or found[0] != PARAMETERS or found[4] not in _DTYPES:
        raise BlobMissing(f"name={name[:80]!r} is of no parameters")
    group, version, unit = (_number(text, name) for text in found[1:4])
    return group, version, unit, _DTYPES[found[4]]


def _number(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        raise ProtocolError(f"{text[:40]!r} in name={name[:80]!r} is no number")
    return int(text)
