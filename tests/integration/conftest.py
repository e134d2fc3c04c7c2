"""Every test of this folder computes on one thread, unless it sets another number itself."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def computing_on_one_thread(one_thread: None) -> None: ...
