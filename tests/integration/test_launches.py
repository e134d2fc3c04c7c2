"""With `transport = "torch_dist"` a group is all processes of one torchrun launch, no others."""

import io

import pytest
from pydantic import ValidationError
from rich.console import Console

from atoll.cli import status
from atoll.errors import ProtocolError
from atoll.protocol.messages import Status
from atoll.protocol.sharded import Launch
from tests.hand_ranks import HandRank, Sea

FIRST, SECOND, THIRD = "a" * 32, "b" * 32, "c" * 32
TORCH = {"sharded.transport": "torch_dist"}


@pytest.fixture
def sea(tmp_path):
    made = Sea(tmp_path, TORCH)
    yield made
    made.close()


def launched(sea: Sea, launch: str, *names: str) -> list[HandRank]:
    """Processes of one launch, by torch rank, that have joined and not asked yet."""
    ranks = sea.ranks(*names)
    start_again(launch, *ranks)
    return ranks


def start_again(launch: str, *ranks: HandRank) -> None:
    """What torchrun tells processes that it starts."""
    for rank, one in enumerate(ranks):
        one.launch = Launch(id=launch, rank=rank, size=len(ranks))


def ring(sea: Sea) -> list[str]:
    return [] if sea.group is None else [member.worker_id for member in sea.group.members]


def number(sea: Sea) -> int:
    return 0 if sea.group is None else sea.group.number


def shown(found: Status) -> str:
    """What `atoll status` prints, on one line."""
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(status.view(found))
    return " ".join(console.export_text().split())


def test_group_is_a_launch_in_the_order_of_torch_ranks(sea):
    """Neither worker_ids nor latencies have a say: torch.distributed has its order."""
    ranks = launched(sea, FIRST, "c", "a", "b")
    for rank in ranks:
        far = {"a": 90.0, "b": 90.0, "c": 90.0}
        near = {"a": {"b": 2.0}, "b": {"a": 2.0}}.get(rank.name, {})
        rank.pings = (far | near).get

    sea.formed(*ranks)

    assert ring(sea) == ["c", "a", "b"]


def test_launch_that_is_not_whole_is_no_group_and_says_so(sea):
    one, _, _ = launched(sea, FIRST, "a", "b", "c")
    _, other, _ = launched(sea, SECOND, "d", "e", "f")

    for rank in (one, other):
        rank.ask()
    sea.run_clock(one, other, seconds=30)
    reply = one.ask()

    assert (reply.action, sea.group) == ("wait", None)  # two that ask are min_workers
    assert sea.coordinator.status().notes == (
        "the launch of 'a' waits for its other processes: 1 of 3 ask for a group",
        "the launch of 'e' waits for its other processes: 1 of 3 ask for a group",
    )
    assert reply.reason == "; ".join(sea.coordinator.status().notes)


def test_second_launch_waits_as_a_spare_and_is_never_mixed_in(sea):
    first, second = launched(sea, FIRST, "a", "d"), launched(sea, SECOND, "b", "c")
    for rank in (*first, *second):
        rank.ask()
    for rank in (*first, *second):
        rank.measure()
    assert ring(sea) == ["a", "d"]
    for rank in first:
        rank.enter(rank.ask())

    said = [rank.ask() for rank in second]
    sea.trained(first, 1)
    sea.settle()
    told = [rank.boundary(1).action for rank in first]

    note = f"the launch of 'b' is a spare while group {number(sea)}, another launch, trains"
    assert [(reply.action, reply.reason) for reply in said] == [("wait", note)] * 2
    assert sea.coordinator.status().notes == (note,)
    assert note in shown(sea.coordinator.status())
    assert told == ["go", "go"]  # a newcomer would end the group here


def test_spare_takes_over_when_the_launch_is_gone(sea):
    first = launched(sea, FIRST, "a", "b")
    sea.formed(*first)
    sea.trained(first, 1)
    sea.settle()
    second = launched(sea, SECOND, "c", "d")
    for rank in second:
        rank.ask()

    first[1].leave()
    sea.run_clock(first[0], *second, seconds=6)
    for rank in second:
        rank.measure()

    assert ring(sea) == ["c", "d"]
    restore = second[0].ask().restore
    assert restore is not None
    assert (restore.source, restore.step) == ("checkpoint", 6)


