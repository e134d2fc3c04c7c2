"""An island's standing: generations are adopted, evictions answered by registering again."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from atoll.errors import (
    CoordinatorUnreachable,
    DiskFailed,
    Evicted,
    Fenced,
    ManifestMismatch,
    StaleGeneration,
    StoreAway,
    Superseded,
    UnknownWorker,
)
from atoll.island.conversation import session as sessions
from atoll.island.ranks.group import SOLO, Group, SoloGroup
from atoll.protocol.manifest import Manifest
from atoll.protocol.messages import Done, RegisterReply
from atoll.versions import manifest_change
from tests import links
from tests.clusters import SMALL, info_of, manifest_for
from tests.links import Driven


class Coordinator(links.Answering):
    """A link whose calls are answered by what a test put in `answers`, one each."""

    def __init__(self) -> None:
        self.registrations = 0
        self.generation = 1
        self.seen: list[tuple[int, int]] = []  # incarnation and generation of every message
        self.answers: list[Any] = []
        self.left = 0
        self.infos = 0

    def info(self, _: Any) -> Any:
        self.infos += 1
        return info_of(manifest_for(SMALL))

    def register(self, _: Any) -> RegisterReply:
        self.registrations += 1
        return RegisterReply(
            incarnation=self.registrations, generation=self.generation, version=0, digest="0" * 64
        )

    def leave(self, _: Any) -> Done:
        self.left += 1
        return Done()

    def message(self, session: Driven) -> str:
        identity = session.standing.identity()
        self.seen.append((identity.incarnation, identity.generation))
        answer = self.answers.pop(0) if self.answers else "done"
        if callable(answer):
            answer = answer()
        if isinstance(answer, Exception):
            raise answer
        return str(answer)


@pytest.fixture
def coordinator() -> Coordinator:
    return Coordinator()


@pytest.fixture
def session(coordinator: Coordinator) -> Driven:
    return joined(coordinator)


def joined(coordinator: Coordinator, *, group: Group = SOLO) -> Driven:
    made = Driven(coordinator, group=group)
    made.register(layout_digest="0" * 64, data_identity={})
    return made


@pytest.mark.parametrize("how", ["call", "try_once"])
def test_refused_message_is_repeated_at_once_in_the_present_generation(session, coordinator, how):
    coordinator.answers = [StaleGeneration(present=5), StaleGeneration(present=7)]

    answer = getattr(session, how)(lambda: coordinator.message(session))

    assert answer == "done"
    assert coordinator.seen == [(1, 1), (1, 5), (1, 7)]


def test_coordinator_that_refuses_every_generation_is_not_asked_for_ever(session, coordinator):
    coordinator.answers = [StaleGeneration(present=n) for n in range(sessions.MAX_ADOPTIONS + 1)]

    with pytest.raises(StaleGeneration):
        session.call(lambda: coordinator.message(session))


@pytest.mark.parametrize("how", ["call", "try_once"])
@pytest.mark.parametrize("error", [Evicted(), UnknownWorker()])
def test_worker_that_is_out_registers_again_and_repeats_its_message(
    session, coordinator, how, error
):
    coordinator.answers = [error]

    answer = getattr(session, how)(lambda: coordinator.message(session))

    assert answer == "done"
    assert coordinator.seen == [(1, 1), (2, 1)]


def test_worker_fenced_by_its_own_later_life_goes_on(session, coordinator):
    """The heartbeats registered again while an upload was on its way."""

    def evicted_meanwhile() -> Fenced:
        coordinator.answers.insert(0, Evicted())
        session.try_once(lambda: coordinator.message(session))
        return Fenced()

    coordinator.answers = [evicted_meanwhile]

    assert session.call(lambda: coordinator.message(session)) == "done"
    assert coordinator.seen[-1] == (2, 1)


def test_worker_fenced_before_its_later_life_is_known_here_waits_for_the_answer(
    session, coordinator
):
    """The heartbeats' registration has arrived; its answer has not."""
    arrived, may_answer = threading.Event(), threading.Event()
    register = coordinator.register

    def slow(request: Any) -> Any:
        reply = register(request)
        arrived.set()
        assert may_answer.wait(20.0)
        return reply

    def fenced_meanwhile() -> Fenced:
        coordinator.register = slow
        coordinator.answers.insert(0, Evicted())
        beats.start()
        assert arrived.wait(20.0)
        threading.Timer(0.2, may_answer.set).start()
        return Fenced()

    beats = threading.Thread(target=lambda: session.try_once(lambda: coordinator.message(session)))
    coordinator.answers = [fenced_meanwhile]

    assert session.call(lambda: coordinator.message(session)) == "done"
    beats.join()
    assert coordinator.seen[-1] == (2, 1)
    assert coordinator.registrations == 2


@pytest.mark.parametrize("doubt", [CoordinatorUnreachable, StoreAway, DiskFailed, Superseded])
def test_worker_fenced_by_a_registration_that_got_no_answer_registers_again(
    session, coordinator, doubt
):
    register = coordinator.register

    def lost(request: Any) -> RegisterReply:
        register(request)
        coordinator.register = register
        raise doubt

    coordinator.register = lost
    coordinator.answers = [Evicted(), Fenced(), "done", Fenced()]
    with pytest.raises(doubt):
        session.try_once(lambda: coordinator.message(session))

    assert session.call(lambda: coordinator.message(session)) == "done"
    assert coordinator.seen[-1] == (3, 1)
    with pytest.raises(Fenced):  # that doubt is gone: now it was somebody else
        session.call(lambda: coordinator.message(session))


