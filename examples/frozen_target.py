"""The frozen GPT that the three-pool example takes apart: planted, so that there are parts to find.

A trained model would have to be shipped or trained again to the same bits; random weights have no
parts. So the weights are written down: a token has two of eight features, each a direction of the
residual stream, and every site is a sum of eight rank-one matrices that read one feature each.
Two of the eight matter at a token, at the sites behind attention those of the tokens before it too.

Directions are rows of a Hadamard matrix and strengths are dyadic, so all sums are exact; the rest
are integers of Philox, scaled. Nothing here uses torch's generators: the weights are the same bits
in every process, thread and dtype.
"""

import copy
import hashlib
import threading
from collections.abc import Callable, Mapping
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.models.gpt import GPT, GPTConfig

Array = NDArray[np.float64]
Rows = tuple[Tensor, Tensor]  # tokens [n, T], and which positions count [n, T]
Instead = Callable[[Tensor], Tensor]  # what stands in a site's place, from its input to its output

T, V, WIDTH, FEATURES = 7, 16, 16, 8
CONFIG = GPTConfig(vocab=V, block=T, layers=2, heads=2, width=WIDTH)
SITES = [
    f"blocks.{block}.{matrix}"
    for block in range(CONFIG.layers)
    for matrix in ("attention.project", "mlp.expand", "mlp.project")
]
HIDDEN = 4 * WIDTH
SHAPES = {"attention.project": (WIDTH, WIDTH), "mlp.expand": (HIDDEN, WIDTH)}
SHAPES["mlp.project"] = (WIDTH, HIDDEN)


def table(name: str, *shape: int) -> Array:
    """Numbers in [-0.5, 0.5) with 24 bits, which depend on the name alone."""
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
    words = np.random.Philox(key=key).random_raw(int(np.prod(shape))) >> np.uint64(40)
    return (words.astype(np.float64) / 2**24 - 0.5).reshape(shape)


def width_in(site: str) -> int:
    """The numbers that a site reads at a position."""
    return SHAPES[site.split(".", 2)[2]][1]


def _hadamard(size: int) -> Array:
    """Orthogonal rows of 1 and -1."""
    rows = np.ones((1, 1))
    while len(rows) < size:
        rows = np.block([[rows, rows], [rows, -rows]])
    return rows


def _uneven(name: str) -> Array:
    """A factor of 0.5 to 1.5 for each hidden unit, in eighths: no two work quite alike."""
    return 1 + np.round(8 * table(name, HIDDEN)) / 8


def _planted() -> dict[str, Array]:
    """Every weight of the target by its name in the GPT."""
    directions = _hadamard(WIDTH) / 4  # orthonormal; the first eight are the tokens' features
    units = np.kron(np.eye(FEATURES), np.ones((1, HIDDEN // FEATURES)))  # eight hidden units each
    signs = np.tile([1.0, -1.0], HIDDEN // 2)
    token = np.arange(V)
    found = {
        "tokens.weight": 2 * (directions[token % 4] + directions[4 + token // 4]),
        "positions.weight": directions[8 : 8 + T] / 2,
        "norm.weight": np.ones(WIDTH),
        "head.weight": 2 * table("head", V, WIDTH),
    }
    for block in range(CONFIG.layers):
        name = f"blocks.{block}."
        reads = directions[:FEATURES] if block == 0 else directions[FEATURES:]
        order = (np.arange(FEATURES) * 3 + block) % FEATURES
        strength = 1 + np.arange(FEATURES)[:, None] / 8
        looks = table(name + "looks", 2 * WIDTH, WIDTH)  # queries and keys
        expands, projects = _uneven(name + "expands"), _uneven(name + "projects")
        copies = directions[:FEATURES].T @ directions[:FEATURES]
        found |= {
            name + "attention_norm.weight": np.ones(WIDTH),
            name + "mlp_norm.weight": np.ones(WIDTH),
            name + "attention.qkv.weight": np.concatenate([looks, copies]),
            name + "attention.project.weight": directions[FEATURES:].T
            @ (strength * directions[:FEATURES]),
            name + "mlp.expand.weight": (units * signs * expands).T @ (strength * reads),
            name + "mlp.project.weight": directions[order].T @ (units * projects / 2),
        }
    return found


class Site(nn.Module):
    """A matrix of the target that a call may put something else in the place of."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape), requires_grad=False)
        self.instead: Instead | None = None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) if self.instead is None else self.instead(x)


class _Models(threading.local):
    """A thread's own target for each dtype: what stands in its sites is no other thread's."""

    def __init__(self) -> None:
        self.by_dtype: dict[torch.dtype, tuple[GPT, dict[str, Site]]] = {}

    def get(self) -> tuple[GPT, dict[str, Site]]:
        dtype = torch.get_default_dtype()
        if dtype not in self.by_dtype:
            self.by_dtype[dtype] = _build(dtype)
        return self.by_dtype[dtype]


def _pattern() -> GPT:
    """The target's modules, with weights that are to be replaced."""
    with torch.random.fork_rng(devices=[]):  # the constructors draw
        model = GPT(CONFIG)
    for name in SITES:
        parent, _, child = name.rpartition(".")
        model.get_submodule(parent).register_module(child, Site(SHAPES[name.split(".", 2)[2]]))
    return model.requires_grad_(False)


# Made when this is imported, by one thread: to fork the generators is no matter for several.
_PATTERN = _pattern()
_models = _Models()


def _build(dtype: torch.dtype) -> tuple[GPT, dict[str, Site]]:
    model = copy.deepcopy(_PATTERN)
    weights = {
        name: torch.from_numpy(values.astype(np.float32)).to(dtype)
        for name, values in _planted().items()
    }
    model.load_state_dict(weights, assign=True)
    return model, {name: cast(Site, model.get_submodule(name)) for name in SITES}


def weight(site: str) -> Tensor:
    """A site's matrix as [in, out]."""
    return _models.get()[1][site].weight.T


def run(rows: Rows, instead: Mapping[str, Instead]) -> Tensor:
    """Logits [n, T, V] of the target with other functions in the place of some sites."""
    model, sites = _models.get()
    try:
        for name, function in instead.items():
            sites[name].instead = function
        logits: Tensor = model(rows[0])
        return logits
    finally:
        for site in sites.values():
            site.instead = None


@torch.no_grad()
def target(rows: Rows) -> Tensor:
    """Log-probabilities [n, T, V] of the target itself."""
    return run(rows, {}).log_softmax(-1)


@torch.no_grad()
def inputs(rows: Rows) -> dict[str, Tensor]:
    """What every site reads, {site: [n, T, in]}."""
    seen: dict[str, Tensor] = {}

    def noting(site: str) -> Instead:
        def note(x: Tensor) -> Tensor:
            seen[site] = x
            return x @ weight(site)

        return note

    run(rows, {site: noting(site) for site in SITES})
    return seen
