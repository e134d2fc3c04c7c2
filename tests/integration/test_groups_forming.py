"""How ranks become a group and when it is over, on a manual clock through the coordinator."""

import datetime

import pytest

from atoll.collectives.grpc.trust import Identity as RankIdentity
from atoll.coordinator import handlers
from atoll.coordinator.handlers import Arrival
from atoll.coordinator.sharded.forming import (
    FORMING_SECONDS,
    MAX_SHUN_SECONDS,
    MEASURE_SECONDS,
    SHUN_HALVES_SECONDS,
    SHUN_SECONDS,
    shunned_seconds,
)
from atoll.errors import (
    AddressUnreachable,
    Evicted,
    Fenced,
    ManifestMismatch,
    ProtocolError,
    StaleGeneration,
    StaleGroup,
    UnknownWorker,
)
from atoll.ledger.records import LeaseState
from atoll.protocol.messages import AssignmentRequest
from tests.clusters import Cluster
from tests.hand_ranks import TICK_SECONDS, HandRank, Sea
from tests.ledgers import alone

TIMEOUT_SECONDS = 10.0  # the default


@pytest.fixture
def sea(tmp_path):
    made = Sea(tmp_path)
    yield made
    made.close()


def pem() -> str:
    made = RankIdentity.new(now=datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC))
    return made.certificate_pem.decode()


def ring(reply) -> list[str]:
    return [member.worker_id for member in reply.members]


# Forming


def test_ranks_measure_each_other_and_then_train_in_one_ring(sea):
    b, a, c = sea.ranks("b", "a", "c")
    assert [r.ask().action for r in (b, a)] == ["wait", "wait"]

    candidate = c.ask()
    first = a.measure()
    b.measure()
    last = c.measure()

    assert (candidate.action, ring(candidate)) == ("measure", ["a", "b", "c"])
    assert first.action == "measure"  # the others have not answered
    assert (last.action, ring(last), last.group) == ("train", ["a", "b", "c"], candidate.group)
    assert [r.ask() for r in (a, b)] == [last, last]
    assert last.secret != candidate.secret
    assert len(last.secret) == 64
    assert last.restore is not None
    assert last.restore.source == "initial"
    assert [(i.round, i.first, i.last) for i in last.intervals] == [(1, 1, 6), (2, 7, 12)]
    assert sum(len(r) for i in last.intervals for r in i.ranges) == 60
    assert {x.worker_id for x in alone(sea.ledger).leases.of_round(1)} == {"a"}


def test_ring_goes_by_the_regions_that_pings_show(sea):
    ranks = sea.ranks("a", "b", "c", "d")
    near = ({"a", "d"}, {"b", "c"})
    for rank in ranks:
        rank.pings = lambda to, me=rank.name: 2.0 if {me, to} in near else 90.0

    found = sea.formed(*ranks)

    assert [r.name for r in found] == ["a", "d", "b", "c"]


def test_who_is_registered_and_does_not_ask_is_waited_for_a_while(sea):
    a, b, c = sea.ranks("a", "b", "c")
    for rank in (a, b):
        rank.ask()
    sea.run_clock(a, b, c, seconds=FORMING_SECONDS - 1)
    before = a.ask().action

    sea.run_clock(a, b, c, seconds=1.5)

    assert before == "wait"
    assert (a.ask().action, ring(a.ask())) == ("measure", ["a", "b"])
    assert c.ask().action == "wait"


def test_no_group_is_formed_below_min_workers(sea):
    [a] = sea.ranks("a")

    a.ask()
    sea.run_clock(a, seconds=FORMING_SECONDS + 1)

    assert a.ask().action == "wait"
    assert sea.group is None


def test_candidate_that_does_not_ping_is_left_out(sea):
    a, b, c = sea.ranks("a", "b", "c")
    for rank in (a, b, c):
        rank.ask()
    a.measure()
    b.measure()

    sea.run_clock(a, b, c, seconds=MEASURE_SECONDS + FORMING_SECONDS + 1)

    assert ring(a.measure()) == ["a", "b"]
    assert b.measure().action == "train"


