"""Parameter decomposition of a frozen GPT in three pools.

One pool says how much each component matters at a position, one fits the components, its blocks
sharing the sites out, one looks for the masks under which they do worst.

    atoll gradcheck examples/three_pool.py --mutants
"""

import torch

from atoll.pools import Counted, Through, Topology
from examples.decomposition import (
    SITES,
    C,
    CausalImportance,
    Components,
    T,
    V,
    ascend,
    first_sources,
    inputs,
    kl,
    masked,
    masks,
    mixed,
    positions,
    target,
    upper,
    weight,
)

top = Topology(rows=12)
ci = top.pool("ci", ranks=4)
layers = top.pool("layers", ranks=2, blocks=2)
ppgd = top.pool("ppgd", ranks=2)
top.axis("site", SITES, over=layers)
top.also_at(ci=3, layers=(2, 1), ppgd=6)
top.also_at(ci=2, layers=(2, 4), ppgd=6)
top.also_at(ci=4, layers=(3, 2), ppgd=1)


@top.rows
def tokens(index, draw):
    # Rows of different length, whose sums differ between ranks at all of these sizes.
    keep = torch.arange(T) < 1 + (index[:, None] ** 2 // 4) % T
    return (draw.uniform(T) * V).long(), keep


@top.parameters(owner=ci)
def importance():
    return CausalImportance(SITES)


@top.parameters(owner=layers)
def components(site):
    return Components(site)  # V [in, C], U [C, out]


@top.state(on=ppgd)
def sources(draw):
    return first_sources(draw.uniform(len(SITES), T, C + 1))


@top.value(on=ci)
def gates(importance, rows):  # {site: [rows, T, C]}; a block gets its sites, ppgd all
    return importance(inputs(rows))


@top.term(on=layers, coeff=3.0, once=True)
def faith(components, site):
    error = weight(site) - components.V @ components.U
    return Counted(error.square().sum(), error.numel(), "weights")


@top.term(on=layers, coeff=5.0)
def stoch(components, site, gates, rows, draw):
    mask = mixed(gates, draw.uniform(T, C + 1))
    apart = kl(target(rows), masked(rows, {site: (components, mask)}), rows)
    return Counted(apart, positions(rows), "positions x sites")


@top.term(on=ci, coeff=0.02)
def minimal(gates, rows):  # not linear in the sum over all positions
    return Through(
        upper(gates, rows),
        positions(rows),
        "positions",
        lambda used, n: (used / n * (1 + torch.log2(1 + used) / 2)).sum(),
    )


@top.term(on=ppgd, coeff=2.0)
def adversary(components, gates, sources, rows):
    sources.value = ascend(sources.value, components, gates, rows)
    mask = masks(gates, sources.value)
    logits = masked(rows, {site: (components[site], mask[site]) for site in SITES})
    return Counted(kl(target(rows), logits, rows), positions(rows), "positions")