def test_worker_that_is_fenced_while_it_leaves_has_left(session, coordinator):
    def fenced(_: Any) -> None:
        raise Fenced

    coordinator.leave = fenced

    session.leave()

    assert not session.is_registered


def test_worker_fenced_by_another_process_stops(session, coordinator):
    coordinator.answers = [Fenced()]

    with pytest.raises(Fenced):
        session.call(lambda: coordinator.message(session))


def test_knock_tries_once_when_the_coordinator_is_away(session, coordinator):
    coordinator.answers = [CoordinatorUnreachable()]

    with pytest.raises(CoordinatorUnreachable):
        session.try_once(lambda: coordinator.message(session))

    assert len(coordinator.seen) == 1


def test_worker_that_is_out_comes_back_beside_the_training_under_a_new_manifest(
    session, coordinator
):
    """Evicted during a long step, in which the operator changed the outer learning rate."""
    first = coordinator.info(None)
    manifest = manifest_change.with_outer_lr(first.manifest(), first.outer.lr / 2)
    settings = {name: getattr(manifest, name) for name in Manifest.model_fields}
    newer = first.model_copy(update={**settings, "manifest_sha256": manifest.sha256()})
    register = coordinator.register

    def under_newer(request: Any) -> Any:
        if request.manifest_sha256 != newer.manifest_sha256:
            raise ManifestMismatch
        return register(request)

    coordinator.info, coordinator.register = lambda _: newer, under_newer
    coordinator.answers = [Evicted()]

    assert session.try_once(lambda: coordinator.message(session)) == "done"
    assert coordinator.seen[-1] == (2, 1)


def test_worker_that_left_is_not_brought_back_by_its_heartbeats(session, coordinator):
    def beat_meanwhile() -> None:
        coordinator.answers = [UnknownWorker()]
        with pytest.raises(UnknownWorker):
            session.try_once(lambda: coordinator.message(session))
        coordinator.left += 1

    coordinator.leave = lambda _: beat_meanwhile()

    session.leave()

    assert (coordinator.left, coordinator.registrations) == (1, 1)
    assert not session.is_registered


class Leader(SoloGroup):
    """Rank 0 of 2; what it leads, the other rank is told."""

    size = 2


@pytest.mark.parametrize("group", [SOLO, Leader()], ids=["solo", "leader"])
def test_leader_registers_alone_beside_the_training(coordinator, group):
    """The other ranks may be anywhere: nothing of it is collective."""
    session = joined(coordinator, group=group)
    coordinator.answers = [UnknownWorker("gone")]

    session.try_once(lambda: coordinator.message(session))

    assert (coordinator.sent_alone, coordinator.registrations) == (1, 2)
    assert coordinator.seen == [(1, 1), (2, 1)]


class Follower(SoloGroup):
    """Rank 1 of 2: the outcomes are what the leader tells, whatever this rank knows."""

    rank = 1
    size = 2
    is_leader = False

    def __init__(self, *told: Any) -> None:
        self.told = list(told)

    def lead(self, work: Callable[[], Any]) -> Any:
        return self.told.pop(0)


def test_follower_is_in_the_life_that_the_leader_has(coordinator):
    session = joined(coordinator, group=Follower((1, 1, 0), False, (3, 8, 5)))
    coordinator.answers = [UnknownWorker("gone")]

    session.call(lambda: coordinator.message(session))

    assert coordinator.seen == [(1, 1), (3, 8)]
    assert session.standing.version == 5
    assert coordinator.registrations == 0, "only the leader registers"


@pytest.mark.parametrize("goes_on", [True, False])
def test_follower_that_is_told_of_a_fence_does_as_the_leader(coordinator, goes_on):
    """The leader knows whether it was its own heartbeat thread that registered again."""
    session = joined(coordinator, group=Follower((1, 1, 0), not goes_on, (2, 1, 0)))
    coordinator.answers = [Fenced()]

    if goes_on:
        assert session.call(lambda: coordinator.message(session)) == "done"
        assert session.standing.incarnation == 2
    else:
        with pytest.raises(Fenced):
            session.call(lambda: coordinator.message(session))


@pytest.mark.parametrize("goes_on", [True, False])
def test_follower_that_is_told_of_another_manifest_does_as_the_leader(coordinator, goes_on):
    """The leader may have heard of the newest one before, while it sent: then it is final."""
    session = joined(coordinator, group=Follower((1, 1, 0), goes_on))
    coordinator.answers = [ManifestMismatch()]

    if goes_on:
        assert session.call(lambda: coordinator.message(session)) == "done"
    else:
        with pytest.raises(ManifestMismatch):
            session.call(lambda: coordinator.message(session))


@pytest.mark.parametrize(("group", "looks"), [(Leader(), 1), (SOLO, 2)])
def test_only_a_rank_of_its_own_looks_again_after_an_absence(coordinator, group, looks):
    session = joined(coordinator, group=group)
    coordinator.answers = [CoordinatorUnreachable("away")]

    session.call(lambda: coordinator.message(session))

    assert coordinator.infos == looks