def test_rank_whose_pings_take_too_long_fails_one_candidate_and_not_the_next(sea):
    a, b, c = sea.ranks("a", "b", "c")
    for rank in (a, b, c):
        rank.ask()
    a.measure()
    b.measure()
    sea.run_clock(a, b, c, seconds=MEASURE_SECONDS + 0.5)

    c.measure()  # it is through with the pings of the candidate that is given up
    first = a.measure()
    last = b.measure()

    assert (ring(first), last.action) == (["a", "b"], "train")
    assert c.ask().action == "wait"
    sea.run_clock(a, b, c, seconds=SHUN_SECONDS)
    assert sea.coordinator.groups.newcomers()  # it is asked again at the end of a round


def test_ranks_that_are_all_late_are_all_asked_again(sea):
    ranks = sea.ranks("a", "b")
    for rank in ranks:
        rank.ask()
    sea.run_clock(*ranks, seconds=MEASURE_SECONDS + 0.5)

    assert sea.formed(*ranks)[0].size == 2


@pytest.mark.parametrize(
    ("before", "quiet", "seconds"),
    [
        (SHUN_SECONDS / 2, 0.0, SHUN_SECONDS),  # the first time
        (SHUN_SECONDS, 0.0, 2 * SHUN_SECONDS),
        (8 * SHUN_SECONDS, SHUN_HALVES_SECONDS - 1, 16 * SHUN_SECONDS),
        (8 * SHUN_SECONDS, SHUN_HALVES_SECONDS, 8 * SHUN_SECONDS),
        (8 * SHUN_SECONDS, 3 * SHUN_HALVES_SECONDS, 2 * SHUN_SECONDS),
        (8 * SHUN_SECONDS, 100 * SHUN_HALVES_SECONDS, SHUN_SECONDS),
        (MAX_SHUN_SECONDS, 0.0, MAX_SHUN_SECONDS),
    ],
)
def test_time_without_trouble_shortens_the_next_time_that_a_rank_is_left_out(
    before, quiet, seconds
):
    assert shunned_seconds(before, quiet_seconds=quiet) == seconds


def test_rank_that_was_shunned_long_ago_is_left_out_as_if_for_the_first_time(sea):
    forming = sea.coordinator.groups.forming
    [a] = sea.ranks("a")
    a.ask()
    for _ in range(4):
        forming.shun("a")  # 80 seconds by now
    sea.clock.advance(seconds=80 + 4 * SHUN_HALVES_SECONDS)
    a.beat()
    forming.shun("a")

    sea.run_clock(a, seconds=SHUN_SECONDS - 1)
    assert "a" not in forming.able()
    sea.run_clock(a, seconds=1)
    assert "a" in forming.able()


def test_pings_of_an_earlier_candidate_do_not_count(sea):
    a, b, c = sea.ranks("a", "b", "c")
    for rank in (a, b, c):
        rank.ask()
    for rank in (a, b):
        rank.measure()
    before = a.ask().group
    c.leave()

    found = a.ask()

    assert (found.action, ring(found)) == ("measure", ["a", "b"])
    assert found.group > before
    assert a.measure().action == "measure"
    assert b.measure().action == "train"


@pytest.mark.parametrize("told", [2**53, 2**53 - 1])
def test_number_of_a_candidate_that_never_was_moves_no_groups_number(sea, told):
    """Numbers only grow, and there is a last one: after it nobody would train any more."""
    a, b = sea.ranks("a", "b")
    a.ask(measured=told)

    assert b.ask().group == sea.coordinator.generation
    assert sea.formed(a, b)[0].number == sea.coordinator.generation


def test_of_two_that_do_not_ping_each_other_the_higher_goes_and_the_others_train(sea):
    a, b, c = sea.ranks("a", "b", "c")
    a.pings = lambda to: None if to == "b" else 1.0
    b.pings = lambda to: None if to == "a" else 1.0
    for rank in (a, b, c):
        rank.ask()
    for rank in (a, b, c):
        rank.measure()

    with pytest.raises(Evicted, match="other ranks could not reach it"):
        b.beat()
    found = [a.measure(), c.measure()][-1]

    assert (found.action, ring(found)) == ("train", ["a", "c"])
    assert a.measure().action == "train"


