"""`--model module:factory`: what is found, and how the rest is refused."""

import sys
from pathlib import Path

import pytest
from torch import nn

from atoll.cli import factory
from atoll.errors import ConfigError

CODE = """
from torch import nn

NUMBER = 3

def make():
    return nn.Linear(2, 3)

def other():
    return "linear"

def broken():
    raise ValueError("the user's own")
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with the user's modules; import state as before afterwards."""
    (tmp_path / "own_code.py").write_text(CODE)
    (tmp_path / "own_half.py").write_text("import nonesuch_of_the_tests")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own_code", raising=False)
    monkeypatch.delitem(sys.modules, "own_half", raising=False)


def test_factory_of_the_working_directory_is_called():
    model = factory.build("own_code:make")

    assert isinstance(model, nn.Linear)
    assert model.out_features == 3


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("own_code", "names no factory"),
        ("own_code:", "names no factory"),
        (":make", "names no factory"),
        ("own_code.py:make", "no module 'own_code.py'"),
        ("../own_code:make", "names no factory"),
        ("own_code:make()", "names no factory"),
        ("nonesuch:make", "no module 'nonesuch'"),
        ("nonesuch.inner:make", "no module 'nonesuch'"),
        ("own_code:absent", "has no 'absent'"),
        ("own_code:NUMBER", "has no 'NUMBER'"),
        ("own_code:other", "returned 'str'"),
    ],
)
def test_what_is_no_factory_is_refused_with_the_shape(spec, reason):
    with pytest.raises(ConfigError, match=rf"{reason}.*factory\(\) returns a torch\.nn\.Module"):
        factory.build(spec)


def test_error_of_the_users_code_is_the_users():
    with pytest.raises(ValueError, match="the user's own"):
        factory.build("own_code:broken")


def test_missing_import_of_the_users_code_is_the_users():
    with pytest.raises(ModuleNotFoundError, match="nonesuch_of_the_tests"):
        factory.build("own_half:make")
