"""Protocol mutants: what the production code would do if one of its rules were missing.

Each changes the production code path itself, from outside, and names the invariant that is meant
to catch it. Those of SURVIVORS no invariant can catch; the reason stands beside each.
"""

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any

import pytest
import torch

from atoll.blobs.spool import DraftWriter
from atoll.coordinator import admission, dispatch, leases, quorum, service, uploads, versions
from atoll.coordinator.control import Control
from atoll.coordinator.dispatch import Dispatch
from atoll.coordinator.generations import Generations
from atoll.coordinator.heartbeats import Heartbeats
from atoll.coordinator.liveness import Liveness
from atoll.coordinator.presence import Presence
from atoll.coordinator.registry import Registry
from atoll.coordinator.rounds import LatestRound, Rounds
from atoll.data import plan as plans
from atoll.errors import WorkerTaken
from atoll.history import replay, retention
from atoll.ledger import contributions, generations, members, queues, rows, schema, sql
from atoll.ledger import rounds as round_statements
from atoll.ledger.records import RoundState
from atoll.simulate.faults import run as simulation
from atoll.simulate.faults import scenario as scenarios
from atoll.simulate.faults.scenario import Scenario
from atoll.sums import fold

Patch = pytest.MonkeyPatch
SEEDS = 10  # tried for each mutant


def any_(_: Scenario) -> bool:
    """Every seed will do."""
    return True


def having(*kinds: str) -> Callable[[Scenario], bool]:
    """Seeds that have these kinds of faults."""
    return lambda scenario: all(scenario.has(kind) for kind in kinds)


def _restores_momentum(scenario: Scenario) -> bool:
    return (
        scenario.has("crash coordinator")
        and scenario.settings["outer"]["optimizer"] != "sgd"
        and scenario.settings["storage"]["snapshot_every"] == 1
        and scenario.gap_seconds < 2
    )


def working(*, kinds: tuple[str, ...] = (), **settings: Any) -> Callable[[Scenario], bool]:
    """Seeds that dispatch with these settings and have these kinds of faults."""

    def wanted(scenario: Scenario) -> bool:
        work = scenario.settings["work"]
        return having(*kinds)(scenario) and all(work[n] == v for n, v in settings.items())

    return wanted


def _has_deadlines(scenario: Scenario) -> bool:
    return bool(scenario.settings["work"]["lease_seconds"]) and scenario.has("slow worker")


def _pauses_with_deadlines(scenario: Scenario) -> bool:
    return scenario.settings["work"]["lease_seconds"] == 8.0 and scenario.has("operator")


def _is_audited(scenario: Scenario) -> bool:
    """In full, of a run whose settings change."""
    return scenario.seed % simulation.AUDITED_EVERY == 0 and scenario.has("outer lr")


def _ends_epochs(scenario: Scenario) -> bool:
    return bool(0 < scenario.data.get("rows", 0) < 40)


def _breaks_uploads(scenario: Scenario) -> bool:
    is_lossy = scenario.loss > 0.1 and scenario.has("crash coordinator")
    return is_lossy and scenario.islands <= 3 and scenario.rounds >= 6


def _splits_leases(scenario: Scenario) -> bool:
    """Of several datasets, a worker has several leases, and one that follows takes part of one."""
    settings = scenario.settings
    is_uneven = [part["weight"] for part in scenario.data.get("datasets", ())] == [3, 1]
    rows = settings["sync_every"] * settings["inner"]["batch"]
    loses_many = having("kill worker", "stop worker")(scenario)
    waits = settings["membership"]["min_workers"] >= 2
    reissues = settings["work"]["policy"] == "exactly_once"
    return is_uneven and rows >= 4 and loses_many and waits and reissues


def _has_grace(scenario: Scenario) -> bool:
    settings = scenario.settings["membership"]
    return bool(0 < settings["quorum"] < scenario.islands and settings["grace_seconds"] > 0)


def _has_many_messages(scenario: Scenario) -> bool:
    return scenario.has("slow network") and scenario.islands >= 5


