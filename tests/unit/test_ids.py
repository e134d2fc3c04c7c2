"""Names that cross processes: what they may hold, alike in a flag and in a message."""

from typing import Annotated, Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from atoll import ids
from atoll.errors import ConfigError
from atoll.protocol.fields import WorkerName
from atoll.protocol.messages import Identity, Info, RegisterRequest

GOOD = ["a", "0", "_", "a.b-c_D", "a..", "x" * 64]
BAD = ["", ".", "..", ".a", "-a", "a/b", "a b", "a\n", "ä", "x" * 65]


def _adapter(message: type[BaseModel]) -> TypeAdapter[str]:
    """What checks the run_id of a message."""
    field: Any = message.model_fields["run_id"]
    wanted: Any = Annotated[field.annotation, field]
    return TypeAdapter(wanted)


@pytest.mark.parametrize("name", GOOD)
def test_worker_id_that_keeps_the_rule_is_taken(name):
    assert ids.worker_id(name) == name
    assert TypeAdapter(WorkerName).validate_python(name) == name


@pytest.mark.parametrize("name", BAD)
def test_worker_id_that_breaks_the_rule_is_refused_with_it(name):
    """A worker_id names a directory of the island."""
    with pytest.raises(ConfigError, match=r"that do not start with \. or -"):
        ids.worker_id(name)


@pytest.mark.parametrize("name", BAD)
def test_worker_id_that_breaks_the_rule_is_refused_in_a_message(name):
    with pytest.raises(ValidationError, match="should match"):
        TypeAdapter(WorkerName).validate_python(name)


@pytest.mark.parametrize("message", [Identity, RegisterRequest, Info])
@pytest.mark.parametrize("run_id", ["", ".", "..", "../../x", "/etc", "a.b", "a\n", "x" * 65])
def test_run_id_that_means_something_in_a_path_is_refused(message, run_id):
    """A coordinator's run_id names a directory of the island."""
    with pytest.raises(ValidationError, match="should match"):
        _adapter(message).validate_python(run_id)


@pytest.mark.parametrize("message", [Identity, RegisterRequest, Info])
@pytest.mark.parametrize("run_id", ["0123456789abcdef", "simulated", "by-hand"])
def test_run_id_of_a_run_is_taken(message, run_id):
    assert _adapter(message).validate_python(run_id) == run_id
