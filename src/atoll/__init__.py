"""Atoll trains one model on machines that share only an ordinary network.

run = atoll.join(url, token=...)
run.load(model, optimizer)
for rows in run.batches(dataset):
    ...
    run.step(loss=loss)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.client.info import get_info as get_info
    from atoll.island.run import Run as Run
    from atoll.launch.joining import join as join

__version__ = "0.1.0"
__all__ = ["Run", "__version__", "get_info", "join"]

# Loaded on first use: importing atoll must not wait for torch.
_PLACES = {
    "get_info": "atoll.client.info",
    "join": "atoll.launch.joining",
    "Run": "atoll.island.run",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'atoll' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_PLACES[name]), name)