def test_evicted_suspect_that_comes_back_at_once_is_no_candidate_for_a_while(sea):
    a, b, c = sea.ranks("a", "b", "c")
    a.pings = lambda to: None if to == "b" else 1.0
    for rank in (a, b, c):
        rank.ask()
    for rank in (a, b, c):
        rank.measure()
    b.join()

    assert b.ask().action == "wait"
    assert [a.measure().action, c.measure().action] == ["measure", "train"]
    sea.run_clock(a, b, c, seconds=SHUN_SECONDS + 1)
    assert sea.group is not None
    assert [m.worker_id for m in sea.group.members] == ["a", "c"]


def test_group_of_one_needs_no_pings(tmp_path):
    sea = Sea(tmp_path, {"membership.min_workers": 1})
    [a] = sea.ranks("a")

    reply = a.ask()

    assert (reply.action, ring(reply)) == ("train", ["a"])


def test_numbers_grow_and_are_at_least_the_generations(sea):
    a, b, c = sea.ranks("a", "b", "c")
    sea.formed(a, b, c)
    first = sea.group
    assert first is not None
    c.leave()

    sea.formed(a, b)

    assert sea.group is not None
    assert first.number == 3
    assert sea.group.number == sea.coordinator.generation == 4


# Who is told what


def test_certificates_and_secrets_go_to_members_alone(sea):
    certificates = {name: pem() for name in "abc"}
    a, b = (HandRank(sea, n, certificate=certificates[n]).join() for n in "ab")
    sea.formed(a, b)
    c = HandRank(sea, "c", certificate=certificates["c"]).join()

    told = c.ask()
    shown = sea.coordinator.workers().model_dump_json() + sea.coordinator.ready(1).model_dump_json()

    assert {m.worker_id: m.certificate for m in a.formed.members} == {
        "a": certificates["a"],
        "b": certificates["b"],
    }
    assert (told.action, told.members, told.secret, told.restore) == ("wait", (), "", None)
    assert "CERTIFICATE" not in shown
    assert a.formed.secret not in sea.coordinator.status().model_dump_json()


def test_secret_is_in_no_table(sea):
    a, _b = sea.formed(*sea.ranks("a", "b"))
    rows = [
        str(row)
        for name in ("groups", "generations", "control")
        for row in alone(sea.ledger).connection.rows(f"SELECT * FROM {name}")
    ]

    assert rows
    assert not [row for row in rows if a.formed.secret in row]


def test_watching_a_group_is_not_answered_while_it_goes_on(sea):
    a, _b = sea.formed(*sea.ranks("a", "b"))

    question = a.question(group=a.number)
    reply = sea.coordinator.group(question)

    assert not question.is_answered(reply)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("", "certificate of worker_id='b': it has none, unlike 'a'"),
        ("no pem", "certificate of worker_id='b' is not a certificate in PEM"),
        ("twice", "certificate of worker_id='b' holds 2 of them"),
        ("a's", "certificate of worker_id='b' is that of 'a'"),
    ],
)
def test_certificate_that_cannot_be_trusted_is_refused_at_registration(sea, given, says):
    mine = pem()
    HandRank(sea, "a", certificate=mine).join()
    before = sea.state_hash()
    sent = {"twice": pem() + pem(), "a's": mine}.get(given, given)

    with pytest.raises(ProtocolError, match=says):
        HandRank(sea, "b", certificate=sent).join()

    assert sea.state_hash() == before


def test_rank_without_a_port_is_refused(sea):
    with pytest.raises(AddressUnreachable, match="'a' advertises no port"):
        HandRank(sea, "a", port=0).join()

    assert sea.dialled == []


def test_ranks_are_dialled_as_they_register(sea):
    sea.ranks("a")

    assert set(sea.dialled) == {("10.0.0.1", 4000)}


# The end of a group


@pytest.mark.parametrize("how", ["leave", "register again", "kick", "silence"])
def test_group_is_over_for_all_when_a_member_goes(sea, how):
    a, b, c = sea.formed(*sea.ranks("a", "b", "c"))
    if how == "leave":
        c.leave()
    elif how == "register again":
        c.join()
    elif how == "kick":
        sea.coordinator.kick("c")
    else:
        sea.run_clock(a, b, seconds=TIMEOUT_SECONDS + 1)

    question = a.question(group=a.number, held=())
    reply = sea.coordinator.group(question)

    assert question.is_answered(reply)
    assert (reply.action, reply.group) == ("wait", 0)
    assert sea.group is None
    assert [g.is_over for g in alone(sea.ledger).groups.all()] == [True]


