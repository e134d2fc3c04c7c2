"""Every test of this folder computes on one thread, unless it sets another number itself."""

from collections.abc import Iterator

import pytest

from atoll.pools.gradcheck.crew import Crews


@pytest.fixture(autouse=True, scope="module")
def computing_on_one_thread(one_thread: None) -> None: ...


@pytest.fixture(scope="session")
def crews() -> Iterator[Crews]:
    """Gloo processes for checks of gradients, started once for each number of ranks."""
    with Crews() as made:
        yield made
