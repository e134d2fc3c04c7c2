"""Random histories: the SQLite ledger does what a model of dictionaries does."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from atoll import errors
from atoll.ledger import engines
from atoll.ledger.records import (
    ContributionRecord,
    LeaseRecord,
    LeaseState,
    ManifestRecord,
    Published,
    RoundPlan,
    RoundState,
    RunRecord,
)
from tests import ledgers
from tests.ledgers import alone

RUN = RunRecord(run_id="run", created_wall=0.0, initial_sha256="i")
MANIFEST = ManifestRecord(version=1, sha256="m", body="{}", from_round=1)
PUBLISHED = Published("p", "h", "d", "e", b"leaves", None, 1.0)
ROWS = 8

names = st.sampled_from(["a", "b", "B", "_"])
small = st.integers(min_value=0, max_value=3)


@dataclass
class Model:
    """The rules of `base.Ledger`, written down a second time."""

    incarnations: dict[str, int] = field(default_factory=dict)
    active: dict[str, bool] = field(default_factory=dict)
    states: dict[int, RoundState] = field(default_factory=dict)
    leases: dict[tuple[int, str, int], LeaseState] = field(default_factory=dict)
    accepted: dict[tuple[int, str], ContributionRecord] = field(default_factory=dict)
    cursor: int = 0

    @property
    def latest(self) -> int:
        return max(self.states, default=0)

    def lookup(self, worker_id: str, incarnation: int) -> type[errors.AtollError] | None:
        if worker_id not in self.incarnations:
            return errors.UnknownWorker
        return None if self.incarnations[worker_id] == incarnation else errors.Fenced

    def reopened(self) -> list[tuple[int, str, int]]:
        keys = [key for key, state in self.leases.items() if state is LeaseState.REOPENED]
        return sorted(keys, key=lambda key: (key[0], key[2]))

    def refusal(self, sent: ContributionRecord) -> type[errors.AtollError] | None:
        unknown = self.lookup(sent.worker_id, sent.incarnation)
        if unknown is not None:
            return unknown
        if sent.round not in self.states:
            return errors.WrongRound
        first = self.accepted.get((sent.round, sent.worker_id))
        if first is not None:
            return None if first.sha256 == sent.sha256 else errors.Conflict
        state = self.states[sent.round]
        if state in (RoundState.FROZEN, RoundState.PUBLISHED):
            return errors.StaleContribution
        if state is RoundState.PLANNED:
            return errors.WrongRound
        mine = [key for key in self.leases if key[:2] == (sent.round, sent.worker_id)]
        return None if mine else errors.LeaseLost

    def accept(self, sent: ContributionRecord) -> ContributionRecord:
        for key in self.leases:
            if key[:2] == (sent.round, sent.worker_id) and (sent.round, sent.worker_id) not in (
                self.accepted
            ):
                self.leases[key] = LeaseState.DONE
        return self.accepted.setdefault((sent.round, sent.worker_id), sent)

    def give(self, number: int, workers: list[str]) -> tuple[LeaseRecord, ...]:
        """New rows to each worker, from the cursor on."""
        given = []
        for worker_id in workers:
            given.append(LeaseRecord(number, worker_id, self.cursor, self.cursor + ROWS))
            self.leases[(number, worker_id, self.cursor)] = LeaseState.LEASED
            self.cursor += ROWS
        return tuple(given)

    def take(self, count: int) -> tuple[LeaseRecord, ...]:
        keys = self.reopened()[:count]
        for key in keys:
            self.leases[key] = LeaseState.TAKEN
        return tuple(LeaseRecord(*key, key[2] + ROWS) for key in keys)


class LedgerMachine(RuleBasedStateMachine):
    """Applies each step to both and compares what comes back and what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.ledger = engines.open_ledger(":memory:")
        alone(self.ledger).run.create(RUN, MANIFEST)
        self.attempts = 0

    def teardown(self) -> None:
        self.ledger.close()

    def expect(self, refusal: type[errors.AtollError] | None, call: Callable[[], object]) -> object:
        """Calls; a refusal must be of exactly that class and change nothing."""
        if refusal is None:
            return call()
        before = self.ledger.state_hash()
        with pytest.raises(refusal) as caught:
            call()
        assert type(caught.value) is refusal
        assert self.ledger.state_hash() == before
        return None

    @rule(worker_id=names)
    def register(self, worker_id: str) -> None:
        record = alone(self.ledger).members.register(worker_id, "key", wall=1.0)

        self.model.incarnations[worker_id] = self.model.incarnations.get(worker_id, 0) + 1
        self.model.active[worker_id] = True
        assert record.incarnation == self.model.incarnations[worker_id]

    @rule(worker_id=names, older=st.booleans())
    def deregister(self, worker_id: str, older: bool) -> None:
        incarnation = self.model.incarnations.get(worker_id, 1) - older
        refusal = self.model.lookup(worker_id, incarnation)

        self.expect(
            refusal, lambda: alone(self.ledger).members.deregister(worker_id, incarnation, wall=0.0)
        )

        if refusal is None:
            self.model.active[worker_id] = False

    @rule()
    def begin(self) -> None:
        refusal: type[errors.AtollError] | None = errors.StoreError if self.model.states else None
        if self.model.states.get(self.model.latest) is RoundState.PUBLISHED:
            refusal = errors.WrongRound
        plan = RoundPlan(1, "m", 0, ())
        if refusal is None:
            plan = replace(plan, leases=self.model.give(1, list(self.model.incarnations)))
            plan = replace(plan, cursor=self.model.cursor)

        self.expect(refusal, lambda: ledgers.begin(self.ledger, plan))

        self.model.states.setdefault(1, RoundState.OPEN)

    @rule(workers=st.lists(names, max_size=2, unique=True), takes=small)
    def extend(self, workers: list[str], takes: int) -> None:
        model, number = self.model, self.model.latest
        state = model.states.get(number)
        if state in (RoundState.PLANNED, RoundState.OPEN):
            known = [worker_id for worker_id in workers if worker_id in model.incarnations]
            taken, leases = model.take(takes), model.give(number, known)
            alone(self.ledger).rounds.extend(
                RoundPlan(number, "m", model.cursor, leases, tuple(taken))
            )
        else:
            self.expect(
                errors.WrongRound,
                lambda: alone(self.ledger).rounds.extend(RoundPlan(number, "m", model.cursor, ())),
            )

    @rule(worker_id=names, back=small, older=st.booleans(), blob=st.sampled_from("xy"))
    def accept(self, worker_id: str, back: int, older: bool, blob: str) -> None:
        self.attempts += 1
        sent = ContributionRecord(
            round=(number := self.model.latest + 1 - back),
            worker_id=worker_id,
            applied=number,
            first=number,
            fragment=0,
            base="b",
            incarnation=self.model.incarnations.get(worker_id, 1) - older,
            sha256=blob,
            nbytes=1,
            weight=1,
            rows=ROWS,
            tokens=1,
            loss_sum=0.5,
            norm=0.5,
            residual=0.0,
            carried=0,
            receipt=f"receipt {self.attempts}",
            accepted_wall=2.0,
        )
        refusal = self.model.refusal(sent)

        got = self.expect(refusal, lambda: alone(self.ledger).contributions.accept(sent))

        assert refusal is not None or got == self.model.accept(sent)

    @rule(back=small, planned=st.booleans(), takes=small)
    def freeze(self, back: int, planned: bool, takes: int) -> None:
        model, number = self.model, self.model.latest - back
        if model.states.get(number) is not RoundState.OPEN:
            self.expect(errors.WrongRound, lambda: ledgers.freeze(self.ledger, number, None))
            return
        for key, state in model.leases.items():
            if key[0] == number and state is LeaseState.LEASED:
                model.leases[key] = LeaseState.REOPENED
        plan = None
        if planned:
            taken = model.take(takes)
            leases = model.give(number + 1, list(model.incarnations))
            plan = RoundPlan(number + 1, "m", model.cursor, leases, taken)
            model.states[number + 1] = RoundState.PLANNED
        model.states[number] = RoundState.FROZEN

        frozen = ledgers.freeze(self.ledger, number, plan)

        assert frozen == [model.accepted[key] for key in sorted(model.accepted) if key[0] == number]

    @rule(back=small)
    def publish(self, back: int) -> None:
        model, number = self.model, self.model.latest - back
        refusal = None if model.states.get(number) is RoundState.FROZEN else errors.WrongRound

        self.expect(refusal, lambda: ledgers.publish(self.ledger, number, PUBLISHED))

        if refusal is None:
            model.states[number] = RoundState.PUBLISHED
            if number + 1 in model.states:
                model.states[number + 1] = RoundState.OPEN

    @invariant()
    def states_agree(self) -> None:
        model = self.model
        assert {r.round: r.state for r in alone(self.ledger).rounds.all()} == model.states
        assert {w.worker_id: w.active for w in alone(self.ledger).members.workers()} == model.active
        members = [
            (m.rank, m.worker_id, m.incarnation)
            for m in alone(self.ledger).members.generation().members
        ]
        active = sorted(name for name, is_active in model.active.items() if is_active)
        assert members == [(r, w, model.incarnations[w]) for r, w in enumerate(active)]
        assert [
            (le.round, le.worker_id, le.start) for le in alone(self.ledger).leases.reopened()
        ] == (model.reopened())
        for number in model.states:
            found = [
                (le.round, le.worker_id, le.start, le.state)
                for le in alone(self.ledger).leases.of_round(number)
            ]
            assert found == sorted((*k, s) for k, s in model.leases.items() if k[0] == number)


LedgerMachine.TestCase.settings = settings(
    max_examples=20,
    stateful_step_count=40,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestLedgerFollowsItsModel = LedgerMachine.TestCase