def seeds_where(wanted: Callable[[Scenario], bool]) -> tuple[int, ...]:
    """The first seeds whose scenario has what a mutant needs to show."""
    found = (seed for seed in count() if wanted(scenarios.draw(seed)))
    return tuple(islice(found, SEEDS))


@dataclass(frozen=True)
class Mutant:
    """One rule taken out; seeds with what it takes to show are tried until one is caught."""

    name: str
    invariant: str
    apply: Callable[[Patch], None]
    wanted: Callable[[Scenario], bool] = any_

    @property
    def seeds(self) -> tuple[int, ...]:
        return seeds_where(self.wanted)


MUTANTS: list[Mutant] = []


def mutant(invariant: str, wanted: Callable[[Scenario], bool] = any_) -> Callable[..., Any]:
    """Adds the function that follows, which patches, to the list under its own name."""

    def add(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTANTS.append(Mutant(apply.__name__.replace("_", " "), invariant, apply, wanted))
        return apply

    return add


def edit(patch: Patch, owner: Any, name: str, *changes: tuple[str, str]) -> None:
    """Replaces a function by its own source with `changes`, each of which must fit once."""
    function = inspect.unwrap(getattr(owner, name))
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in changes:
        assert source.count(old) == 1, f"{old!r} is {source.count(old)} times in {name}"
        source = source.replace(old, new)
    space: dict[str, Any] = {}
    exec(compile(source, f"<mutant of {name}>", "exec"), function.__globals__, space)
    patch.setattr(owner, name, space[name])


def answering(value: Any) -> Callable[..., Any]:
    """A function that says `value` whatever it is asked."""
    return lambda *_, **__: value


def first_violation(mutant: Mutant, patch: Patch) -> str | None:
    """The invariant that the mutant violates first, over its seeds."""
    mutant.apply(patch)
    outcomes = (simulation.run(seed) for seed in mutant.seeds)
    return next((outcome.invariant for outcome in outcomes if not outcome.holds), None)


# Who may speak


@mutant("fenced-gets-nothing", having("replace worker"))
def an_earlier_life_is_not_fenced(patch: Patch) -> None:
    edit(patch, Registry, "check", ("identity.incarnation != known.incarnation", "False"))
    patch.setattr(members, "check_incarnation", lambda c, worker, _: members.check_known(c, worker))


@mutant("fenced-gets-nothing")
def a_worker_that_is_out_is_answered(patch: Patch) -> None:
    edit(
        patch,
        Registry,
        "check",
        ("known is None or not (known.active or evicted)", "known is None"),
        ("if evicted:\n", "if False:\n"),
    )


@mutant("id-is-held", having("impostor"))
def a_live_worker_id_is_given_away(patch: Patch) -> None:
    edit(
        patch,
        Registry,
        "register",
        ("request.worker_id in self._heartbeats.live([request.worker_id])", "False"),
    )


@mutant("fenced-gets-nothing")
def a_new_life_gets_the_old_number(patch: Patch) -> None:
    edit(patch, members, "register", ("known.incarnation + 1", "known.incarnation"))


@mutant("generation-current")
def an_old_generation_is_answered(patch: Patch) -> None:
    patch.setattr(Generations, "check", lambda self, _: self.current)


@mutant("generation-moves")
def members_change_without_a_generation(patch: Patch) -> None:
    patch.setattr(generations, "renew", lambda c, **_: generations.newest(c))


@mutant("operator-obeyed", having("operator"))
def a_kicked_worker_is_taken_in(patch: Patch) -> None:
    patch.setattr(Control, "check", answering(None))


@mutant("operator-obeyed", having("operator", "crash coordinator"))
def a_kick_that_a_crash_cut_in_two_stays_so(patch: Patch) -> None:
    patch.setattr(service.Coordinator, "_finish_kicks", answering(None))


@mutant("operator-obeyed", having("operator"))
def a_pause_gives_rows_out(patch: Patch) -> None:
    edit(patch, service.Coordinator, "_next", ('wanted == "pause"', "False"))


@mutant("acked-is-durable", having("operator"))
def an_order_is_kept_in_memory_only(patch: Patch) -> None:
    edit(patch, Control, "order", ("self._ledger.set_control(", "dict("))


@mutant("silent-is-evicted")
def nobody_is_ever_evicted(patch: Patch) -> None:
    patch.setattr(Liveness, "scan", answering(False))


@mutant("silent-is-evicted")
def a_lease_on_life_never_expires(patch: Patch) -> None:
    patch.setattr(Heartbeats, "live", lambda _, candidates: frozenset(candidates))


@mutant("live-is-kept", having("kill worker"))
def a_lost_stream_is_taken_for_a_death_at_once(patch: Patch) -> None:
    edit(patch, Presence, "overdue", ("if seconds > self._grace_seconds", "if seconds >= 0"))


@mutant("refused-changes-nothing", having("impostor"))
def a_refused_registration_leaves_a_trace(patch: Patch) -> None:
    real = Registry.register

    def register(self: Registry, request: Any, **more: Any) -> Any:
        try:
            return real(self, request, **more)
        except WorkerTaken:
            known = self._workers[request.worker_id]
            self._ledger.deregister(request.worker_id, known.incarnation, wall=0.0)
            raise

    patch.setattr(Registry, "register", register)


# Accepting


@mutant("acked-is-durable")
def a_receipt_is_given_before_the_commit(patch: Patch) -> None:
    real = Rounds.accept
    late: list[Any] = []

    def accept(self: Rounds, contribution: Any, header: Any) -> Any:
        for waiting in late:
            real(self, *waiting)
        late[:] = [(contribution, header)]
        return contribution

    patch.setattr(Rounds, "accept", accept)


@mutant("moves-together")
def leases_and_contribution_are_two_transactions(patch: Patch) -> None:
    def accept(self: sql.SqlLedger, contribution: Any) -> Any:
        with self._database.writing() as connection:
            first = contributions._find(connection, contribution)
            if first is not None:
                return contributions._same(first, contribution)
            contributions._finish_leases(connection, contribution)
        with self._database.writing() as connection:
            connection.execute(schema.contributions.insert(), rows.values(contribution))
        return contribution

    patch.setattr(sql.SqlLedger, "accept", accept)


@mutant("receipt-matches", having("rogue"))
def other_bytes_get_the_first_ones_receipt(patch: Patch) -> None:
    edit(
        patch,
        admission.Admission,
        "receipt",
        ("accepted.sha256 != request.sha256", "False"),
    )


@mutant("receipt-matches", having("duplicate"))
def a_repeated_upload_gets_another_receipt(patch: Patch) -> None:
    real = admission.Admission.receipt

    def receipt(self: Any, request: Any) -> Any:
        found = real(self, request)
        return None if found is None else replace(found, receipt=found.receipt[::-1])

    patch.setattr(admission.Admission, "receipt", receipt)


@mutant("acked-is-durable", having("duplicate"))
def a_repeated_upload_is_recorded_anew(patch: Patch) -> None:
    patch.setattr(admission.Admission, "receipt", answering(None))
    real = contributions.accept

    def accept(connection: Any, contribution: Any) -> Any:
        first = contributions._find(connection, contribution)
        if first is None:
            return real(connection, contribution)
        anew = replace(contribution, receipt=first.receipt[::-1])
        table = schema.contributions
        key = (table.c.round == first.round, table.c.worker_id == first.worker_id)
        connection.execute(table.delete().where(*key))
        connection.execute(table.insert(), rows.values(anew))
        return anew

    patch.setattr(contributions, "accept", accept)


@mutant("accepted-in-open-round")
def a_stale_round_is_accepted(patch: Patch) -> None:
    patch.setattr(admission.Admission, "_check_round", answering(None))
    patch.setattr(admission.Admission, "_check_rows", answering(None))
    patch.setattr(leases, "check_named", answering(None))
    patch.setattr(contributions, "_check_open", answering(None))
    edit(patch, contributions, "_finish_leases", ("if not leases:", "if False:"))


@mutant("accepted-in-open-round", having("rogue"))
def rows_of_others_are_accepted(patch: Patch) -> None:
    edit(patch, leases, "check_named", ("not held or named != held", "not held"))


@mutant("accepted-base", having("rogue"))
def another_base_is_accepted(patch: Patch) -> None:
    edit(
        patch,
        admission.Admission,
        "_check_round",
        ("header.base_digest != current.digests.published.root", "False"),
    )


@mutant("weight-by-rule", having("rogue"))
def a_weight_is_what_the_sender_says(patch: Patch) -> None:
    edit(patch, admission.Admission, "_check_rows", (" or header.weight != weight", ""))


@mutant("blob-is-there")
def a_contribution_is_recorded_without_its_blob(patch: Patch) -> None:
    edit(patch, uploads.Upload, "finish", ("self._writer.commit()", "pass"))


# Rows and rounds


@mutant("row-issued-once")
def the_cursor_does_not_move(patch: Patch) -> None:
    edit(
        patch,
        Dispatch,
        "_sources",
        ("part.weight, issued.get(part.dataset_id, 0)", "part.weight, 0"),
        ("if found != cursor:", "if False:"),
    )
    edit(patch, Dispatch, "plan", ("cursor=sum(planned.cursors.values())", "cursor=cursor"))


@mutant("row-issued-once")
def reopened_rows_are_issued_twice(patch: Patch) -> None:
    patch.setattr(round_statements, "_take", answering(None))


@mutant("row-not-lost")
def rows_of_a_missing_worker_are_not_reopened(patch: Patch) -> None:
    edit(
        patch,
        round_statements,
        "_end_leases",
        (".where(table.c.round == round_number,", ".where(table.c.round == -1,"),
    )


@mutant("row-not-lost")
def reopened_rows_are_taken_and_not_given_out(patch: Patch) -> None:
    real = Rounds._plan

    def plan(self: Rounds, *args: Any, **more: Any) -> Any:
        made = real(self, *args, **more)
        if not made.taken:
            return made
        lost = {(t.dataset_id, t.start, t.stop) for t in made.taken}
        kept = tuple(x for x in made.leases if (x.dataset_id, x.start, x.stop) not in lost)
        return replace(made, leases=kept or made.leases)

    patch.setattr(Rounds, "_plan", plan)


@mutant("row-not-lost", _splits_leases)
def what_is_left_of_a_taken_lease_is_lost(patch: Patch) -> None:
    patch.setattr(round_statements, "_keep_reopened", answering(None))


@mutant("lease-is-stable")
def a_repeated_question_gets_other_rows(patch: Patch) -> None:
    asked: dict[tuple[int, str], int] = {}
    real = service.Coordinator._train

    def train(self: Any, latest: LatestRound, worker_id: str) -> Any:
        key = (latest.record.round, worker_id)
        asked[key] = asked.get(key, -1) + 1
        given = real(self, latest, worker_id)
        moved = tuple(
            span.model_copy(update={"start": span.start + asked[key], "stop": span.stop + 9})
            for span in given.ranges
        )
        return given.model_copy(update={"ranges": moved if asked[key] else given.ranges})

    patch.setattr(service.Coordinator, "_train", train)


@mutant("next-is-planned")
def a_round_freezes_without_a_plan(patch: Patch) -> None:
    edit(
        patch,
        Rounds,
        "freeze",
        ("freeze(record.round, next_plan, ", "freeze(record.round, None, "),
    )


@mutant("next-is-planned")
def freeze_and_plan_are_two_transactions(patch: Patch) -> None:
    def freeze(
        self: sql.SqlLedger, round_number: int, next_plan: Any, *, reissue: bool = True
    ) -> Any:
        with self._database.writing() as connection:
            found = round_statements.freeze(connection, round_number, None, reissue=reissue)
        if next_plan is not None:
            with self._database.writing() as connection:
                round_statements._insert(
                    connection,
                    next_plan,
                    state=RoundState.PLANNED,
                    expected=round_number + 1,
                )
        return found

    patch.setattr(sql.SqlLedger, "freeze", freeze)


@mutant("moves-together")
def state_and_digests_are_two_transactions(patch: Patch) -> None:
    def publish(self: sql.SqlLedger, round_number: int, published: Any) -> None:
        with self._database.writing() as connection:
            round_statements._move(
                connection,
                round_number,
                old=RoundState.FROZEN,
                new=RoundState.PUBLISHED,
            )
        with self._database.writing() as connection:
            table = schema.rounds
            connection.execute(
                table.update().where(table.c.round == round_number).values(rows.values(published))
            )
            connection.execute(
                table.update().where(table.c.round == round_number + 1).values(state="open")
            )

    patch.setattr(sql.SqlLedger, "publish", publish)


@mutant("round-order")
def publishing_does_not_open_the_next_round(patch: Patch) -> None:
    edit(
        patch,
        round_statements,
        "publish",
        ("values(state=RoundState.OPEN.value)", "values(state=RoundState.PLANNED.value)"),
    )


@mutant("closes-by-rule")
def a_lone_worker_closes_the_round(patch: Patch) -> None:
    patch.setattr(quorum, "is_due", lambda view, *_, **__: len(view.accepted) > 0)


@mutant("closes-by-rule")
def a_live_worker_is_not_waited_for(patch: Patch) -> None:
    patch.setattr(quorum, "waiting_for", answering(frozenset()))


@mutant("closes-by-rule", _has_grace)
def the_grace_period_is_over_at_once(patch: Patch) -> None:
    edit(patch, quorum, "is_due", (" and seconds_with_quorum >= settings.grace_seconds", ""))


@mutant("liveness", having("kill worker"))
def a_dead_worker_is_waited_for(patch: Patch) -> None:
    patch.setattr(quorum, "waiting_for", lambda view: view.planned - view.accepted)


# Dispatch


@mutant("lease-epoch-grows", working(policy="exactly_once"))
def rows_issued_again_have_the_same_lease_epoch(patch: Patch) -> None:
    patch.setattr(dispatch, "_issued_before", answering(0))


@mutant("lease-epoch-grows", having("replace worker"))
def a_lease_is_handed_over_under_the_same_lease_epoch(patch: Patch) -> None:
    edit(patch, round_statements, "hand_over", (", lease_epoch=table.c.lease_epoch + 1", ""))


@mutant("lease-of-latest-life", having("replace worker"))
def a_new_life_does_not_take_the_leases_over(patch: Patch) -> None:
    patch.setattr(round_statements, "hand_over", answering(None))


@mutant("queue-agrees")
def bitmaps_of_done_units_are_another_transaction(patch: Patch) -> None:
    later: list[Any] = []
    mark, accept = queues.mark_done, sql.SqlLedger.accept
    patch.setattr(queues, "mark_done", lambda _, leases: later.extend(leases))

    def accept_then_mark(self: sql.SqlLedger, contribution: Any) -> Any:
        later.clear()
        accepted = accept(self, contribution)
        with self._database.writing() as connection:
            mark(connection, later)
        return accepted

    patch.setattr(sql.SqlLedger, "accept", accept_then_mark)


@mutant("queue-agrees")
def issued_units_are_not_marked(patch: Patch) -> None:
    patch.setattr(queues, "mark_issued", answering(None))


@mutant("row-issued-once", working(policy="exactly_once", units=1))
def a_unit_issued_again_starts_at_its_first_row(patch: Patch) -> None:
    real = Dispatch._lease

    def lease(self: Dispatch, number: int, worker_id: str, span: Any, *rest: Any) -> Any:
        made = real(self, number, worker_id, span, *rest)
        if made.lease_epoch == 1:
            return made
        return replace(made, start=self._queues[made.queue].cut.span(made.unit)[0])

    patch.setattr(Dispatch, "_lease", lease)


@mutant("policy-kept", working(policy="at_most_once", kinds=("kill worker",)))
def at_most_once_issues_again(patch: Patch) -> None:
    patch.setattr(round_statements, "_end_leases", _ending(reissue=True))


@mutant("policy-kept", working(policy="exactly_once", kinds=("kill worker",)))
def exactly_once_gives_rows_up(patch: Patch) -> None:
    patch.setattr(round_statements, "_end_leases", _ending(reissue=False))


def _ending(*, reissue: bool) -> Callable[..., int]:
    real = round_statements._end_leases
    return lambda c, number, workers, **_: real(c, number, workers, reissue=reissue)


@mutant("reopened-goes-first", working(policy="exactly_once", kinds=("kill worker",)))
def reopened_rows_wait_for_ever(patch: Patch) -> None:
    edit(patch, Dispatch, "plan", ("in self._ledger.reopened()", "in ()"))


@mutant("weights-followed", lambda scenario: scenario.data["kind"] == "mixture")
def all_rows_are_of_one_dataset(patch: Patch) -> None:
    patch.setattr(plans, "shares", lambda sources, _, rows: [rows, *[0] * (len(sources) - 1)])


@mutant("members-get-rows", having("kill worker", "operator"))
def rows_are_leased_to_who_is_out(patch: Patch) -> None:
    edit(
        patch,
        Rounds,
        "freeze",
        ("self._registry.live()", "[w.worker_id for w in self._registry.known()]"),
    )


@mutant("lease-ends-in-time", _has_deadlines)
def a_deadline_is_never_over(patch: Patch) -> None:
    patch.setattr(leases.Deadlines, "overdue", answering([]))


@mutant("lease-ends-in-time", _has_deadlines)
def a_deadline_is_over_too_early(patch: Patch) -> None:
    edit(patch, leases.Deadlines, "overdue", (">= lease_seconds", ">= lease_seconds / 4"))


@mutant("lease-ends-in-time", _pauses_with_deadlines)
def a_lease_ends_in_a_pause(patch: Patch) -> None:
    edit(patch, service.Coordinator, "_advance", ("[] if is_paused else ", ""))


@mutant("lease-ends-in-time", _pauses_with_deadlines)
def a_pause_counts_as_time_of_a_lease(patch: Patch) -> None:
    patch.setattr(Rounds, "restart_deadlines", answering(None))


@mutant("lease-in-its-unit", _ends_epochs)
def a_lease_reaches_into_the_next_epoch(patch: Patch) -> None:
    edit(patch, plans, "_epochs", ("if source.length:", "if False:"))


@mutant("lease-in-its-unit", _ends_epochs)
def rows_of_a_later_epoch_are_named_after_the_first(patch: Patch) -> None:
    edit(patch, Dispatch, "_queue", ("position // part.length,", "0,"))


# Weights


@mutant("weights-bits")
def the_fold_has_another_order(patch: Patch) -> None:
    edit(
        patch,
        contributions,
        "of_round",
        (".order_by(table.c.worker_id)", ".order_by(table.c.worker_id.desc())"),
    )


@mutant("weights-bits")
def the_count_does_not_shrink_with_a_missing_worker(patch: Patch) -> None:
    real = fold.fold_tile
    most = [0]

    def fold_tile(terms: Any, *, unit: str) -> Any:
        total = real(terms, unit=unit)
        most[0] = max(most[0], total.count)
        return replace(total, count=most[0])

    patch.setattr(fold, "fold_tile", fold_tile)


@mutant("weights-bits")
def every_contribution_weighs_the_same(patch: Patch) -> None:
    real = fold.fold_tile

    def fold_tile(terms: Any, *, unit: str) -> Any:
        return real(((delta, 1 + index) for index, (delta, _) in enumerate(terms)), unit=unit)

    patch.setattr(fold, "fold_tile", fold_tile)


@mutant("weights-bits")
def momentum_is_not_carried_on(patch: Patch) -> None:
    real = replay.apply_round

    def apply_round(state: Any, *args: Any, **more: Any) -> Any:
        for slot in state.slots.values():
            slot.zero_()
        return real(state, *args, **more)

    patch.setattr(replay, "apply_round", apply_round)


@mutant("snapshot-bits")
def momentum_is_not_saved(patch: Patch) -> None:
    edit(
        patch,
        versions.Versions,
        "snapshot",
        ("self._state.slots[buffer]", "torch.zeros_like(self._state.slots[buffer])"),
    )
    patch.setattr(versions, "torch", torch, raising=False)


@mutant("snapshot-bits")
def a_snapshot_is_named_after_the_version_before(patch: Patch) -> None:
    edit(
        patch,
        versions.Versions,
        "snapshot",
        ("return SnapshotRecord(version,", "return SnapshotRecord(max(1, version - 1),"),
    )


@mutant("published-is-recorded", _has_many_messages)
def a_version_is_published_before_it_is_recorded(patch: Patch) -> None:
    edit(
        patch,
        service.Coordinator,
        "_close",
        (
            "    self._ledger.publish(round_number, published)\n"
            "    self.versions.publish(round_number, digests)\n",
            "    self.versions.publish(round_number, digests)\n"
            "    self._ledger.publish(round_number, published)\n",
        ),
    )


@mutant("memory-follows-ledger")
def a_version_is_recorded_and_not_published(patch: Patch) -> None:
    edit(
        patch,
        service.Coordinator,
        "_close",
        ("    self.versions.publish(round_number, digests)\n", ""),
    )


@mutant("digest-agrees", having("corrupt weights"))
def other_weights_are_not_sent_to_fetch(patch: Patch) -> None:
    edit(
        patch,
        service.Coordinator,
        "_assignment",
        (
            "request.version != current.version or request.digest != digest",
            "request.version != current.version",
        ),
    )


@mutant("restart-opens", having("crash coordinator"))
def replay_skips_a_contribution(patch: Patch) -> None:
    real = replay.replay

    class Short:
        def __init__(self, ledger: Any) -> None:
            self._ledger = ledger

        def __getattr__(self, name: str) -> Any:
            return getattr(self._ledger, name)

        def contributions(self, number: int) -> Any:
            found = self._ledger.contributions(number)
            return found[1:] if len(found) > 1 else found

    patch.setattr(
        replay, "replay", lambda state, ledger, *a, **m: real(state, Short(ledger), *a, **m)
    )


@mutant("audit-clean", _is_audited)
def a_round_is_chained_under_the_newest_manifest(patch: Patch) -> None:
    edit(
        patch,
        service.Coordinator,
        "_close",
        ("self.manifests.of_round(round_number).sha256", "self.manifests.newest.sha256"),
    )


@mutant("weights-bits", _restores_momentum)
def momentum_is_not_restored(patch: Patch) -> None:
    real = replay.snapshot_state

    def snapshot_state(*args: Any, **more: Any) -> Any:
        state = real(*args, **more)
        for slot in state.slots.values():
            slot.zero_()
        return state

    patch.setattr(replay, "snapshot_state", snapshot_state)


# Storage


@mutant("blob-is-there")
def pruning_forgets_the_outer_state(patch: Patch) -> None:
    edit(
        patch,
        retention,
        "referenced",
        ("names |= {sha256 for _, sha256 in snapshot.slots_sha256}", "pass"),
    )


@mutant("blob-is-there")
def pruning_takes_contributions_that_replay_needs(patch: Patch) -> None:
    edit(patch, retention, "referenced", ("_kept_from(ledger, storage) + 1", "10**6"))


@mutant("no-orphans", lambda s: s.settings["storage"]["retain"] == "snapshots")
def nothing_is_ever_pruned(patch: Patch) -> None:
    patch.setattr(retention, "prune", answering(0))


@mutant("bounded", _breaks_uploads)
def drafts_of_broken_uploads_stay(patch: Patch) -> None:
    patch.setattr(DraftWriter, "abort", answering(None))
    patch.setattr("atoll.blobs.directory.DirectoryBlobs.sweep", answering(None))


# What no invariant can tell apart, and why.
@dataclass(frozen=True)
class Survivor:
    """A mutant that no invariant tells apart from the real thing, and why."""

    apply: Callable[[Patch], None]
    reason: str


SURVIVORS: dict[str, Survivor] = {}


def survivor(reason: str) -> Callable[..., Any]:
    """Adds a mutant that stays unnoticed, with the reason."""

    def add(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
        SURVIVORS[apply.__name__.replace("_", " ")] = Survivor(apply, reason)
        return apply

    return add


@survivor(
    "the registry refuses the earlier life before the ledger is asked, in the same event; the "
    "ledger's own check is for a second holder of the database, which other tests have"
)
def the_ledger_does_not_check_the_incarnation(patch: Patch) -> None:
    patch.setattr(members, "check_incarnation", lambda c, worker, _: members.check_known(c, worker))
