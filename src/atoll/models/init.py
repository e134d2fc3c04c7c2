"""Initial weights from a seed: each tensor's values depend on the seed and its name only.

Drawn with numpy's Philox, because `torch.randn` gives other bits on other CPU instruction sets. A
run still records its initial weights as a blob: numpy promises the raw stream, not the normal
transform, to be the same in every version.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from atoll.errors import ConfigError
from atoll.layout import Layout, TensorSpec
from atoll.models import from_config, registry

STANDARD_DEVIATION = 0.02  # GPT-2
# Matrices that write to the residual stream start smaller, by 1/sqrt(their number), so that the
# stream's variance does not grow with depth (GPT-2). There are 2 to a layer.
RESIDUAL_SUFFIX = ".project.weight"
BIAS_SUFFIX = ".bias"


def initial(
    definition: Mapping[str, object], layout: Layout, *, seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Name and fp32 value of each tensor of a new run.

    A `transformers` model starts as its architecture prescribes (norms around zero, state-space
    parameters and the like have rules of their own), with torch's generator: those bits may differ
    between machines.
    """
    if registry.architecture_of(definition) != from_config.NAME:
        yield from initial_weights(layout, seed=seed)
        return
    for name, parameter in from_config.initialized(definition, seed=seed).named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise ConfigError(
                f"transformers gives tensor {name!r} no finite initial weights; start the run "
                f"from a file with model.start_from"
            )
        yield name, parameter.detach()


def initial_weights(layout: Layout, *, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Name and fp32 value of each tensor in turn: biases 0, other vectors 1, the rest normal."""
    residual = sum(spec.name.endswith(RESIDUAL_SUFFIX) for spec in layout.tensors)
    for spec in layout.tensors:
        if len(spec.shape) < 2:
            start = 0.0 if spec.name.endswith(BIAS_SUFFIX) else 1.0
            yield spec.name, torch.full(spec.shape, start, dtype=torch.float32)
            continue
        scale = STANDARD_DEVIATION
        if spec.name.endswith(RESIDUAL_SUFFIX):
            scale /= math.sqrt(residual)
        yield spec.name, _normal(spec, seed=seed, scale=scale)


def _normal(spec: TensorSpec, *, seed: int, scale: float) -> Tensor:
    digest = hashlib.sha256(f"atoll weights {seed} {spec.name}".encode()).digest()
    key = np.frombuffer(digest[:16], dtype="<u8")
    generator = np.random.Generator(np.random.Philox(key=key))
    values = generator.standard_normal(spec.shape, dtype=np.float32)
    values *= np.float32(scale)
    return torch.from_numpy(values)
