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
    """The datasets of a mixture, in its order; any other dataset is its own only part, weight 1."""
    alone = {"identity": identity, "name": identity.get("kind", "data"), "weight": 1}
    entries = identity["datasets"] if identity.get("kind") == MIXTURE else [alone]
    return tuple(
        Part(
            dataset_id(entry["identity"]),
            str(entry["name"]),
            int(entry["identity"]["rows"]),
            int(entry["weight"]),
        )
        for entry in entries
    )
