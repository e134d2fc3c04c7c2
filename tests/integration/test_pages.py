"""Answers in pages: every worker and every queue once, however many a page has."""

from collections.abc import Iterator

import pytest

from atoll.client import pages
from atoll.errors import ProtocolError
from atoll.protocol import messages, work
from atoll.protocol.messages import PageRequest, ReadyRequest, StatusRequest, WorkersRequest
from atoll.protocol.work import Queue, Work, WorkRequest
from tests import served
from tests.served import Served

NAMES = ["isle-1", "isle-10", "isle-2", "isle-3", "isle_4"]  # in their order


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served.serving(
        tmp_path_factory.mktemp("pages") / "state", membership={"min_workers": 9}
    ) as running:
        for name in reversed(NAMES):
            running.worker(name)
        yield running


@pytest.mark.parametrize("limit", [1, 2, 4, 5, 1000])
@pytest.mark.parametrize("kind", [ReadyRequest, StatusRequest, WorkersRequest])
def test_pages_together_name_every_worker_once(
    coordinator: Served, kind: type[PageRequest[messages.Status]], limit: int
) -> None:
    link = coordinator.client()

    first = link.send(kind(limit=limit))
    whole = pages.of_workers(link, kind(limit=limit))

    assert [worker.worker_id for worker in first.workers] == NAMES[:limit]
    assert bool(first.more_after) == (limit < len(NAMES))
    assert [worker.worker_id for worker in whole.workers] == NAMES
    assert not whole.more_after


def test_page_of_more_workers_than_one_answer_has_is_refused(
    coordinator: Served,
) -> None:
    request = StatusRequest.model_construct(limit=messages.MAX_WORKERS + 1)
    link = coordinator.client()

    with pytest.raises(ProtocolError, match=r"query\.limit: .*less than or equal to 1000"):
        link.send(request)


def queue(epoch: int) -> Queue:
    counts = {name: 0 for name in Queue.model_fields if name.startswith(("rows", "units", "unit"))}
    given = {"dataset_id": "d", "shuffle_seed": 0, "epoch": epoch, "length": 0}
    return Queue.model_validate({**given, **counts, "issued": "", "done": "", "workers": ()})


def test_pages_of_queues_hold_every_queue_once(
    coordinator: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    queues = tuple(queue(epoch) for epoch in range(2 * work.QUEUES_IN_PAGE + 1))
    real = coordinator.coordinator.work()
    whole = real.model_copy(update={"queues": queues})
    monkeypatch.setattr(coordinator.coordinator, "work", lambda: whole)
    link = coordinator.client()

    first, together = link.send(WorkRequest()), pages.of_queues(link)

    assert isinstance(first, Work)
    assert first.queues == queues[: work.QUEUES_IN_PAGE]
    assert together.queues == queues
    assert not together.more_from
