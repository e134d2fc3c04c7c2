"""What the invariants share: how a violation is named and what has been seen so far."""

from dataclasses import dataclass, field

from atoll.simulate.faults.calls import Call
from atoll.simulate.faults.durable import View
from atoll.simulate.faults.reference import Reference
from atoll.simulate.faults.world import World

# Every invariant by name, with the claim that a violation contradicts. `docs/testing.md` shows it.
INVARIANTS: dict[str, str] = {
    "row-issued-once": "a row is under one lease at a time, a later one only after the earlier",
    "row-not-lost": "every row below the cursor is leased, done or waiting to be given out again",
    "row-counted-once": "a row enters exactly one outer step, in the round it was leased for",
    "pair-counted-once": "a row enters a fragment once, with a round that its island handed in",
    "reopened-goes-first": "fresh rows are issued only when none waits to be issued again",
    "weights-followed": "what is issued of each dataset follows the weights, to a row for each",
    "members-get-rows": "rows are leased to workers that are in",
    "lease-epoch-grows": "every issue of a row has a higher lease epoch than the one before",
    "lease-of-latest-life": "what a worker holds is under its latest life, handed over as it joins",
    "lease-in-its-unit": "a lease lies in one epoch of its dataset and names the unit it starts in",
    "lease-ends-in-time": "a lease is over after lease_seconds of an open round that is not paused",
    "policy-kept": "exactly_once gives no row up, at_most_once issues none a second time",
    "queue-agrees": "the bitmaps of every queue say what its leases say, after every transaction",
    "moves-together": "a contribution and its leases, a round and its digests, in one transaction",
    "lease-is-stable": "asked twice, a worker is told the same rows of a round",
    "one-lease-at-a-time": "who is told to train holds no older rows that are still to be trained",
    "given-by-rule": "who asks is given rows of the round that the strategy says, or none",
    "rows-by-speed": "a lease has the steps of a round, or what its worker's speed makes of them",
    "round-order": "rounds have no gaps and only move planned, open, frozen, published",
    "next-is-planned": "a round that freezes leaves its successor planned, unless it was the last",
    "closes-by-rule": "a round closes with min_workers, and waits for the live as it must",
    "ends-by-rule": "a round that freezes ends the leases that the strategy names, and no others",
    "fragment-by-rule": "a round is planned with the fragment that the strategy says",
    "tokens-by-plan": "a round starts from the tokens folded and leased before it, as recorded",
    "accepted-from-holder": "what is accepted comes from the worker's latest life, under its key",
    "accepted-in-open-round": "what is accepted is for the open round and the rows leased in it",
    "stale-is-refused": "nothing is folded more than max_staleness rounds after its own",
    "accepted-base": "what is accepted was computed from the published weights",
    "accepted-as-sent": "a contribution is recorded with what its frame says of itself",
    "weight-by-rule": "a contribution counts with the weight, rows and tokens of its lease",
    "receipt-matches": "a receipt is for the bytes that were sent, and the same each time",
    "acked-is-durable": "what was acknowledged is in the ledger from then on",
    "refused-changes-nothing": "a refused message leaves every row as it was",
    "fenced-gets-nothing": "only the latest registered life of a worker is answered",
    "id-is-held": "a worker_id goes to another key only after silence",
    "generation-current": "a message that changes something is of the present generation",
    "generation-moves": "who is in changes only together with a higher generation number",
    "silent-is-evicted": "a worker that is silent for the timeout is out at the next look",
    "live-is-kept": "a worker that is heard in time and present is not taken for dead",
    "operator-obeyed": "who is kicked stays out, and while paused no rows are given out",
    "weights-bits": "published digests are those of a reference fold of the recorded contributions",
    "snapshot-bits": "a snapshot holds weights and outer state of its version, bit for bit",
    "memory-follows-ledger": "the weights in memory are those of the newest published round",
    "published-is-recorded": "nobody is told of a version that is not in the ledger",
    "digest-agrees": "all who hold version N hold the same bits; others are sent to fetch",
    "restart-opens": "the coordinator starts on whatever a kill left",
    "restart-equals-replay": "after a restart the weights are those of the reference",
    "coordinator-stays-up": "no message and no fault makes the coordinator raise what it may not",
    "blob-is-there": "every blob that a record needs is stored with its right bytes",
    "no-orphans": "after a snapshot nothing is stored that no record needs",
    "bounded": "drafts, descriptors and remembered uploads stay within what the workers need",
    "sends-what-it-was-given": "an island hands in its round, rows, base and manifest as assigned",
    "pending-is-resent": "what has no answer is sent again, the same, before an island asks on",
    "local-by-rule": "an island's own weights take version r in after exactly step r*H/P + tau",
    "residual-carried": "a contribution carries what rounding lost of the accepted ones before it",
    "residual-stated": "a contribution states the norm of what is left, and whose rest is in it",
    "inner-state-kept": "an island trains on from its newest receipt, whatever was refused since",
    "generation-adopted": "after a refusal an island speaks in the generation that it names",
    "evicted-comes-back": "an island that is out registers before it says anything else",
    "liveness": "once faults end, the run comes to its end within a bound",
    "audit-clean": "`atoll audit --replay` of the finished run finds nothing",
}


class Violation(BaseException):
    """An invariant does not hold; not an Exception, so that no code under test swallows it.

    `seen` are the values that show it, by name; sets are told in order, as a seed has one history.
    """

    def __init__(self, invariant: str, **seen: object) -> None:
        self.invariant = invariant
        told = {k: sorted(v) if isinstance(v, set | frozenset) else v for k, v in seen.items()}
        self.detail = ", ".join(f"{name}={value!r}" for name, value in told.items())
        super().__init__(f"{invariant}: {INVARIANTS[invariant]}; {self.detail}")


def check(invariant: str, holds: object, **seen: object) -> None:
    """Raises Violation with the values in `seen` unless the invariant `holds`."""
    if not holds:
        raise Violation(invariant, **seen)


# The coordinator's clock has its own start, so the same moment is rounded otherwise.
ROUNDING_SECONDS = 1e-6


@dataclass
class Seen:
    """What was said and heard, kept beside the coordinator and over its restarts."""

    world: World
    reference: Reference
    call: Call | None = None  # the message that is being handled
    heard: dict[str, float] = field(default_factory=dict)  # worker_id -> when it last counted
    lost: dict[str, float] = field(default_factory=dict)  # worker_id -> when its stream ended
    speeds: dict[str, float] = field(default_factory=dict)  # that workers told of themselves
    restarted_at: float = 0.0

    @property
    def now(self) -> float:
        return self.world.now

    def live(self, view: View, number: int) -> tuple[set[str], set[str]]:
        """Who is live for sure, and who is perhaps: a silence may be just as long as the timeout.

        By the manifest of that round.
        """
        timeout = view.terms(number).manifest.heartbeat_timeout
        active = [worker_id for worker_id, row in view.workers.items() if row.active]
        silence = {worker_id: self.silence(worker_id) - timeout for worker_id in active}
        sure = {worker_id for worker_id in active if silence[worker_id] < -ROUNDING_SECONDS}
        return sure, {w for w in active if silence[w] <= ROUNDING_SECONDS}

    def silence(self, worker_id: str) -> float:
        """Seconds since something of the worker counted."""
        return self.now - self.heard.get(worker_id, self.restarted_at)
