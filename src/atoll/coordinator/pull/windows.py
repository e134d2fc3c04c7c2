"""The frozen list of a round, as islands gather it themselves."""

from atoll.coordinator.rounds.rounds import Rounds
from atoll.coordinator.rounds.run_weights import RunWeights
from atoll.errors import StateDamaged, WrongRound
from atoll.ledger.records import RoundState
from atoll.protocol.gather import GatheredPeer, WindowReply


def window(rounds: Rounds, weights: RunWeights, round_number: int) -> WindowReply:
    """What a published round folded, by worker_id; WrongRound for one that is not published."""
    with rounds.ledger.reading() as t:
        found = t.rounds.all(first=round_number, last=round_number)
        contributions = t.contributions.of_round(round_number)
        publishers = {p.worker_id: p for p in t.publishers.all()}
    if not found or found[0].state is not RoundState.PUBLISHED:
        raise WrongRound(
            f"round {round_number} is not published, so it is not known yet what it folds; the "
            f"newest version is {weights.current.version}"
        )
    for contribution in contributions:
        if contribution.worker_id not in publishers:
            raise StateDamaged(
                f"the ledger no longer knows where {contribution.worker_id!r} published its "
                f"contribution to round {round_number}; take the coordinator's own frame"
            )
    [record] = found
    assert record.published_digest is not None, record
    return WindowReply(
        round=round_number,
        base_digest=weights.base_digest(round_number),
        result_digest=record.published_digest,
        peers=tuple(
            GatheredPeer(
                worker_id=c.worker_id,
                key=publishers[c.worker_id].public_key,
                bucket=publishers[c.worker_id].bucket,
                sha256=c.sha256,
                nbytes=c.nbytes,
                weight=c.weight,
            )
            for c in contributions
        ),
    )
