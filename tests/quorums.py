"""Ranks that commit by quorum, in threads, in fibers and over gRPC; and one process to compare."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from atoll.clock import Clock, SystemClock
from atoll.collectives.local import LocalGroup
from atoll.collectives.peers import Peers
from atoll.collectives.runners import Inline, Threaded
from atoll.errors import StaleContribution
from atoll.layout import Span
from atoll.models import gpt, registry
from atoll.simulate.fibers import Scheduler
from atoll.strategies.sharded import micro_batches
from atoll.strategies.sharded.commit import Kind, Outcome, Policy
from atoll.strategies.sharded.quorum.owner import Rule
from atoll.strategies.sharded.quorum.rank import QuorumRank, Reception
from atoll.strategies.sharded.quorum.settings import Settings
from atoll.strategies.sharded.step import Made
from tests import ranks_on_loopback, sharded
from tests.sharded import Training

DEADLINE = 5.0


@dataclass
class Member:
    """A rank, and what it heard and made."""

    rank: QuorumRank
    clock: Clock
    peers: Peers
    heard: list[Outcome] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    abandoned: list[int] = field(default_factory=list)  # steps


Work = Callable[[Member], Any]
Pause = Callable[[Member, int], None]  # before the backward pass of a step


def opened(
    training: Training,
    peers: Peers,
    reception: Reception,
    clock: Clock,
    *,
    spawn: Callable[..., Any],
    lane: Callable[[str], Any] = Threaded,
    kind: Kind = "quorum",
    min_workers: int = 1,
    deadline_seconds: float = DEADLINE,
    **options: Any,
) -> Member:
    """A rank that is ready for its first step."""
    heard: list[Outcome] = []
    settings = Settings(
        group=1,
        version=0,
        policy=Policy(
            kind=kind,
            size=peers.size,
            min_workers=min_workers,
            deadline_seconds=deadline_seconds,
        ),
        rule=Rule(sharded.RULE, training.clip),
        micro_batches=training.micro_batches,
    )
    rank = QuorumRank(
        training.hollow(training.model),
        sharded.filled(training, rank=peers.rank, size=peers.size),
        peers,
        reception,
        settings,
        clock=clock,
        spawn=spawn,
        lane=lane,
        told=heard.append,
        **options,
    )
    return Member(rank, clock, peers, heard)


def trained(training: Training, pause: Pause = lambda *_: None) -> Work:
    """All steps; a rank that is late goes on with the present one."""

    def work(member: Member) -> Member:
        steps, peers = member.rank.steps, member.peers

        def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
            loss = gpt.loss(model, rows)
            pause(member, steps.present)
            return loss

        while (step := steps.present) <= training.steps:
            own = sharded.own(training, step, peers)
            try:
                member.made.append(steps.train(step, own, loss_of, lr=training.rate(step)))
            except StaleContribution:
                member.abandoned.append(step)
        return member

    return work


def in_fibers(
    size: int, training: Training, work: Work, *, latency: Any = None, **options: Any
) -> list[Any]:
    """What each rank's work returned, in fibers on a virtual clock."""
    scheduler = Scheduler()
    group = LocalGroup(size, clock=scheduler, latency=latency)
    found: dict[int, Any] = {}

    def ready(number: int) -> Member:
        reception = Reception()
        peers = group.rank(
            number, Inline(), source=reception, desk=reception, timeout_seconds=2 * DEADLINE
        )
        beside: dict[str, Any] = {"spawn": scheduler.spawn, "lane": lambda _: Inline()}
        return opened(training, peers, reception, scheduler, **beside, **options)

    def run(number: int, member: Member) -> None:
        found[number] = work(member)

    for number, member in enumerate([ready(number) for number in range(size)]):
        scheduler.spawn(f"rank-{number}", partial(run, number, member))
    scheduler.run_until(lambda: len(found) == size, limit_seconds=10_000)
    return [found[number] for number in range(size)]


def _spawned(stack: ExitStack) -> Callable[[str, Callable[[], None]], None]:
    def spawn(name: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        stack.callback(thread.join)

    return spawn


def in_threads(
    size: int, training: Training, work: Work, *, timeout_seconds: float = 30.0, **options: Any
) -> list[Any]:
    """The same in threads."""
    clock = SystemClock()
    group = LocalGroup(size, clock=clock)
    receptions = [Reception() for _ in range(size)]
    with ExitStack() as stack:
        members = []
        for number, reception in enumerate(receptions):
            runner = Threaded(f"rank-{number}")
            stack.callback(runner.close)
            members.append(
                group.rank(
                    number,
                    runner,
                    source=reception,
                    desk=reception,
                    timeout_seconds=timeout_seconds,
                )
            )
        return _together(stack, members, receptions, training, work, clock, **options)


def over_grpc(
    size: int,
    training: Training,
    work: Work,
    *,
    is_tls: bool = False,
    timeout_seconds: float = 30.0,
    **options: Any,
) -> list[Any]:
    """The same between servers on loopback."""
    receptions = [Reception() for _ in range(size)]
    with ranks_on_loopback.servers(size, is_tls=is_tls) as made, ExitStack() as stack:
        members: list[Peers] = [
            stack.enter_context(
                made.member(k, source=one, desk=one, timeout_seconds=timeout_seconds)
            )
            for k, one in enumerate(receptions)
        ]
        return _together(stack, members, receptions, training, work, SystemClock(), **options)


def _together(
    stack: ExitStack,
    members: Sequence[Peers],
    receptions: Sequence[Reception],
    training: Training,
    work: Work,
    clock: Clock,
    **options: Any,
) -> list[Any]:
    spawn = _spawned(stack)
    ranks = []
    for peers, reception in zip(members, receptions, strict=True):
        ranks.append(opened(training, peers, reception, clock, spawn=spawn, **options))
    # In this order: what others still ask of a rank that is done is answered.
    with ThreadPoolExecutor(len(ranks)) as pool:
        try:
            return [made.result() for made in [pool.submit(work, one) for one in ranks]]
        finally:
            for one in ranks:
                one.rank.close()


def alone(training: Training, sets: Mapping[int, frozenset[int]], size: int) -> dict[str, Tensor]:
    """One process with torch's own AdamW, over the rows that were in each step's set."""
    model = registry.build(training.model).to(training.dtype)
    with torch.no_grad():
        for name, values in training.initial().items():
            model.get_parameter(name).copy_(values)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    for step in range(1, training.steps + 1):
        spans = [span for rank in sorted(sets[step]) for span in _rows_of(training, rank, size)]
        rows = torch.cat([training.rows(step)[span.start : span.stop] for span in spans])
        for group in optimizer.param_groups:
            group["lr"] = training.rate(step)
        gpt.loss(model, rows).backward()
        nn.utils.clip_grad_norm_(model.parameters(), training.clip or torch.inf)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def _rows_of(training: Training, rank: int, size: int) -> list[Span]:
    cut = micro_batches.of(training.batch, rank=rank, size=size, count=training.micro_batches)
    return [one.rows for one in cut if one.counts]
