"""Messages as a table: what a message is answered with, where it goes and who may send it.

One class is one message. Its `route` says all that a transport must know, so the HTTP routes, the
in-memory link and the link of an island's ranks carry every message with the same few lines. A new
message is one class here or beside its like, and one handler in `coordinator.handlers`.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, cast
from urllib.parse import urlencode

from pydantic import BaseModel, Field

from atoll.errors import ProtocolError
from atoll.protocol.fields import Message

R = TypeVar("R", bound=BaseModel)

Sender = Literal["anyone", "worker", "admin"]  # an admin may send what a worker may
_NAME = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Route:
    """Where a message goes and how it travels; names in braces are fields of it."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    sender: Sender = "worker"
    leader_alone: bool = False  # in an island of several ranks only the leader sends and learns
    in_loop: bool = False  # answered in the server's event loop: it waits for nothing
    # A longer body is refused before it is read. The longest good message fits; most are short.
    body_bytes: int = 4 << 10
    large: bool = False  # its answer may be: few are made at a time, and only for who reads them

    @property
    def max_body_bytes(self) -> int:
        """The longest body that is read; a message in the address has none."""
        return 0 if self.method == "GET" else self.body_bytes

    @property
    def names(self) -> list[str]:
        """The fields that the path names."""
        return _NAME.findall(self.path)


class Ask(Message, Generic[R]):
    """A message that is answered with an `R`."""

    route: ClassVar[Route]

    def __init_subclass__(cls, *, route: Route | None = None) -> None:
        super().__init_subclass__()
        if route is not None:
            cls.route = route
            before = TABLE.setdefault((route.method, route.path), cls)
            assert before is cls, f"{route} is the route of {before} and of {cls}"

    @classmethod
    def reply(cls) -> type[R]:
        """What it is answered with."""
        models = (base for base in cls.__mro__ if issubclass(base, Ask))
        found = (base.__pydantic_generic_metadata__["args"] for base in models)
        return cast(type[R], next(args[0] for args in found if args))

    def is_answered(self, reply: R) -> bool:  # noqa: ARG002  # what a message that waits asks
        """Whether `reply` can be sent; if not, the coordinator waits and makes another answer."""
        return True

    def target(self) -> str:
        """Path and query of this message."""
        path = self.route.path.format(**{name: self.named(name) for name in self.route.names})
        given = self.model_dump(mode="json", exclude_none=True) if self.in_query() else {}
        return f"{path}?{urlencode(given)}" if given else path

    @classmethod
    def in_query(cls) -> bool:
        """Whether its fields are in the address; else they are the body."""
        return cls.route.method == "GET"

    def named(self, name: str) -> str:
        """The value of `name` in a path: a field of the message or of its sender's identity."""
        holder = self if name in type(self).model_fields else getattr(self, "identity")  # noqa: B009
        return str(getattr(holder, name))

    def check_path(self, given: dict[str, str]) -> None:
        """ProtocolError when the path that it was sent to names other values than its fields."""
        for name, value in given.items():
            if value != self.named(name):
                raise ProtocolError(
                    f"the path names {name} {value!r}, the body {self.named(name)!r}; "
                    f"they must agree"
                )


class Waiting(Ask[R]):
    """A message whose answer may be held back (a long poll) for `wait_seconds` at most."""

    wait_seconds: Annotated[float, Field(strict=True, ge=0, le=60)] = 0.0


TABLE: dict[tuple[str, str], type[Ask[Any]]] = {}  # every message, by method and path