def test_newcomer_does_not_end_a_group(sea):
    a, b = sea.formed(*sea.ranks("a", "b"))

    [c] = sea.ranks("c")
    waits = c.ask()
    sea.run_clock(a, b, c, seconds=FORMING_SECONDS + 1)

    assert waits.action == "wait"
    assert (a.watch().action, a.watch().group) == ("train", a.number)
    assert sea.coordinator.generation > a.number


def test_leases_go_over_to_the_first_of_the_new_group_with_the_next_epoch(sea):
    a, b, c = sea.formed(*sea.ranks("a", "b", "c"))
    before = alone(sea.ledger).leases.of_round(1)
    a.leave()

    sea.formed(b, c)
    after = alone(sea.ledger).leases.of_round(1)

    assert {(x.worker_id, x.lease_epoch) for x in before} == {("a", 1)}
    assert {(x.worker_id, x.lease_epoch, x.incarnation) for x in after} == {("b", 2, 1)}
    assert {x.state for x in after} == {LeaseState.LEASED}
    assert [x.row_range for x in after] == [x.row_range for x in before]
    assert sea.audit().clean


# Restarts


def test_group_survives_a_restart_of_the_coordinator(sea):
    a, _b = sea.formed(*sea.ranks("a", "b"))

    sea.restart()

    assert sea.group is not None
    assert (a.watch().action, a.watch().group) == ("train", a.number)
    assert sea.coordinator.status().ring == ("a", "b")


def test_member_that_had_not_learned_the_secret_before_a_restart_ends_the_group(sea):
    a, b = sea.ranks("a", "b")
    for rank in (a, b):
        rank.ask()
    a.measure()
    b.enter(b.measure())

    sea.restart()
    lost = a.ask(measured=0)
    told = b.watch()

    assert sea.group is None
    assert lost.action == "wait"
    assert (told.action, told.group) == ("wait", 0)


def test_answer_that_was_lost_is_given_again(sea):
    a, b = sea.formed(*sea.ranks("a", "b"))

    assert a.ask() == a.formed
    assert (b.watch().action, b.watch().group) == ("train", b.number)


def test_member_evicted_just_before_a_crash_is_not_in_the_group_after_it(sea):
    a, _b, c = sea.formed(*sea.ranks("a", "b", "c"))
    c.leave()

    sea.restart()

    assert sea.group is None
    assert a.watch().group == 0


def test_candidate_is_forgotten_by_a_restart_and_made_again(sea):
    a, b = sea.ranks("a", "b")
    for rank in (a, b):
        rank.ask()
    first = a.measure()

    sea.restart()
    for rank in (a, b):
        rank.ask()
    again = a.ask()

    assert again.action == "measure"
    assert again.group > first.group
    sea.formed(a, b)


# Suspicion


def test_of_two_live_members_that_miss_each_other_the_higher_is_evicted(sea):
    a, b, c = sea.formed(*sea.ranks("a", "b", "c"))

    a.missing("b")
    b.missing("a")
    assert sea.group is not None  # c lives and has not spoken
    c.missing("a", "b")
    sea.run_clock(a, b, c, seconds=TICK_SECONDS)  # all of them live

    with pytest.raises(Evicted):
        b.beat()
    assert a.watch().group == 0
    a.beat()
    c.beat()


def test_who_misses_a_rank_that_spoke_and_died_does_not_go_in_its_place(sea):
    """Both have spoken, it is a tie, and the higher one is the innocent."""
    a, b = sea.formed(*sea.ranks("a", "b"))
    a.missing("b")
    sea.run_clock(a, b, seconds=3.0)
    a.missing("b")  # its last word
    b.missing("a")

    sea.run_clock(b, seconds=TIMEOUT_SECONDS - 0.5)
    assert sea.coordinator.registry.eviction("b") is None
    assert sorted(sea.coordinator.members()) == ["a", "b"]
    sea.run_clock(b, seconds=2.0)

    assert sorted(sea.coordinator.members()) == ["b"]
    assert sea.coordinator.registry.eviction("b") is None
    assert sea.group is None


