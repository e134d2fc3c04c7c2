"""An encoder feeds four heads; a head pool of two blocks shares them out."""

import torch
from torch import nn

from atoll.pools import Counted, Through, Topology

top = Topology(rows=24)
encoder = top.pool("encoder", ranks=4)
heads = top.pool("heads", ranks=2, blocks=2)
top.axis("head", ["a", "b", "c", "d"], over=heads)


@top.rows
def batch(index, draw):  # index: global row numbers; draw: noise keyed by them
    return {"x": draw.normal(6), "y": draw.normal(4), "tokens": 1 + index**2 % 5}


@top.parameters(owner=encoder)
def weights():
    return nn.Linear(6, 4)


@top.parameters(owner=heads)
def reader(head):  # asks for `head`: one module per head, on the block that has it
    return nn.Linear(4, 4, bias=False)


@top.value(on=encoder)  # sent to the heads because `fit` asks for it; its gradient comes back
def code(weights, rows):
    return torch.tanh(weights(rows["x"]))


@top.term(on=heads, coeff=5.0)
def fit(code, reader, head, rows):
    error = (reader(code) - rows["y"]).square().sum(1) * rows["tokens"]
    return Counted(error.sum(), int(rows["tokens"].sum()), unit="tokens x heads")


@top.term(on=heads, coeff=3.0, once=True)  # every replica has it, one contributes
def decay(reader, head):
    return Counted(reader.weight.square().sum(), reader.weight.numel(), unit="weights")


@top.term(on=encoder, coeff=0.7)  # not linear in the sum over rows
def sparse(code):
    used = code.square().sum(0)
    return Through(used, len(code), "rows", lambda s, n: (s / n * torch.log2(1 + s)).sum())
