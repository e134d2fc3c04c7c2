"""A coordinator of a sharded run, and a group of three ranks led by hand."""

import pytest

from tests.hand_ranks import Sea


@pytest.fixture
def sea(tmp_path):
    made = Sea(tmp_path)
    yield made
    made.close()


@pytest.fixture
def trio(sea):
    return sea.formed(*sea.ranks("a", "b", "c"))