def test_member_that_hangs_while_it_beats_is_evicted_after_the_timeout(sea):
    a, b, c = sea.formed(*sea.ranks("a", "b", "c"))
    b.missing("a")
    c.missing("b")

    sea.run_clock(a, b, c, seconds=TIMEOUT_SECONDS - 1)
    before = sea.group
    sea.run_clock(b, c, seconds=1.5)

    assert before is not None
    assert sea.coordinator.registry.eviction("a") == "other ranks could not reach it"
    assert sorted(sea.coordinator.members()) == ["b", "c"]


def test_dead_member_goes_by_its_silence_and_may_come_back_at_once(sea):
    a, b, c = sea.formed(*sea.ranks("a", "b", "c"))
    a.missing("c")
    b.missing("c")
    c.join()

    for rank in (a, b, c):
        rank.ask(measured=0)

    assert ring(a.ask()) == ["a", "b", "c"]


def test_report_of_who_is_not_in_the_group_is_refused_and_changes_nothing(sea):
    a, b = sea.formed(*sea.ranks("a", "b"))
    before = sea.state_hash()

    for name in ("a", "x"):
        with pytest.raises(ProtocolError, match=f"missing='{name}' is not another member"):
            a.missing(name)
    assert sea.state_hash() == before
    [c] = sea.ranks("c")
    c.formed = a.formed
    with pytest.raises(StaleGroup, match="'c' in incarnation 1 is not in group"):
        c.missing("b")
    present = a.formed
    a.formed = present.model_copy(update={"group": a.number - 1})
    with pytest.raises(StaleGroup, match=r"group=1 is over or not begun, the present one is 2"):
        a.missing("b")

    a.formed = present
    sea.run_clock(a, b, c, seconds=TIMEOUT_SECONDS + 1)
    assert sea.group is not None


# The operator


def test_paused_run_forms_no_group_and_a_stopped_one_sends_ranks_away(sea):
    a, b = sea.ranks("a", "b")
    sea.coordinator.order("pause")
    for rank in (a, b):
        rank.ask()
    paused = a.ask().action

    sea.coordinator.order("stop")

    assert paused == "wait"
    assert (a.ask().action, a.ask().reason) == ("stop", "the operator stops the run")


# The other kind of run


def test_message_of_a_run_in_rounds_is_refused_by_name(sea):
    [a] = sea.ranks("a")
    before = sea.state_hash()

    with pytest.raises(
        ProtocolError, match=r"^AssignmentRequest is not a message of run 'by-hand'"
    ):
        handlers.answer(sea.coordinator, AssignmentRequest(identity=a.identity), Arrival())

    assert sea.state_hash() == before
    assert sea.coordinator.counters.refusals["PROTOCOL"] == 1
    assert not hasattr(sea.coordinator, "weights")


def test_message_of_a_sharded_run_is_refused_in_a_run_in_rounds(sea, tmp_path):
    [a] = sea.ranks("a")
    cluster = Cluster(tmp_path / "rounds")

    with pytest.raises(ProtocolError, match=r"^GroupRequest is not a message of run 'by-hand'"):
        handlers.answer(cluster.coordinator, a.question(), Arrival())
    cluster.close()


# Identities


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"island_key": "9" * 64}, Fenced),
        ({"incarnation": 7}, Fenced),
        ({"worker_id": "stranger"}, UnknownWorker),
        ({"generation": 99}, StaleGeneration),
        ({"run_id": "another"}, ManifestMismatch),
    ],
    ids=["key", "life", "name", "generation", "run"],
)
def test_every_message_with_another_identity_is_refused_and_changes_nothing(
    sea, monkeypatch, changes, error
):
    a, b = sea.formed(*sea.ranks("a", "b"))
    forged = a.identity.model_copy(update=changes)
    before = sea.state_hash()
    monkeypatch.setattr(HandRank, "identity", property(lambda _: forged))
    calls = (
        a.ask,
        a.watch,
        lambda: a.save(3),
        lambda: a.tell_part(1),
        lambda: a.boundary(1),
        lambda: a.missing("b"),
        lambda: sea.coordinator.part_offset(a.request(1)),
        lambda: sea.coordinator.begin_part(a.request(1)),
        lambda: sea.coordinator.fetch(forged, sea.coordinator.run.initial_sha256, 0, 1),
    )

    for call in calls:
        with pytest.raises(error):
            call()

    assert sea.state_hash() == before
    assert b.number == a.number
