"""What a run's data is made of, read from its identity: one dataset, or several with weights.

Needs no file: the coordinator plans rows of data that it may not have.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atoll.data.base import dataset_id

MIXTURE = "mixture"  # the kind of several datasets


@dataclass(frozen=True, slots=True)
class Part:
    """One dataset of a run."""

    dataset_id: str
    name: str
    length: int  # training rows; 0: a stream
    weight: int


def parts_of(identity: Mapping[str, Any]) -> tuple[Part, ...]:
    """The datasets that `identity` names, in its order; of an ordinary one itself, weight 1."""
    if identity.get("kind") != MIXTURE:
        name = str(identity.get("kind", "data"))
        return (Part(dataset_id(identity), name, int(identity["rows"]), 1),)
    return tuple(
        Part(
            dataset_id(entry["identity"]),
            str(entry["name"]),
            int(entry["identity"]["rows"]),
            int(entry["weight"]),
        )
        for entry in identity["datasets"]
    )
