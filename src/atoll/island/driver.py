"""Drives an island's conversation in a process: over a link, on a clock, with threads that save."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any, TypeVar

from atoll.clock import Clock
from atoll.island.conversation import intents
from atoll.island.conversation.intents import Steps, Train
from atoll.island.gather.base import Buckets, Collect, Publish
from atoll.island.link.base import Download, Link
from atoll.island.ranks.group import SOLO, Group

T = TypeVar("T")


class Over(Exception):
    """Unwinds steps beside a training that has ended: nobody waits for them any more."""


class Driver:
    """Carries out what steps ask for, and blocks meanwhile. Each thread may drive its own steps.

    `evaluate` and `foresee` are what the training script's side does about rows.
    """

    def __init__(
        self, link: Link, clock: Clock, group: Group = SOLO, *, alone: bool = False
    ) -> None:
        self.link = link
        self._alone = alone  # for steps of the leader alone, beside the training
        self.is_over: Callable[[], bool] = lambda: False  # whether they are to end
        self.evaluate: Callable[[intents.Evaluate], Any] = lambda _: None
        self.foresee: Callable[[intents.Foresee], None] = lambda _: None
        self.buckets: Buckets | None = None  # where the run has some
        self._clock = clock
        self._group = group

    def run(self, steps: Steps[T]) -> T:
        """Carries out `steps`, which must not ask for training; returns their result."""
        results: list[T] = []

        def kept() -> Steps[None]:
            results.append((yield from steps))

        train = self.until_training(kept())
        assert train is None, f"{train} where nothing is to be trained"
        return results[0]

    def until_training(self, steps: Steps[Any], answer: object = None) -> Train | None:
        """Carries out `steps` until they ask for training, which is returned; None at their end.

        `answer` is the result of the training they asked for before.
        """
        error: BaseException | None = None
        while True:
            try:
                intent = steps.send(answer) if error is None else steps.throw(error)
            except StopIteration:
                return None
            if isinstance(intent, Train):
                return intent
            answer = error = None
            try:
                answer = self._do(intent)
            except BaseException as exc:  # whatever it is, the steps unwind with it
                error = exc

    def _do(self, intent: object) -> Any:
        if self.is_over():
            raise Over
        match intent:
            case intents.Send(message, alone):
                return self.link.send(message, alone=alone or self._alone)
            case intents.Upload(identity, frame, before_commit):
                return self.link.upload(identity, frame, before_commit=before_commit)
            case Download():
                return self.link.download(intent)
            case Publish() if self.buckets is not None:
                return self.buckets.publish(intent)
            case Collect() if self.buckets is not None:
                return self.buckets.collect(intent)
            case intents.Attend(identity):
                return self.link.attend(identity)
            case intents.Pause(seconds):
                return self._clock.sleep(seconds)
            case intents.Until(holds, changed):
                return self._clock.wait_for(holds, changed)
            case intents.Persist(work):
                return _begun(work)
            case intents.Lead(make):
                return self._group.lead(wraps(make)(lambda: self.run(make())))
            case intents.Evaluate():
                return self.evaluate(intent)
            case intents.Foresee():
                return self.foresee(intent)
        raise AssertionError(f"nobody does {intent}")


def _begun(work: Callable[[], None]) -> Callable[[], None]:
    """Starts `work` in a thread; returns a function that waits for its end and raises its error."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="saving")
    saving = pool.submit(work)
    pool.shutdown(wait=False)
    return saving.result
