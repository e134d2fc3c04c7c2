"""Strategies by name: Atoll's own, those of other distributions, and what is refused."""

import pytest

from atoll.errors import ConfigError
from atoll.protocol.manifest import Manifest
from atoll.strategies import registry
from atoll.strategies.diloco.sync import Sync
from tests import distributions
from tests.clusters import SMALL, manifest_for

SOURCE = """
from atoll.errors import ConfigError
from atoll.strategies.diloco.sync import Sync

class Turns(Sync):
    lead = 3

def refusing(manifest):
    raise ConfigError("weighting='tokens': turns count alike")
"""


def manifest(**changes: object) -> Manifest:
    return manifest_for(SMALL).model_copy(update=changes)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An empty folder that this process looks for distributions in."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_run_that_names_nothing_is_synchronous_diloco():
    assert registry.of(manifest_for(SMALL)) == Sync(manifest_for(SMALL))


def test_unknown_strategy_is_refused_with_what_is_known():
    with pytest.raises(ConfigError) as refused:
        registry.of(manifest(strategy="unheard-of"))

    said = str(refused.value)
    assert said.startswith("strategy='unheard-of' is not installed here; ")
    assert "it runs strategy 'gather' or 'sharded', strategy 'diloco' in mode 'async'," in said
    assert "entry-point group 'atoll.strategies'" in said


def test_unknown_mode_is_refused_with_what_is_known():
    with pytest.raises(
        ConfigError,
        match=r"mode='turns' is not a mode of .* in mode 'async', 'streaming' or 'sync'$",
    ):
        registry.of(manifest(mode="turns"))


def test_library_is_refused_as_what_it_is():
    with pytest.raises(ConfigError, match=r"'pools' is a library .* no coordinator; it runs"):
        registry.refuse_unknown({"strategy": "pools"})


def test_settings_that_name_nothing_are_known():
    registry.refuse_unknown({})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_fragments": 2}, "num_fragments=2 needs mode 'streaming'"),
        ({"dylu": True}, "dylu=True needs mode 'async'"),
    ],
)
def test_setting_of_another_mode_is_refused_by_name(changes, says):
    with pytest.raises(ConfigError, match=says):
        registry.of(manifest(**changes))


def test_strategy_of_a_distribution_is_found_by_its_entry_point(site):
    distributions.write(site, "turns", "turns_a:Turns", SOURCE)

    found = registry.of(manifest(strategy="turns"))

    assert found.lead == 3
    registry.refuse_unknown({"strategy": "turns"})


def test_strategy_of_a_distribution_refuses_settings_itself(site):
    distributions.write(site, "turns", "turns_b:refusing", SOURCE)

    with pytest.raises(ConfigError, match="turns count alike"):
        registry.of(manifest(strategy="turns"))


def test_installed_strategies_are_among_what_is_known(site):
    distributions.write(site, "turns", "turns_c:Turns", SOURCE)

    with pytest.raises(
        ConfigError,
        match="'diloco' in mode 'async', 'streaming' or 'sync', and strategy 'turns'; install",
    ):
        registry.of(manifest(strategy="unheard-of"))


def test_name_of_atolls_own_is_not_taken_by_a_distribution(site):
    distributions.write(site, "diloco", "turns_d:Turns", SOURCE)

    assert type(registry.of(manifest_for(SMALL))) is Sync
    with pytest.raises(ConfigError, match=r"in mode 'async', 'streaming' or 'sync'$"):
        registry.of(manifest(mode="turns"))


@pytest.mark.parametrize("target", ["turns_x:Absent", "turns_y:broken"])
def test_strategy_that_cannot_be_loaded_or_made_is_refused_by_name(site, target):
    source = SOURCE + "\ndef broken(manifest):\n    raise RuntimeError('no such thing')\n"
    distributions.write(site, "turns", target, source)

    with pytest.raises(ConfigError, match="strategy='turns' cannot be used here: "):
        registry.of(manifest(strategy="turns"))
