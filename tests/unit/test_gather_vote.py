"""Votes, routes and the scratch file of a window."""

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.errors import ConfigError, Diverged, GroupBroken, ProtocolError, StoreError
from atoll.gather import events, supports
from atoll.gather.exchange import Routes
from atoll.gather.quality import quality
from atoll.gather.regrouped import Regrouped
from atoll.gather.turns import Turns
from atoll.gather.vote import agree, vote
from atoll.layout import GROUP_ELEMENTS, Layout, Span
from tests import gathers
from tests.rank_groups import fibers

LAYOUT = Layout.of([("a", (3 * GROUP_ELEMENTS,), "float32")])


def voted(troubles: dict[int, Exception]) -> list[tuple[type, str]]:
    """What each of three ranks raises."""

    def work(ranks):
        try:
            vote(ranks, Turns(1, 0).next("control"), troubles.get(ranks.rank))
        except Exception as exc:
            return type(exc), str(exc)
        return None

    return fibers(3, "direct", work)


def test_vote_without_trouble_lets_all_go_on():
    assert voted({}) == [None] * 3


def test_trouble_of_one_rank_is_raised_on_all_by_its_name():
    assert (
        voted({1: Diverged("tile 7 is infinite")}) == [(Diverged, "rank 1: tile 7 is infinite")] * 3
    )


def test_vote_names_all_that_met_something_and_is_of_the_lowest_ranks_kind():
    found = voted({2: Diverged("late"), 1: StoreError("early")})

    assert found == [(StoreError, "rank 1: early; rank 2: late")] * 3


def test_trouble_that_is_no_error_of_ours_breaks_the_group():
    assert voted({0: ZeroDivisionError()}) == [(GroupBroken, "rank 0: ZeroDivisionError")] * 3


def test_long_sentence_is_cut_and_still_heard():
    found = voted({0: StoreError("ü" * 100_000)})

    assert found == [(StoreError, "rank 0: " + "ü" * 500)] * 3


def test_long_sentence_of_the_widest_characters_is_still_heard():
    """As ASCII each takes 12 bytes; a word beyond its limit hid the error that it was to tell."""
    found = voted({0: StoreError("\U0001f3dd" * 500)})

    assert found == [(StoreError, "rank 0: " + "\U0001f3dd" * 500)] * 3


@pytest.mark.parametrize(("flags", "all_do"), [((1, 1, 1), True), ((1, 0, 1), False)])
def test_flag_holds_when_every_rank_gives_it(flags, all_do):
    def work(ranks):
        return agree(ranks, Turns(1, 0).next("control"), bool(flags[ranks.rank]))

    assert fibers(3, "direct", work) == [all_do] * 3


def test_word_that_is_no_vote_is_refused():
    def work(ranks):
        key = Turns(1, 0).next("control")
        if ranks.rank == 1:
            ranks.all_gather_bytes(key, b'{"code":7}', limit=4_096)
            return
        with pytest.raises(ProtocolError, match="rank 1 gave a word of 10 bytes that is no vote"):
            vote(ranks, key, None)

    fibers(2, "direct", work)


# Routes


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"owners": (Span(0, 65_536),)}, "do not cover"),
        ({"owners": (Span(65_536, 196_608), Span(0, 65_536))}, "in order"),
        ({"holders": {"a": 2}}, r"ranks \[2\]"),
        ({"tiles_per_exchange": 0}, "tiles_per_exchange=0"),
    ],
)
def test_routes_that_leave_something_without_an_owner_are_refused(changes, told):
    sound: dict[str, Any] = {
        "layout": LAYOUT,
        "owners": (Span(0, 65_536), Span(65_536, 196_608)),
        "holders": {"a": 1},
        "tile_bytes": gathers.TILE_BYTES,
        "tiles_per_exchange": 1,
    }
    Routes(**sound)

    with pytest.raises(ConfigError, match=told):
        Routes(**{**sound, **changes})


# The scratch file


def test_tile_that_changed_on_the_disk_is_not_applied(tmp_path, monkeypatch):
    span = Span(GROUP_ELEMENTS, 2 * GROUP_ELEMENTS)
    slices = np.ones((2, supports.nbytes_of(span)), np.uint8)
    with Regrouped(tmp_path, Span(0, LAYOUT.size), peers=2) as tiles:
        tiles.write(span, slices)
        assert np.array_equal(tiles.read(span), slices)
        genuine = os.preadv
        monkeypatch.setattr(os, "preadv", lambda fd, into, at: genuine(fd, into, at - 1))

        with pytest.raises(StoreError, match="is not what was written a moment ago"):
            tiles.read(span)


def test_scratch_file_has_no_name(tmp_path):
    with Regrouped(tmp_path, Span(0, LAYOUT.size), peers=2):
        assert list(tmp_path.iterdir()) == []


def test_missing_directory_is_named():
    with pytest.raises(StoreError, match="/nowhere"):
        Regrouped(Path("/nowhere"), Span(0, LAYOUT.size), peers=1)


# The log


def test_window_is_one_log_event_with_its_numbers(caplog):
    [done] = gathers.window(gathers.peers(3), gathers.Setting(), gathers.start())
    made = quality([], primaries=["4", "5", "6"], reserves=[])

    with caplog.at_level(logging.INFO, "atoll.gather.events"):
        events.applied(7, done=done, quality=made, seconds=1.5, download_bytes=3)

    [record] = caplog.records
    assert record.getMessage() == "window applied"
    told = vars(record)
    assert (told["window"], told["uids"], told["intended"]) == (7, ["4", "5", "6"], 3)
    assert (told["pairs_checked"], told["params_digest"]) == (3, done.digest.root)
