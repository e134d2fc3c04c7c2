"""The question what to do next, with all that an island says about itself in it."""

from atoll.island.conversation.intents import Steps, send
from atoll.island.conversation.session import Session
from atoll.island.state.weights import IslandWeights
from atoll.protocol.messages import Assignment, AssignmentRequest, Identity

WAIT_SECONDS = 20.0  # a long poll; well below any proxy's idle limit


def question(
    who: Identity,
    version: int | None,
    digest: str | None,
    *,
    upcoming: int = 0,
    awaits: int = 0,
    under_way: tuple[int, ...] = (),
    wait_seconds: float = WAIT_SECONDS,
) -> AssignmentRequest:
    """The question of an island with these weights and the rows of `upcoming`.

    With `awaits` it asks for nothing but that round's version. `under_way` are rounds that it
    trains or hands in: it wants none of them again.
    """
    return AssignmentRequest(
        identity=who,
        version=version,
        digest=digest,
        wait_seconds=wait_seconds,
        upcoming=upcoming,
        awaits=awaits,
        under_way=under_way,
    )


def ask(
    session: Session,
    weights: IslandWeights,
    *,
    upcoming: int = 0,
    awaits: int = 0,
    under_way: tuple[int, ...] = (),
    wait_seconds: float = WAIT_SECONDS,
) -> Steps[Assignment]:
    """What next? Says which published weights this island holds, and what it waits for."""
    standing = session.standing
    version, digest = weights.held
    asked = question(
        *(standing.identity(), version, digest),
        upcoming=upcoming,
        awaits=awaits,
        under_way=under_way,
        wait_seconds=wait_seconds,
    )
    reply = yield from send(asked)
    standing.told(reply.generation)
    return reply
