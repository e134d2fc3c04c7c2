"""Answers that come in pages, put together again for whoever wants to see all of them."""

from typing import Any, TypeVar

from atoll.client.http import HttpClient
from atoll.protocol.messages import PageOfWorkers, PageRequest
from atoll.protocol.work import Work, WorkRequest

P = TypeVar("P", bound=PageOfWorkers)


def of_workers(link: HttpClient, message: PageRequest[P]) -> P:
    """The answer about all workers: the last page, with the workers of those before it."""
    workers: tuple[Any, ...] = ()
    while True:
        page: Any = link.send(message)
        workers += page.workers
        if not page.more_after:
            whole: P = page.model_copy(update={"workers": workers})
            return whole
        message = message.model_copy(update={"after": page.more_after})


def of_queues(link: HttpClient) -> Work:
    """The answer about all queues that are shown."""
    page = link.send(WorkRequest())
    queues = page.queues
    while page.more_from:
        page = link.send(WorkRequest(first=page.more_from))
        queues += page.queues
    return page.model_copy(update={"queues": queues})