def test_started_again_processes_go_on_from_their_saves(sea):
    ranks = launched(sea, FIRST, "a", "b")
    sea.formed(*ranks)
    for rank in ranks:
        rank.save(3)
    before = number(sea)
    start_again(SECOND, *ranks)
    ranks[0].join()
    assert sea.group is None  # one that is back ends the group of the others

    ranks[1].join()
    sea.formed(*ranks)

    restore = ranks[0].formed.restore
    assert number(sea) > before
    assert restore is not None
    assert (restore.source, restore.step) == ("save", 3)


def test_processes_of_two_lives_of_a_launch_are_no_group(sea):
    """One is started again, the other has not ended yet."""
    a, _ = launched(sea, FIRST, "a", "b")
    a.ask()
    again = HandRank(sea, "b").join()
    again.launch = Launch(id=SECOND, rank=1, size=2)

    again.ask()
    sea.run_clock(a, again, seconds=30)
    before = sea.group
    a.join()
    a.launch = Launch(id=SECOND, rank=0, size=2)

    assert before is None
    sea.formed(a, again)
    assert ring(sea) == ["a", "b"]


def test_process_that_fell_silent_after_it_asked_does_not_count(sea):
    a, b, c = launched(sea, FIRST, "a", "b", "c")
    for rank in (a, b):
        rank.ask()
    sea.run_clock(a, c, seconds=11)

    reply = c.ask()

    assert (reply.action, sea.group) == ("wait", None)
    assert "2 of 3 ask for a group" in reply.reason


def test_process_that_pings_late_does_not_keep_its_launch_out(sea):
    """Nobody of it is left out for a while: a launch is nothing without each process."""
    pair = launched(sea, FIRST, "a", "b")
    numbers = set()
    for _ in range(100):  # 50 s, of which a candidate has 15; the second one never measures
        for rank in pair:
            reply = rank.ask()
            if reply.action == "measure":
                numbers.add(reply.group)
                if rank is pair[0]:
                    rank.measure()
        sea.run_clock(*pair, seconds=0.5)

    assert len(numbers) >= 3


def test_launch_with_fewer_processes_than_min_workers_waits_and_says_so(tmp_path):
    sea = Sea(tmp_path, {**TORCH, "membership.min_workers": 3})
    ranks = launched(sea, FIRST, "a", "b")

    for rank in ranks:
        rank.ask()
    sea.run_clock(*ranks, seconds=30)

    assert sea.group is None
    [note] = sea.coordinator.status().notes
    assert note.startswith("the launch of 'a' has 2 processes, fewer than membership.min_workers=3")
    sea.close()


def test_group_of_a_launch_outlives_the_coordinator(sea):
    ranks = launched(sea, FIRST, "a", "b")
    sea.formed(*ranks)

    sea.restart()

    assert [(r.watch().action, r.watch().group) for r in ranks] == [
        ("train", r.number) for r in ranks
    ]


# Refusals: each leaves what was asked before as it was


@pytest.mark.parametrize(
    ("launch", "says"),
    [
        (None, r"worker_id='b' is of no torchrun launch.*torchrun --nproc-per-node"),
        (Launch(id=FIRST, rank=1, size=3), r"launch\.size=3 of worker_id='b': 'a' .* says 2"),
        (Launch(id=FIRST, rank=0, size=2), r"launch\.rank=0 of worker_id='b' is that of 'a'"),
    ],
    ids=["of none", "another size", "a rank that is taken"],
)
def test_rank_that_does_not_fit_a_launch_is_refused_by_name(sea, launch, says):
    a, b = launched(sea, FIRST, "a", "b")
    right, b.launch = b.launch, launch
    a.ask()

    with pytest.raises(ProtocolError, match=says):
        b.ask()

    assert a.ask().action == "wait"
    b.launch = right  # the control
    sea.formed(a, b)
    assert ring(sea) == ["a", "b"]


def test_launch_is_refused_where_ranks_are_processes_of_their_own(tmp_path):
    sea = Sea(tmp_path)
    [a] = launched(sea, FIRST, "a")

    with pytest.raises(
        ProtocolError, match=r"launch='a+' of worker_id='a': only with .*torch_dist"
    ):
        a.ask()

    assert sea.coordinator.groups.forming.asking == {}
    sea.close()


@pytest.mark.parametrize(
    "told",
    [
        {"rank": 2, "size": 2},
        {"rank": 0, "size": 0},
        {"rank": 0, "size": 1025},
        {"id": "A" * 32},
        {"id": "a" * 33},
    ],
    ids=str,
)
def test_launch_that_cannot_be_is_no_message(told):
    with pytest.raises(ValidationError):
        Launch(**{"id": THIRD, "rank": 0, "size": 2, **told})
