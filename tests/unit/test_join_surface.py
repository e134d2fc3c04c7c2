"""No way to set on a worker what must match: not by flag, argument or environment."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from pydantic import BaseModel

import atoll
from atoll.cli import app as commands
from atoll.cli import join as join_command
from atoll.launch import joining
from atoll.protocol.manifest import Manifest

# Where this machine has the run's files or its own code of the run's model; what is there must be
# the run's, or it is refused.
PLACES = {"data", "model"}
# What says where to go, who this is and where its own things are.
OWN = {
    *("listen", "advertise"),  # where a rank of a sharded run is reached
    "bucket",  # where an island of a gather run publishes
    *("url", "token", "fingerprint", "insecure"),
    *("worker_id", "state", "device", "json", "log_level"),
    *("parallel", "group_timeout"),  # how this machine places the ranks of its island
    *PLACES,
}


def names(model: type[BaseModel] = Manifest) -> Iterator[str]:
    """Every name in a manifest: sections, settings, and both joined."""
    for name, field in model.model_fields.items():
        yield name
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            for inner in names(section):
                yield inner
                yield f"{name}_{inner}"


SETTINGS = sorted(set(names()))


def options() -> set[str]:
    """The arguments and options of `atoll join`, as a person types them."""
    command = typer.main.get_command(commands.app).commands["join"]  # type: ignore[attr-defined]
    spelled = {
        option.lstrip("-").replace("-", "_")
        for parameter in command.params
        for option in [*parameter.opts, *parameter.secondary_opts]
    }
    return spelled - {"help"}


def variables() -> set[str]:
    """Environment variables that joining reads, by flag or by name in the source."""
    command = typer.main.get_command(commands.app).commands["join"]  # type: ignore[attr-defined]
    found = {str(p.envvar) for p in command.params if p.envvar}
    for module in (join_command, joining):
        tree = ast.parse(Path(inspect.getfile(module)).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
                found |= {
                    c.value
                    for call in ast.walk(tree)
                    if isinstance(call, ast.Call)
                    for c in call.args
                    if isinstance(c, ast.Constant)
                    and isinstance(c.value, str)
                    and c.value.isupper()
                }
    return found


def test_walk_finds_sections_and_settings_of_sections():
    """The control: the comparison below is with something."""
    assert {"sync_every", "codec", "upload_codec", "lr", "schedule_kind", "quorum"} <= set(SETTINGS)
    assert len(SETTINGS) > 80


def test_join_has_the_options_that_are_its_own_and_no_other():
    assert options() == OWN


@pytest.mark.parametrize("setting", SETTINGS)
def test_join_has_no_option_for_a_setting(setting):
    assert setting not in options() - PLACES


@pytest.mark.parametrize("setting", SETTINGS)
def test_join_of_the_library_has_no_argument_for_a_setting(setting):
    assert setting not in inspect.signature(atoll.join).parameters


@pytest.mark.parametrize("setting", SETTINGS)
def test_joining_reads_no_variable_for_a_setting(setting):
    read = {name.removeprefix("ATOLL_").lower() for name in variables()}

    assert setting not in read


def test_joining_reads_only_the_token_and_the_home_of_state():
    assert variables() == {"ATOLL_TOKEN", "XDG_STATE_HOME"}
