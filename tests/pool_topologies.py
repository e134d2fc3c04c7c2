"""Small topologies, one for each shape that a plan may take; each call makes a new one."""

from collections.abc import Callable

import torch
from torch import nn

from atoll.pools import Counted, Through, Topology


def _rows(top: Topology) -> None:
    @top.rows
    def batch(index, draw):
        return {"x": draw.normal(3), "y": draw.normal(2), "n": 1 + index**2 % 5}


def chain() -> Topology:
    """Values that feed values, over three pools in a row; several paths lead to `wide`."""
    top = Topology(rows=12)
    first, second, third = (top.pool(n, ranks=r) for n, r in (("a", 2), ("b", 4), ("c", 1)))
    top.also_at(a=3, b=1, c=3)
    _rows(top)

    @top.parameters(owner=first)
    def wide():
        return nn.Linear(3, 4)

    @top.parameters(owner=second)
    def deep():
        return nn.Linear(4, 4)

    @top.value(on=first)
    def low(wide, rows):
        return torch.tanh(wide(rows["x"]))

    @top.value(on=second)
    def mid(low, deep):
        return torch.tanh(deep(low)) + low

    @top.term(on=third, coeff=2.0)
    def last(low, mid, rows):
        loss = ((mid * low).sum(1) - rows["y"][:, 0]).square() * rows["n"]
        return Counted(loss.sum(), int(rows["n"].sum()), "tokens")

    @top.term(on=first, coeff=0.3)
    def near(low, mid, wide):
        apart = (low - mid).square().sum() + len(low) * wide.weight.square().sum()
        return Counted(apart, len(low), "rows")

    return top


def produced_by_item() -> Topology:
    """A value of each item, made on a blocked pool, consumed by one that takes them all."""
    top = Topology(rows=12)
    parts = top.pool("parts", ranks=2, blocks=2)
    whole = top.pool("whole", ranks=4)
    top.also_at(parts=(3, 1), whole=3)
    top.axis("part", ["p", "q", "r"], over=parts)
    _rows(top)

    @top.parameters(owner=parts)
    def piece(part):
        return nn.Linear(3, 2)

    @top.parameters(owner=whole)
    def mix():
        return nn.Linear(2, 2)

    @top.value(on=parts)
    def seen(piece, part, rows):
        return torch.tanh(piece(rows["x"]))

    @top.term(on=whole, coeff=1.5)
    def joint(seen, mix, rows):
        total = mix(sum(seen.values())) - rows["y"]
        return Counted((total.square().sum(1) * rows["n"]).sum(), int(rows["n"].sum()), "tokens")

    @top.term(on=whole, coeff=0.5)
    def apart(seen, mix, part, rows):
        return Counted(mix(seen).square().sum(), int(rows["n"].sum()), "tokens x parts")

    return top


def borrowed_by_blocks() -> Topology:
    """Parameters of one pool, with and without items, used by another pool's blocks."""
    top = Topology(rows=12)
    keep = top.pool("keep", ranks=3)
    use = top.pool("use", ranks=2, blocks=2)
    top.also_at(keep=1, use=(3, 4))
    top.axis("site", ["s", "t", "u"], over=use)
    _rows(top)

    @top.parameters(owner=keep)
    def common():
        return nn.Linear(3, 2)

    @top.parameters(owner=keep)
    def special(site):
        return nn.Linear(2, 2)

    @top.term(on=use, coeff=2.5)
    def fit(common, special, site, rows):
        error = (special(torch.tanh(common(rows["x"]))) - rows["y"]).square().sum(1) * rows["n"]
        return Counted(error.sum(), int(rows["n"].sum()), "tokens x sites")

    @top.term(on=use, coeff=0.4, once=True)
    def small(special, site):
        return Counted(special.weight.square().sum(), special.weight.numel(), "weights")

    @top.term(on=keep)
    def own(common, rows):
        return Counted(common(rows["x"]).square().sum(), len(rows["x"]), "rows")

    return top


def global_sums() -> Topology:
    """Terms that are not linear in a sum: of a whole pool, and of each item by blocks."""
    top = Topology(rows=12)
    one = top.pool("one", ranks=4)
    many = top.pool("many", ranks=2, blocks=2)
    top.also_at(one=2, many=(1, 6))
    top.axis("k", ["k0", "k1", "k2", "k3"], over=many)
    _rows(top)

    @top.parameters(owner=one)
    def weights():
        return nn.Linear(3, 2)

    @top.parameters(owner=many)
    def gain(k):
        return nn.Linear(2, 2)

    @top.value(on=one)
    def code(weights, rows):
        return torch.tanh(weights(rows["x"]))

    @top.term(on=one, coeff=0.7)
    def entropy(code, rows):
        used = (code.square() * rows["n"][:, None]).sum(0)
        return Through(used, int(rows["n"].sum()), "tokens", lambda s, n: (s / n * s.log()).sum())

    @top.term(on=many, coeff=0.2)
    def balance(code, gain, k, rows):
        used = gain(code).square().sum(0)
        return Through(used, len(code), "rows", lambda s, n: (s / n * (1 + s).log()).sum())

    @top.term(on=many, coeff=3.0)
    def fit(code, gain, k, rows):
        error = (gain(code) - rows["y"]).square().sum(1) * rows["n"]
        return Counted(error.sum(), int(rows["n"].sum()), "tokens")

    return top


def asked_elsewhere() -> Topology:
    """An axis asked for on a pool that does not share it out; state by item; frozen and tied."""
    top = Topology(rows=12)
    own = top.pool("own", ranks=1, blocks=2)
    other = top.pool("other", ranks=4)
    top.also_at(own=(2, 3), other=1)
    top.axis("site", ["h.0/x", "h.1/x"], over=own)
    _rows(top)

    @top.parameters(owner=own)
    def part(site):
        return nn.Linear(3, 2)

    @top.parameters(owner=other)
    def gate():
        return Tied()

    @top.state(on=other)
    def source(site, draw):
        return draw.uniform(2)

    @top.value(on=other)
    def gates(gate, site, rows):
        return torch.sigmoid(gate(rows["x"]) + len(site))

    @top.term(on=own, coeff=2.0)
    def fit(part, gates, site, rows):
        error = (part(rows["x"]) * gates - rows["y"]).square().sum(1) * rows["n"]
        return Counted(error.sum(), int(rows["n"].sum()), "tokens x sites")

    @top.term(on=other, coeff=1.1)
    def worst(part, gates, source, site, rows):
        source.value = source.value + 0.1 * gates.detach()
        error = (part(rows["x"]) * gates * source.value).square().sum(1) * rows["n"]
        return Counted(error.sum(), int(rows["n"].sum()), "tokens x sites")

    return top


class Tied(nn.Module):
    """A parameter under two names, a frozen one, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.again = nn.Linear(3, 3)
        self.again.weight = self.first.weight
        self.last = nn.Linear(3, 2)
        self.last.bias.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x):
        return self.last(torch.tanh(self.again(torch.tanh(self.first(x))))) * self.scale


SHAPES: dict[str, Callable[[], Topology]] = {
    one.__name__: one
    for one in (chain, produced_by_item, borrowed_by_blocks, global_sums, asked_elsewhere)
}
