"""`atoll gradcheck`: how sizes are written, and options that are refused before anything runs."""

import pytest
from typer.testing import CliRunner

from atoll.cli import gradcheck
from atoll.cli.app import app
from atoll.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("ranks=4", {"ranks": 4}),
        ("ci=6,layers=2x3,ppgd=2", {"ci": 6, "layers": (2, 3), "ppgd": 2}),
        ("ci=6, layers=2x3", {"ci": 6, "layers": (2, 3)}),
    ],
)
def test_sizes_are_read(text, sizes):
    assert gradcheck.parse_sizes(text) == sizes


@pytest.mark.parametrize(
    "text", ["", "4", "ci=", "ci=0", "ci=2x0", "ci=2x3x4", "ci=-1", "ci=2,ci=3", "2x=3", "ci=²"]
)
def test_sizes_that_are_written_otherwise_are_refused(text):
    with pytest.raises(ConfigError, match="write it like ci=6,layers=2x3"):
        gradcheck.parse_sizes(text)


def test_kind_of_ranks_that_is_not_known_is_refused():
    done = CliRunner().invoke(app, ["gradcheck", "a.py", "--ranks", "nccl"])

    assert isinstance(done.exception, ConfigError)
    assert "--ranks 'nccl' is not known; use one of local, gloo" in str(done.exception)


def test_command_needs_a_file():
    assert CliRunner().invoke(app, ["gradcheck"]).exit_code == 2
